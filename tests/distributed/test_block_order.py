"""Ranks that run different blocks of a sharded module."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_same_gradients, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, parallelize
from balanced_parallel.distributed.block_order import BlockOrder


class Experts(nn.Module):
    """The first feature of a row is the number of its expert. An expert without rows does not run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(4))

    def forward(self, inputs):
        outputs = inputs.new_zeros(len(inputs), 5)
        for number, expert in enumerate(self.experts):
            rows = (inputs[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(inputs[rows]))
        return outputs


def check_experts(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.randint(5, (8,))
    mine = slice(4 * rank, 4 * rank + 4)
    plain, net = Experts().double(), Experts().double()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy="fsdp")
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    mixed_up = r"rank 1 ran the block experts\.2 where rank 0 ran experts\.0, expected the same blocks in the same order"
    for experts, is_same in (
        ([0, 1, 2, 3, 0, 1, 2, 3], True),
        ([0, 0, 1, 1, 2, 2, 3, 3], False),
        ([0, 2, 2, 0, 2, 0, 0, 0], True),
    ):
        inputs[:, 0] = torch.tensor(experts)
        if not is_same:  # two blocks on each rank, of equal sizes: FSDP2 has no reason to fail
            with pytest.raises(RuntimeError, match=mixed_up):
                step(inputs[mine], targets[mine])
            with pytest.raises(RuntimeError, match=mixed_up), torch.no_grad():
                model(inputs[mine])
            continue
        loss, expected = step(inputs[mine], targets[mine]), F.cross_entropy(plain(inputs), targets)
        torch.testing.assert_close(loss, expected.detach())
        plain.zero_grad()
        expected.backward()
        found = [None if one.grad is None else one.grad.full_tensor() for one in net.parameters()]
        assert_same_gradients(found, gradients(plain))
        with torch.no_grad():
            torch.testing.assert_close(model(inputs[mine])[0], plain(inputs[mine]))


def test_blocks_that_differ_between_ranks_raise_an_error():
    run_ranks(2, check_experts)


def test_a_module_without_blocks_keeps_no_record():
    order = BlockOrder()
    order.add("root")
    for _ in range(3):  # it grew with every forward
        order.note(0)
        order.compare()
    assert vars(order) == {"_ran": [], "_names": ["root"]}
