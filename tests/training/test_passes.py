"""Losses whose rows depend on each other: any split gives the update of the plain program."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.coupled import (
    assert_same_update,
    coupled_problem,
    gradients_of,
    plain_update,
)
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients
from helpers.ranks import run_ranks
from helpers.slow import slow
from helpers.steps import make_step, parallel_step, run
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DiceLoss,
    TrainStep,
    gather,
    parallelize,
    simulate,
)


class Noisy(nn.Module):
    """Dropout, batch norm, and random numbers of Python and numpy in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, CLASSES)
        ).double()

    def forward(self, inputs):
        return self.layers(inputs) * (1 + random.random()) * (1 + np.random.rand())


@pytest.mark.parametrize("kind", ["correlation", "dice of all"])
def test_both_passes_draw_the_same_numbers_and_statistics_move_once(kind):
    _, criterion, inputs, targets = coupled_problem(kind, rows=12)
    plain = Noisy()
    net = Noisy()
    for seed in range(2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        loss = criterion.module(
            torch.cat([plain(piece) for piece in inputs.split(4)]), targets
        )  # one graph of all micro-batches
        plain.zero_grad()
        loss.backward()
        after = torch.rand(1), random.random(), np.random.rand()
        step = make_step(net, criterion, devices=1, lr=0.0, micro_batch_size=4)
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        found, outputs = step(inputs, targets, return_outputs=True)
        assert (torch.rand(1), random.random(), np.random.rand()) == after
        assert_close(found, loss)
        assert_close(gather(outputs).shape, (12, CLASSES))
        assert_same_gradients(gradients(net), gradients(plain))
        assert_close(list(net.buffers()), list(plain.buffers()))


@pytest.mark.parametrize(("size", "expected"), [(None, [11]), (6, [6, 5] * 2)])
def test_one_micro_batch_takes_one_pass(size, expected):
    module, criterion, inputs, targets = coupled_problem("correlation")
    rows = []
    module.register_forward_hook(lambda module, arguments, output: rows.append(len(arguments[0])))
    make_step(module, criterion, devices=1, micro_batch_size=size)(inputs, targets)
    assert rows == expected


SMALL = {
    "all outputs": DataParallelCriterion(
        lambda output, target: 1e-7 * F.cross_entropy(output @ output.t(), target), whole=True
    ),
    "sums": DataParallelCriterion(
        AdditiveLoss(
            lambda output, target: output.float().exp().sum(0),
            lambda total: 1e-7 * total.log().sum(),
        )
    ),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [None, 2])
def test_small_derivatives_do_not_underflow_in_float16(name, size):
    found = {}
    for precision in ("fp32", "fp16"):
        net = build_net()
        step = make_step(net, SMALL[name], lr=0.0, micro_batch_size=size, precision=precision)
        step(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.arange(7))
        found[precision] = gradients(net)
    assert_same_gradients(
        [one * 1e7 for one in found["fp16"]], [one * 1e7 for one in found["fp32"]], tolerance=2e-2
    )


def faulty_updates(rank, ranks, kind, faults):
    """Returns the second updates of some steps: of two undisturbed ones, and of those with one rank out of memory somewhere."""
    found = []
    with simulate(2) as cluster:
        for size, fault, part in [
            (None, None, 0),
            (4, None, 0),
            *(("auto", *one) for one in faults),
        ]:
            module, criterion, inputs, targets = coupled_problem(kind)
            if ranks == 1:
                module.to("sim:0"), criterion.to("sim:0")
            model, criterion = parallelize(
                module, criterion, cluster.devices if ranks == 1 else None
            )
            parameters = [*model.parameters(), *criterion.parameters()]
            step = TrainStep(
                model, criterion, torch.optim.SGD(parameters, 0.1), micro_batch_size=size
            )
            mine = slice(None) if ranks == 1 else [slice(7), slice(7, 11)][rank]
            step(inputs[mine], targets[mine])
            before = cluster.allocations
            if rank == fault:
                cluster.fail_allocation(1 + int(part * found[0][-1]))
            loss = step(inputs[mine], targets[mine]).cpu()
            gradients = {name: one.cpu() for name, one in gradients_of(module, criterion).items()}
            found.append((loss, gradients, step.micro_batch_size, cluster.allocations - before))
    return found


FAULTS = [
    (1, "pairs", range(8)),
    slow(1, "dice", range(8)),
    (2, "correlation", (0, 4)),
    # The derivatives of the loss itself, from 1 to 6, are computed again where memory was too small.
    slow(2, "correlation", (1, 2, 7)),
    slow(2, "pairs", (0, 2, 4, 6)),
]


@pytest.mark.parametrize(("ranks", "kind", "parts"), FAULTS)
def test_an_out_of_memory_runs_the_window_again_in_smaller_micro_batches(ranks, kind, parts):
    faults = [(rank, part / 8) for part in parts for rank in range(ranks)]
    for updates in run(ranks, faulty_updates, kind, faults):
        sizes = [size for _, _, size, _ in updates[2:]]
        assert {3 if ranks == 1 else 4} <= set(sizes) <= ({None, 3} if ranks == 1 else {None, 4, 2})
        for *found, _size, _ in updates[1:]:
            assert_same_update(found, updates[0][:2])


def test_a_window_without_rows_changes_nothing_and_one_failure_is_forgotten():
    module, criterion, inputs, targets = coupled_problem("dice")
    step = make_step(module, criterion, devices=1, micro_batch_size=4)
    with pytest.warns(UserWarning, match="no target of this batch was counted"):
        assert step(inputs[:0], targets[:0]).isnan()
    step.add(inputs, targets[:3])
    with pytest.raises(RuntimeError, match="expected apply"):
        step.state_dict()
    with pytest.raises(ValueError, match="the targets have 3 rows, but the inputs have 11"):
        step.apply()
    assert_same_update(
        (step(inputs, targets), gradients_of(module, criterion)), plain_update("dice")
    )


class Scaled(nn.Linear):
    """Multiplies by a buffer, which ranks take from rank 0 at first and after each update."""

    def __init__(self, scale):
        super().__init__(4, CLASSES, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(float(scale), dtype=torch.float64))

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


def scaled_update(rank, scale):
    torch.manual_seed(0)
    net = Scaled(scale)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    targets = torch.randint(CLASSES, (8,))
    step = parallel_step(net, DiceLoss(), devices=["cpu"], lr=0.0, micro_batch_size=2)
    half = slice(4 * rank, 4 * rank + 4)
    step(inputs[half], targets[half])
    net.scale.fill_(scale + rank)  # rank 1 has another one
    step(inputs[half], targets[half])
    loss = step(inputs[half], targets[half])
    return loss, gradients_of(net, step.criterion)


def test_both_passes_have_the_buffers_of_rank_0_that_the_update_before_has_shared():
    torch.manual_seed(0)
    net = Scaled(3)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    targets = torch.randint(CLASSES, (8,))
    loss = DiceLoss()(net(inputs), targets)
    loss.backward()
    for found in run_ranks(2, scaled_update, 3):
        assert_same_update(
            found, (loss.detach(), gradients_of(net, DataParallelCriterion(DiceLoss())))
        )


class FullDevice(nn.Linear):
    def forward(self, inputs):
        if dist.get_rank() == 0:
            raise torch.OutOfMemoryError("the memory of rank 0 is full")
        return super().forward(inputs)


def memory_error(rank):
    step = parallel_step(
        FullDevice(4, CLASSES),
        DataParallelCriterion(DiceLoss(), whole=True),
        devices=["cpu"],
        micro_batch_size="auto",
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(torch.randn(4, 4), torch.randint(CLASSES, (4,)))
    return str(caught.value)


def test_errors_name_the_memory_of_another_rank():
    errors = run_ranks(2, memory_error)
    for error, reason in zip(
        errors, ("the memory of rank 0 is full", "1 of 2 ranks ran out of memory"), strict=True
    ):
        assert error.startswith(f"one row per device does not fit: {reason}")
