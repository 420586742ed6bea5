"""Parameters without a dimension under FSDP2, such as the temperature of CLIP: whole on each rank, updated as by one device."""

import pytest
import torch
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.problems import CLASSES
from helpers.ranks import on_ranks
from helpers.slow import pairs
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, TrainStep, parallelize

pytestmark = pytest.mark.usefixtures("double")
CUTS = {"uneven": ([0, 5], [5, 7]), "no rows on rank 1": ([0, 7], [7, 7])}


class Pairs(nn.Module):
    """Two towers, a temperature, a scale in each block, a frozen scalar, and one that nobody uses."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, hidden):
            return hidden + self.scale * self.layer(hidden).tanh()

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(4, CLASSES)
        self.shift = nn.Parameter(torch.tensor(0.2), requires_grad=False)
        self.never = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.temperature.exp() * F.normalize(self.head(inputs), dim=1) + self.shift


def batch():
    torch.manual_seed(1)
    return torch.randn(7, 4), torch.tensor([0, 1, -100, 2, 1, 0, 2])


def rows_of(rank, cut="uneven"):
    return [tensor[slice(*CUTS[cut][rank])] for tensor in batch()]


def plain(updates=3, *, times=1, kind=torch.optim.AdamW, **settings):
    """Returns the plain program after some updates. The loss counts several times."""
    torch.manual_seed(0)
    loss = lambda output, target: times * F.cross_entropy(output, target)  # noqa: E731
    expected = Plain(Pairs(), loss, kind, **settings)
    for _ in range(updates):
        expected(*batch())
    return expected


def shard(rank):
    torch.manual_seed(rank)  # Ranks begin with the values of rank 0.
    model, split = parallelize(
        Pairs(), DataParallelCriterion(nn.CrossEntropyLoss()), ["cpu"], strategy="fsdp"
    )
    assert {
        name for name, value in model.module.named_parameters() if not hasattr(value, "full_tensor")
    } == {
        "temperature",
        "blocks.0.scale",
        "blocks.1.scale",
        "shift",
        "never",
    }
    return model, split


@pytest.mark.parametrize(
    ("kind", "optimizer", "cut"),
    pairs(["elements", "parameters"], [torch.optim.AdamW, torch.optim.SGD], [*CUTS]),
)
@on_ranks(2)
def test_clipped_updates_are_those_of_the_plain_program(rank, kind, optimizer, cut):
    """Those of a plain optimizer are in ``regressions/test_exact_problems.py``."""
    model, criterion = shard(rank)
    balanced = BalancedOptimizer(model, optimizer, shard=kind, lr=0.1)
    step = TrainStep(model, criterion, balanced, micro_batch_size=2, max_grad_norm=0.01)
    for _ in range(3):
        step(*rows_of(rank, cut))
    expected = plain(kind=optimizer, clip=0.01)
    expected.assert_same(model.module)
    state = expected.optimizer.state_dict()
    assert_close(balanced.state_dict()["state"], state["state"])
    other = BalancedOptimizer(model, optimizer, shard=kind, lr=0.1)
    other.load_state_dict(state)
    assert_close(other.state_dict(), state)


@on_ranks(2)
def test_scaled_gradients_of_float16_are_unscaled_once(rank):
    torch.set_default_dtype(torch.float32)
    model, criterion = shard(rank)
    step = TrainStep(model, criterion, sgd(model, lr=0.0), precision="fp16", max_grad_norm=1e9)
    for _ in range(5):  # The scale falls where gradients overflow.
        step(*rows_of(rank))
    plain(1, kind=torch.optim.SGD, lr=0.0).assert_same(model.module, rtol=0.02, atol=2e-3)
