"""Criteria that compute means of torch inside equal the plain program, in any layout. Others are refused."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients, plain_program
from helpers.slow import slow_but
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

pytestmark = pytest.mark.usefixtures("double")


class RandomLoss(nn.Module):
    """A random combination of one to three means, as people write them."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, CLASSES))
        self.log_variance = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.smooth = nn.CrossEntropyLoss(self.class_weights, label_smoothing=0.1)
        terms = [
            lambda out, labels, values: F.cross_entropy(out, labels),
            lambda out, labels, values: F.cross_entropy(out, labels.clamp(min=0), self.class_weights, ignore_index=1),
            lambda out, labels, values: self.smooth(out, labels),
            lambda out, labels, values: F.nll_loss(out.log_softmax(1), labels, reduction="mean"),
            lambda out, labels, values: F.mse_loss(out, values),
            lambda out, labels, values: nn.L1Loss()(out[:, 1:], values[:, 1:]),
            lambda out, labels, values: F.binary_cross_entropy_with_logits(out, values, weight=values[:, :1]),
            lambda out, labels, values: F.kl_div(out.log_softmax(1), values.softmax(1), reduction="batchmean"),
            lambda out, labels, values: (out - values).pow(2).mean(dim=1).mean(),
            lambda out, labels, values: torch.mean(F.cross_entropy(out, labels, reduction="none")[values[:, 0] > 0.4]),
            lambda out, labels, values: (out.pow(2).sum(1) * values[:, 0]).sum() / values[:, 0].sum(),
        ]
        self.terms = draw.choices(terms, k=draw.randint(1, 3))
        self.style = draw.choice([self.as_sum, self.in_a_loop, self.stacked, self.learned, self.with_constants])

    def as_sum(self, losses):
        return sum(losses) / 2

    def in_a_loop(self, losses):
        total = losses[0].new_zeros(())
        for number, loss in enumerate(losses):
            total += loss * (number + 1)
        return -total

    def stacked(self, losses):
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0].reshape(1).squeeze()

    def learned(self, losses):
        return sum(loss * torch.exp(-s) + s for loss, s in zip(losses, self.log_variance[: len(losses)], strict=True))

    def with_constants(self, losses):
        return 0.25 + 0.5 * sum(losses) + 0.01 * self.log_variance.pow(2).sum()

    def forward(self, output, labels, values):
        return self.style([term(output, labels, values) for term in self.terms])


def make_problem(seed, rows, ignored):
    torch.manual_seed(seed)
    return build_net(), RandomLoss(seed), torch.randn(rows, 4), (class_targets(rows, ignored), torch.rand(rows, CLASSES))


def forwards_twice(seed, updates, devices, micro_batch_size, sizes, ignored):
    """Compares updates of a ``TrainStep`` with the plain program. ``sizes`` are the rows of each ``add``."""
    module, criterion, inputs, targets = make_problem(seed, sum(sizes), ignored)
    loss, expected = plain_program(module, criterion, inputs, targets)
    model, split = DataParallelModel(module, ["cpu"] * devices), DataParallelCriterion(criterion)
    parameters = [*module.parameters(), *criterion.parameters()]
    step = TrainStep(model, split, torch.optim.SGD(parameters, lr=0.0), micro_batch_size=micro_batch_size)
    for _ in range(updates):
        if len(sizes) == 1:
            result = step(inputs, targets)
        else:
            for part in zip(inputs.split(sizes), *(target.split(sizes) for target in targets), strict=True):
                step.add(part[0], part[1:])
            result = step.apply()
        torch.testing.assert_close(result, loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(module, criterion), expected)


@pytest.mark.parametrize("seed", slow_but(range(60), *range(12)))
def test_random_criteria_equal_the_plain_program(seed):
    draw = random.Random(seed)
    sizes = draw.choice([[7], [9], [12], [5, 1, 6], [4, 0, 3]])
    layout = draw.choice([(1, 2), (1, 4), (2, None), (2, 2), (3, None), (3, 1), (1, None)])
    forwards_twice(seed, 3, *layout, sizes, draw.choice([0, 0, 2, 3]))


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("seed", slow_but(range(40), *range(8)))
def test_criteria_without_a_step_equal_the_plain_program(seed, rows):
    module, criterion, inputs, targets = make_problem(seed, rows, ignored=rows // 3)
    loss, expected = plain_program(module, criterion, inputs, targets)
    model, split = DataParallelModel(module, ["cpu"] * 3), DataParallelCriterion(criterion)
    for _ in range(2):
        result = split(model(inputs), *targets)
        result.backward()
        torch.testing.assert_close(result.detach(), loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(module, criterion), expected)
        module.zero_grad(), criterion.zero_grad()
