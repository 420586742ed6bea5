"""State that a failed attempt has changed: buffers that a forward adds, batches that it writes to, the gradient scaler."""

import copy

import pytest
import torch
from helpers.problems import class_batch, class_targets
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented without a public module

from balanced_parallel import (
    Along,
    ByCost,
    DataParallelCriterion,
    DataParallelModel,
    Precision,
    TrainStep,
    simulate,
)


class OutOfMemoryOnce(nn.Module):
    """Raises in one forward, after the layers before it have run."""

    fails = False

    def forward(self, inputs):
        if self.fails:
            OutOfMemoryOnce.fails = False
            raise torch.OutOfMemoryError("no memory")
        return inputs


class SetsBuffers(nn.Module):
    """Makes a buffer for the rows of the first forward, and registers another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, inputs):
        if self.mean is None:
            self.mean = inputs.new_full((len(inputs), 1), 0.5)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", self.mean + 2)
        return (inputs - self.mean) / self.scale


class Momentum(nn.Linear):
    """A layer that another one follows in each forward, as in MoCo."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(4, 4)
        self.key = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, inputs):
        self.key.weight.detach().lerp_(self.weight.detach(), 0.5)
        return super().forward(inputs) - self.key(inputs)


class WritesInPlace(nn.Module):
    def forward(self, inputs):
        return inputs.mul_(2) + 0


def make_step(layer, *, devices=("cpu",), whole=False, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(layer, nn.Linear(4, 5), OutOfMemoryOnce()).to(devices[0])
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), whole=whole)
    model = DataParallelModel(net, list(devices))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return TrainStep(model, criterion, optimizer, **{"micro_batch_size": "auto", **settings}), net


def make_batch(number=0):
    torch.manual_seed(number)
    return class_batch(8)


def test_buffers_that_a_forward_makes_are_those_of_the_last_attempt():
    results = []
    for fails in (False, True):
        step, net = make_step(SetsBuffers())
        OutOfMemoryOnce.fails = fails
        if not fails:
            step.micro_batch_size = 4
        losses = [step(*make_batch(number)) for number in (1, 2)]
        assert step.micro_batch_size == 4
        results.append([*losses, *net.state_dict().values()])
    assert all(map(torch.equal, *results))


CHANGED = (
    r"a tensor of the batch \(torch.float32, shape \(8, 4\)\) was changed in place since it was passed, "
    "but has to run again"
)


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_batch_that_was_changed_in_place_does_not_run_again(is_marked):
    step, net = make_step(WritesInPlace())
    before = copy.deepcopy(net.state_dict())
    inputs, targets = make_batch()
    OutOfMemoryOnce.fails = True
    with pytest.raises(
        torch.OutOfMemoryError,
        match=f"{CHANGED}.*clone.*or give a micro_batch_size that fits: no memory",
    ):
        step(Along(inputs, 0) if is_marked else inputs, targets)
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    assert step(*make_batch()).isfinite()  # the next batch is another one


def test_rows_that_were_changed_before_apply_do_not_run_again():
    step, _ = make_step(nn.Identity())
    inputs, targets = make_batch()
    OutOfMemoryOnce.fails = True
    step.add(inputs, targets)
    inputs.zero_()
    with pytest.raises(torch.OutOfMemoryError, match=CHANGED):
        step.apply()


def test_two_passes_refuse_inputs_that_the_first_has_changed():
    """The second forward would run on other inputs."""
    step, _ = make_step(WritesInPlace(), micro_batch_size=4, whole=True)
    with pytest.raises(
        RuntimeError, match=f"a loss whose rows depend on each other takes two forwards: {CHANGED}"
    ):
        step(*make_batch())
    step, _ = make_step(WritesInPlace(), whole=True)
    assert step(*make_batch()).isfinite()


@pytest.mark.parametrize("micro_batch_size", [None, "auto"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("given", [False, True])
def test_an_allocation_that_fails_in_the_first_use_of_the_scaler_leaves_one_that_works(
    number, micro_batch_size, given
):
    """It makes two tensors. With the first alone, each ``update()`` raised ``AssertionError``."""
    with simulate(1) as cluster:
        scaler = torch.amp.GradScaler("sim", init_scale=2.0**10)
        precision = Precision("fp16", scaler=scaler if given else None)
        loss = torch.ones((), device="sim:0")
        own = precision.scaler_on(loss.device)
        step, _ = make_step(
            nn.Identity(), devices=["sim:0"], micro_batch_size=micro_batch_size, precision=precision
        )
        failing = own.scale

        def scale(loss):
            cluster.fail_allocation(number)
            own.scale = failing
            return failing(loss)

        own.scale = scale
        try:
            step(*make_batch())
        except torch.OutOfMemoryError:
            assert micro_batch_size is None
        for k in range(2):
            assert step(*make_batch(k)).isfinite()
        assert own.get_scale() == (2.0**10 if given else 2.0**16)


DROPPED = (
    "the rows that were added since the last update are dropped: add them again before apply()"
)


@pytest.mark.parametrize("size", [None, "auto"])
def test_a_failed_add_says_that_the_rows_before_it_are_dropped(size):
    uneven = torch.zeros(4, 4), torch.zeros(5, 4)
    step, _ = make_step(nn.Identity(), micro_batch_size=size)
    with pytest.raises(ValueError, match="different numbers of rows") as first:
        step.add(uneven, class_targets(4))
    assert not hasattr(first.value, "__notes__")
    for bad in (uneven, torch.zeros(4, 3)):
        step.add(*make_batch())
        with pytest.raises((ValueError, RuntimeError)) as caught:
            step.add(bad, class_targets(4))
        # Nobody takes them for another loss's.
        assert all(parameter.grad is None for parameter in step.model.parameters())
        assert caught.value.__notes__[-1] == DROPPED


def test_rows_added_after_a_failed_add_run_again_as_they_ran_first():
    """Batches of other numbers of rows left the rows before them in the window, but not in the list of those to run again."""
    losses = []
    for fails in (False, True):
        step, _ = make_step(nn.Identity())
        step.add(*make_batch(0))
        with pytest.raises(ValueError, match="different numbers of rows"):
            step.add((torch.zeros(4, 4), torch.zeros(5, 4)), class_targets(4))
        OutOfMemoryOnce.fails = fails
        step.add(*make_batch(1))
        losses.append(step.apply())
    torch.testing.assert_close(*losses)


BAD = [
    *(
        ("micro_batch_size", bad, ValueError, " of rows per device, or None")
        for bad in (0, -3, 1.5, True, "auto", "4")
    ),
    *(("micro_batch_cost", bad, ValueError, "") for bad in (0, -3.0, float("nan"))),
    ("micro_batch_cost", "4", TypeError, ""),
]


@pytest.mark.parametrize(("name", "bad", "error", "expected"), BAD)
def test_bad_limits_that_are_set_later_raise_the_error_of_the_constructor(
    name, bad, error, expected
):
    cut = {"micro_batch_size": None, "cut": ByCost(len, collate=tuple, limit=4)}
    step, _ = make_step(nn.Identity(), **(cut if name == "micro_batch_cost" else {}))
    before = getattr(step, name)
    with pytest.raises(error, match=f"{name}=.*, expected a positive number{expected}"):
        setattr(step, name, bad)
    assert getattr(step, name) == before


class FailsOnce(TorchDispatchMode):
    """Raises in place of the first call of an operator."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) == self.name:
            self.name = None
            raise torch.OutOfMemoryError("no memory")
        return function(*args, **(kwargs or {}))


def test_state_without_room_for_its_copies_is_copied_again():
    """The error was the caller's on the CPU, though nothing had run yet."""
    step, _ = make_step(nn.BatchNorm1d(4))
    with FailsOnce("aten.clone.default") as mode:
        assert step(*make_batch()).isfinite()
    assert mode.name is None
    assert step.micro_batch_size is None


WRITTEN = (
    r"a parameter \(torch.float32, shape \(4, 4\)\) was changed in place by a forward that has to run "
    "again, expected a change"
)


@pytest.mark.parametrize("updates", [0, 1])
def test_parameters_that_a_forward_writes_are_an_error_of_the_second_attempt(updates):
    step, _ = make_step(Momentum())
    for _ in range(updates):
        step(*make_batch())
    OutOfMemoryOnce.fails = True
    with pytest.raises(RuntimeError, match=WRITTEN):
        step(*make_batch())
    assert step(*make_batch()).isfinite()
    two_passes = {"micro_batch_size": 2, "whole": True}
    small_forwards = {"micro_batch_size": None, "reproducible": True}
    for settings in (two_passes, small_forwards):
        with pytest.raises(RuntimeError, match=WRITTEN):
            make_step(Momentum(), **settings)[0](*make_batch())
