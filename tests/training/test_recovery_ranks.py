"""``micro_batch_size="auto"`` under torchrun: ranks agree, and none of them waits forever."""

import itertools
import random

import pytest
import torch
from helpers.problems import CLASSES, class_targets
from helpers.ranks import run_ranks
from helpers.slow import slow_but
from torch import nn

from balanced_parallel import BalancedOptimizer, TrainStep, convert_sync_batchnorm, parallelize, simulate


def build():
    torch.manual_seed(3)
    norm = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()  # its statistics are broadcast by DDP
    return nn.Sequential(nn.Linear(4, 6), *norm, nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, CLASSES))


def batch(rank, number):
    torch.manual_seed(100 + number)
    rows = [7, 4][rank]
    return torch.randn(11, 4)[-rows:], class_targets(11, ignored=1)[-rows:]


class Run:
    """The run of a rank on its simulated device."""

    def __init__(self, rank, balanced, **settings):
        self.rank = rank
        self.model, criterion = parallelize(build(), nn.CrossEntropyLoss(), strategy="ddp")
        adam = torch.optim.AdamW
        made = BalancedOptimizer(self.model, adam, lr=0.1) if balanced else adam(self.model.parameters(), lr=0.1)
        settings = {"micro_batch_size": "auto", "max_grad_norm": 0.5, **settings}
        self.step = TrainStep(self.model, criterion, made, **settings)
        self.losses = []

    def train(self, number, add=False):
        inputs, targets = batch(self.rank, number)
        torch.manual_seed(number)
        if add:
            self.step.add(inputs[:3], targets[:3])
            self.step.add(inputs[3:], targets[3:])
            self.losses.append(self.step.apply().item())
        else:
            self.losses.append(self.step(inputs, targets).item())

    def result(self):
        tensors = [tensor.detach().cpu() for tensor in self.model.state_dict().values()]
        return [torch.tensor(self.losses), *tensors, torch.get_rng_state(), torch.sim.get_rng_state(self.rank)]


WAYS = list(itertools.product([False, True], ["fp32", "fp16"], [False, True]))


def check_faults(rank, balanced, precision, add, faults):
    choose, seen = random.Random(0), set()
    with simulate(2) as cluster:

        def run(sizes, fault=None):
            some = Run(rank, balanced, precision=precision)
            for number, size in enumerate(sizes):
                if size != "auto":
                    some.step.micro_batch_size = size
                if number == 2 and fault == rank:
                    cluster.fail_allocation(allocation)
                some.train(number, add)
            return some

        sizes = (None, 4, 2, 1)
        expected = {size: run([None] * 2 + [size] * 2).result() for size in sizes}
        some = run([None] * 2)
        before = cluster.allocations
        some.train(2, add)
        count = cluster.allocations - before
        for _ in range(faults):
            fault, part = choose.randrange(2), choose.random()
            allocation = 1 + int(part * count)
            some = run(["auto"] * 4, fault)
            size = some.step.micro_batch_size
            assert all(map(torch.equal, some.result(), expected[size])), (fault, allocation, count, size)
            seen.add(size)
    return seen


@pytest.mark.parametrize(("balanced", "precision", "add"), slow_but(WAYS, (True, "fp16", True), (False, "fp32", False)))
def test_any_failed_allocation_of_one_rank_leaves_the_run_of_smaller_micro_batches(balanced, precision, add):
    seen = run_ranks(2, check_faults, balanced, precision, add, 7)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 1
    assert seen[0] <= {None, 2} if add else seen[0] <= {None, 4, 2}  # half of the rows of the rank that failed


def check_rank_without_rows(rank):
    """Rank 1 has no rows, and rank 0 is out of memory. Buffers and random numbers of rank 1 are put back too."""
    found = []
    with simulate(2) as cluster:
        for fails in (False, True):
            run = Run(rank, False)
            run.train(0)
            if fails and rank == 0:
                cluster.fail_allocation(30)
            run.step.micro_batch_size = None if fails else 4
            if rank == 0:
                run.train(1)
            else:
                torch.manual_seed(1)
                run.losses.append(run.step.apply().item())
            run.train(2)
            assert run.step.micro_batch_size == 4
            found.append(run.result())
    return all(map(torch.equal, *found))


def test_rank_without_rows_follows_the_others():
    assert run_ranks(2, check_rank_without_rows) == [True, True]


def check_capacity(rank):
    losses = []
    for memory in (None, ["100MiB", "24MiB"]):
        with simulate(2, memory=memory):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, CLASSES))
            model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy="ddp")
            step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), micro_batch_size="auto")
            inputs, targets = torch.randn(1000, 4), class_targets(1000, ignored=10)
            losses.append(torch.stack([step(inputs, targets) for _ in range(3)]).cpu())
            size = step.micro_batch_size
    torch.testing.assert_close(*losses)
    return size


def test_capacity_of_one_rank_decides_for_all():
    sizes = run_ranks(2, check_capacity)
    assert sizes[0] == sizes[1] < 1000


def check_refusal(rank):
    model, criterion = parallelize(convert_sync_batchnorm(build()), nn.CrossEntropyLoss(), ["cpu"])
    with pytest.raises(ValueError, match="micro_batch_size='auto' with batch norm over all ranks"):
        TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), micro_batch_size="auto")
    return True


def test_batch_norm_over_all_ranks_is_refused():
    assert run_ranks(2, check_refusal) == [True, True]
