"""Losses whose rows depend on each other: any split gives the update of the plain program."""

import random

import numpy as np
import pytest
import torch
from helpers.coupled import (
    assert_same_update,
    coupled_problem,
    gradients_of,
    plain_update,
)
from helpers.problems import CLASSES, assert_same_gradients, gradients
from helpers.slow import slow
from helpers.steps import make_step, run
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
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
    (1, "pairs", range(0, 8, 2)),
    slow(1, "pairs", range(1, 8, 2)),
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
