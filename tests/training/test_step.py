"""``TrainStep``: one effective batch, one exact update, in every precision.

Copies of a step.

A step that failed before its update can be repeated, with the result that it would have had.

``step(..., return_outputs=True)``: the outputs of a batch, for metrics.
"""

import contextlib
import copy
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.problems import (
    CLASSES,
    assert_equal,
    assert_same_gradients,
    build_net,
    class_batch,
    class_targets,
    gradients,
    plain_program,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import pairs
from helpers.steps import batch, make_step, parallel_step, rows_of, run
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    TrainStep,
    gather,
    parallelize,
)
from balanced_parallel.batch.plan import consecutive
from balanced_parallel.batch.rows import Batch, Cut


def test_step_on_one_device_is_bitwise_equal_to_the_plain_program():
    net = build_net().float()
    x, target = class_batch(11, 3)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    assert torch.equal(make_step(net, devices=1, lr=0.0)(x, target), loss)
    assert all(map(torch.equal, gradients(net), expected))


def train(step, numbers, mine):
    losses = [step(*(tensor[mine] for tensor in batch(number))) for number in numbers]
    return torch.stack(
        [*losses, *(parameter.detach().sum() for parameter in step.model.parameters())]
    )


DUPLICATES = {"copied": copy.deepcopy, "pickled": lambda parts: pickle.loads(pickle.dumps(parts))}


def check_copied(rank, ranks, name, whole, precision):
    """The copy and the original go on as one that was never copied."""
    mine = rows_of(rank, ranks)

    def make():
        net = build_net()
        devices = ["cpu"] * 3 if ranks == 1 else None
        model, criterion = parallelize(
            net, nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5)), devices
        )
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
        other = sgd(net[2])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        settings = {"micro_batch_size": 2, "precision": precision, "scheduler": scheduler}
        return (
            model,
            criterion,
            [optimizer, other],
            TrainStep(model, criterion, [optimizer, other], **settings),
        )

    expected = train(make()[-1], range(5), mine)
    parts = make()
    step = parts[-1]
    train(step, range(2), mine)
    duplicate = DUPLICATES[name]
    copied = duplicate(parts)[-1] if whole else duplicate(step)
    assert not {id(p) for p in copied.model.parameters()} & {id(p) for p in step.model.parameters()}
    for one in (copied, step):
        assert_close(train(one, range(2, 5), mine), expected[2:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "whole", "duplicate", "precision"),
    pairs([1, 2], [False, True], [*DUPLICATES], ["fp16", "fp32"], fast=4),
)
def test_copies_of_a_step_train_like_the_original(ranks, whole, duplicate, precision):
    run(ranks, check_copied, duplicate, whole, precision)


class Fails(nn.Module):
    """Raises in its forward or in its backward, as often as it is told."""

    def __init__(self):
        super().__init__()
        self.left = {"forwards": 0, "backwards": 0}  # Numbers of a module would be put back.

    def forward(self, inputs):
        if self.left["forwards"]:
            self.left["forwards"] -= 1
            raise ArithmeticError("a forward that fails")
        return _Fails.apply(inputs, self)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, module):
        ctx.module = module
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.module.left["backwards"]:
            ctx.module.left["backwards"] -= 1
            raise ArithmeticError("a backward that fails")
        return gradient, None


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(
            nn.Linear(4, 4),
            Fails(),
            nn.Linear(4, 6),
            Fails(),
            nn.Tanh(),
            nn.Linear(6, CLASSES),
            Fails(),
        )


def fail_in_optimizer(step):
    def raise_once(*_):
        handle.remove()
        raise ArithmeticError("an optimizer that fails")

    handle = step.optimizer.register_step_pre_hook(raise_once)


def fail_in_hook(net):
    def raise_once(parameter):
        handle.remove()
        raise ArithmeticError("a hook that fails")

    handle = net[0].bias.register_post_accumulate_grad_hook(raise_once)


def fail_at_bucket(net):
    """Fails where the gradient of a parameter is accumulated, before its bucket is full."""

    def raise_once(*_):
        handle.remove()
        raise ArithmeticError("an accumulation that fails")

    handle = get_gradient_edge(net[0].bias).node.register_prehook(raise_once)


# Each is a function of a rank, its net and its step.
FAILURES = {
    "last layer of both": lambda rank, net, step: net[6].left.update(backwards=1),
    "first layer of both": lambda rank, net, step: net[1].left.update(backwards=1),
    "different layers": lambda rank, net, step: net[3 if rank else 6].left.update(backwards=1),
    "one rank": lambda rank, net, step: net[3].left.update(backwards=rank),
    "output of one rank": lambda rank, net, step: net[6].left.update(backwards=rank),
    "bucket of one rank": lambda rank, net, step: fail_at_bucket(net) if rank else None,
    "forward of both": lambda rank, net, step: net[3].left.update(forwards=1),
    "optimizer of both": lambda rank, net, step: fail_in_optimizer(step),
    "hook of both": lambda rank, net, step: fail_in_hook(net),
}


def check_failure(rank, fail, micro_batch_size, precision, hooked):
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    net = Net()
    net[0].weight.requires_grad_("bucket" not in fail)
    plain = Plain(net, nn.CrossEntropyLoss(), torch.optim.AdamW)
    model, criterion = parallelize(net, nn.CrossEntropyLoss())
    if hooked:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    settings = {"micro_batch_size": micro_batch_size, "precision": precision}
    step = TrainStep(model, criterion, optimizer, **settings)
    error = 2e-2 if precision == "fp16" else 1e-10
    for number in range(3):  # the reducer makes its buckets anew after the first
        inputs, targets = batch(number)
        mine = rows_of(rank, 2)
        for _ in range(2):
            FAILURES[fail](rank, net, step)
            waits = "one rank" in fail and rank == 0
            message = "1 of 2 ranks failed, expected none" if waits else "fails"
            with pytest.raises(RuntimeError if waits else ArithmeticError, match=message):
                step(inputs[mine], targets[mine])
        loss = plain(inputs, targets)
        assert_close(step(inputs[mine], targets[mine]), loss, rtol=error, atol=error)
        assert_same_gradients(gradients(net), gradients(plain.module), error)
        net.load_state_dict(plain.module.state_dict())


SETTINGS = [("fp32", None, False), ("fp16", 2, False), ("fp32", None, True)]


@pytest.mark.parametrize(("fail", "settings"), [*zip(FAILURES, itertools.cycle(SETTINGS))])
def test_failed_step_can_be_repeated_on_ranks(fail, settings):
    precision, micro_batch_size, hooked = settings
    run_ranks(2, check_failure, fail, micro_batch_size, precision, hooked)


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "sizes"),
    [(11, None, (4, 4, 3)), (11, 2, (2, 2, 2, 2, 2, 1)), (7, 1, (1,) * 7), (2, None, (1, 1))],
)
def test_return_outputs_has_the_outputs_before_the_update(double, rows, micro_batch_size, sizes):
    net = build_net()
    inputs, targets = class_batch(rows)
    expected = net(inputs).detach()
    step = make_step(net, devices=3, micro_batch_size=micro_batch_size)
    loss, outputs = step(inputs, targets, return_outputs=True)
    assert_equal(loss, F.cross_entropy(expected, targets))
    assert_equal(gather(outputs), expected)
    assert outputs.sizes == sizes
    assert [len(output) for output in outputs] == list(sizes)
    assert not any(output.requires_grad for output in outputs)
    # It takes them as it takes the model's own.
    assert_equal(DataParallelCriterion(nn.CrossEntropyLoss())(outputs, targets), loss)


@pytest.mark.parametrize("is_asked", [False, True])
def test_outputs_are_kept_only_with_return_outputs(is_asked):
    net = build_net()
    alive = []
    step = make_step(net, devices=3, micro_batch_size=1)
    seen = []

    def note(model, inputs, outputs):
        seen.extend(weakref.ref(output.untyped_storage()) for output in outputs)

    step.model.register_forward_hook(note)

    def count(gradient):
        alive.append(sum(reference() is not None for reference in seen))

    net[0].register_forward_hook(lambda *of: of[2].register_hook(count) and None)
    step(*class_batch(7), **({"return_outputs": True} if is_asked else {}))
    assert len(seen) == 7
    assert is_asked == (max(alive) == 7)
    assert is_asked or max(alive) == 0


@on_ranks(2)
def test_return_outputs_has_the_rows_of_each_rank(rank):
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    targets = class_targets(6)
    net = build_net()
    expected = net(inputs).detach()
    step = parallel_step(net, lr=0.0, micro_batch_size=2)
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    loss, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    assert_equal(loss, F.cross_entropy(expected, targets))
    assert_equal(torch.cat(list(outputs)), expected[mine])
    assert outputs.sizes == ((1,), (2, 2, 1))[rank]
    assert_equal(gather(outputs), expected)
    mine = slice(0, 0) if rank == 0 else slice(0, 6)
    loss, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    assert len(outputs) == 3 * rank
    assert_equal(loss, F.cross_entropy(expected, targets))


class BySizes(Cut):
    """Cuts a batch into shards of given sizes: a way of cutting is one file."""

    def __init__(self, sizes):
        self.sizes = sizes

    def open(self, inputs, targets, mark, *, unit, is_strict):
        batch = SizedBatch(*mark(inputs, targets))
        batch.sizes = self.sizes
        return batch


class SizedBatch(Batch):
    def plan(self, devices, weights, limit, agree):
        parts = consecutive(self.sizes)
        for start in range(0, len(parts), len(devices)):
            yield [self.shard(*each) for each in zip(parts[start:], devices, strict=False)]


@pytest.mark.parametrize("reproducible", [False, True])
def test_another_way_of_cutting_needs_no_change_of_the_step(reproducible):
    def train(**settings):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5 if reproducible else 0.0)).double()
        step = make_step(net, reproducible=reproducible, **settings)
        return [step(torch.randn(7, 4).double(), torch.randint(3, (7,))), *net.parameters()]

    assert_close(train(cut=BySizes([1, 3, 2, 1])), train())


def test_each_part_of_an_update_runs_in_a_block():
    events = []

    @contextlib.contextmanager
    def block():
        events.append("enter")
        yield
        events.append("exit")

    net = build_net()
    net.register_forward_hook(lambda *_: events.append("forward"))
    step = make_step(net, devices=1, surround=block)
    inputs = torch.randn(4, 4)
    targets = torch.randint(5, (4,))
    step(inputs, targets)
    assert events == ["enter", "forward", "exit"]
    step.add(inputs, targets)
    step.apply()
    assert events[3:] == ["enter", "forward", "exit", "enter", "exit"]
    assert "surround: test_each_part" in repr(step)


@pytest.mark.parametrize("name", ["max_grad_norm", "skip_above"])
@pytest.mark.parametrize("norm", [-1.0, 0, float("nan"), True, "5"])
def test_norms_that_are_assigned_later_are_checked(name, norm):
    """``step.max_grad_norm = -1`` turned updates around: the loss rose."""
    step = make_step(build_net(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=f"{name}={norm!r}, expected a positive number"):
        setattr(step, name, norm)
    assert step.max_grad_norm == 1.0
    setattr(step, name, 2.0)
    setattr(step, name, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "bf16"),
        ("reproducible", "bits"),
        ("cut", None),
        ("criterion", nn.MSELoss()),
        ("model", build_net()),
        ("optimizer", torch.optim.SGD(build_net().parameters())),
        ("scheduler", None),
    ],
)
def test_settings_of_the_constructor_alone_are_not_assigned_later(name, value):
    """``step.reproducible = "bits"`` was taken, and did nothing. An optimizer of another model trained nothing."""
    step = make_step(build_net())
    for each in (step, copy.deepcopy(step)):
        before = getattr(each, name)
        with pytest.raises(
            AttributeError,
            match=rf"{name} was assigned to a TrainStep, .*TrainStep\(..., {name}=...\)",
        ):
            setattr(each, name, value)
        assert getattr(each, name) is before
