"""Any function of sums over the rows is exact: random criteria in random layouts, and what is refused."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_exact_update, build_net, class_targets, plain_program
from helpers.ranks import run_ranks
from helpers.slow import slow, slow_but
from helpers.steps import still_step
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, PerReplica, TrainStep, parallelize

pytestmark = pytest.mark.usefixtures("double")

# Sums over the rows, and means, as people write them.
SUMS = {
    "sum": lambda out, labels, values: (out * values).sum(),
    "squares": lambda out, labels, values: (out - values).square().sum(),
    "overlap": lambda out, labels, values: (out.sigmoid() * values).sum(),
    "count": lambda out, labels, values: (values > 0.5).sum(),
    "counted": lambda out, labels, values: (labels >= 0).double().sum(),
    "cross entropy": lambda out, labels, values: F.cross_entropy(out, labels),
    "sum of cross entropies": lambda out, labels, values: F.cross_entropy(out, labels, reduction="sum"),
    "mean": lambda out, labels, values: out.abs().mean(),
    "l1": lambda out, labels, values: F.l1_loss(out, values),
    "masked": lambda out, labels, values: (out.exp() * (values > 0.5)).sum() / (values > 0.5).sum().clamp(min=1),
    "over the rows": lambda out, labels, values: out.square().sum() / len(out),
    "targets": lambda out, labels, values: values.mean(),
    "batch mean": lambda out, labels, values: F.kl_div(out.log_softmax(1), values.softmax(1), reduction="batchmean"),
}
ONE = {
    "root": lambda x: (x.square() + 1).sqrt(),
    "log": lambda x: (1 + x.abs()).log(),
    "bounded": lambda x: x.clamp(min=-1, max=3),
    "exponential": lambda x: torch.exp(-x.square() * 0.02),
    "tanh": lambda x: torch.tanh(x * 0.3),
    "negative": lambda x: -2 * x,
    "detached": lambda x: x.detach() + 1,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "in place": lambda x: x.clone().add_(1).mul_(0.5),
    "stack": lambda x: torch.stack([x, 0.1 * x * x]).mean(),
    "branch": lambda x: torch.where(x > 0, x, 0.1 * x),
}
TWO = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - 0.5 * y,
    "multiply": lambda x, y: 0.1 * x * y,
    "divide": lambda x, y: x / (1 + y.abs()),
    "larger": lambda x, y: torch.maximum(x * 1.0, y * 1.0),
    "norm": lambda x, y: torch.stack([x * 1.0, y * 1.0]).norm(),
    "power": lambda x, y: (1 + x.square()).log() * torch.sigmoid(y),
    "list": lambda x, y: sum([x, y]) * 0.5,
    "written": lambda x, y: write(x, y),
}


def write(first, second):
    total = torch.zeros(())
    total += first
    total += second * 0.1
    return total


class RandomFormula(nn.Module):
    """A random function of one to four sums, with a parameter."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.scale = nn.Parameter(torch.tensor(0.3))
        draw = random.Random(seed)
        self.names = draw.choices([*SUMS], k=draw.randint(1, 4))

    def forward(self, out, labels, values):
        draw = random.Random(self.seed)
        parts = [SUMS[name](out, labels, values) for name in self.names]
        if draw.random() < 0.4:
            parts.append(self.scale.exp() + 0.01 * self.scale)
        while len(parts) > 1 or draw.random() < 0.5:
            one = ONE[draw.choice([*ONE])]
            parts[0] = one(parts[0] * 1.0)
            if len(parts) > 1:
                parts[:2] = [TWO[draw.choice([*TWO])](parts[0], parts[1])]
            draw.shuffle(parts)
        loss = parts[0]
        # Some draws have no gradient.
        return loss * 1.0 if loss.requires_grad else loss + 1e-3 * out.square().mean()


def problem(seed, rows):
    torch.manual_seed(seed)
    labels = class_targets(rows, rows // 4)
    return build_net(), RandomFormula(seed), torch.randn(rows, 4), (labels, torch.rand(rows, CLASSES))


def check_step(seed):
    draw = random.Random(seed)
    rows = draw.randint(3, 12)
    net, criterion, inputs, targets = problem(seed, rows)
    devices, size = draw.choice([(1, 1), (1, 2), (2, None), (3, None), (3, 1), (2, 2), (1, None)])
    step = still_step(net, DataParallelCriterion(criterion), devices, micro_batch_size=size)
    for _ in range(2):
        assert_exact_update(step, net, criterion, inputs, targets)


@pytest.mark.parametrize("seed", slow_but(range(400), *range(20)))
def test_any_function_of_sums_is_exact(seed):
    for part in range(5):
        check_step(1000 * part + seed)
