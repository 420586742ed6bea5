"""Any function of sums and means over the rows is exact: random criteria in random layouts, and what is refused."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.problems import (
    CLASSES,
    assert_equal,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
    plain_program,
    whole_gradients,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow, slow_but
from helpers.steps import make_step, still_step
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    TrainStep,
    parallelize,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double")


@torch.no_grad()
def copied(tensor):
    """Returns a copy without a graph."""
    return tensor.clone()


CLASS_WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)
# Sums over the rows, and means, as people write them.
SUMS = {
    "sum": lambda out, labels, values: (out * values).sum(),
    "squares": lambda out, labels, values: (out - values).square().sum(),
    "count": lambda out, labels, values: (values > 0.5).sum(),
    "cross entropy": lambda out, labels, values: F.cross_entropy(out, labels),
    "mean": lambda out, labels, values: out.abs().mean(),
    "masked": lambda out, labels, values: (
        (out.exp() * (values > 0.5)).sum() / (values > 0.5).sum().clamp(min=1)
    ),
    "over the rows": lambda out, labels, values: out.square().sum() / len(out),
    "by confidence": lambda out, labels, values: (
        (out.sigmoid() * values).sum() / out.sigmoid().sum()
    ),
    "by bounded confidence": lambda out, labels, values: (
        (out.sigmoid() * values).sum() / out.sigmoid().sum().clamp(min=1e-6)
    ),
    "by weighted labels": lambda out, labels, values: F.cross_entropy(
        out, labels, weight=out.detach().new_ones(CLASSES).cumsum(0)
    ),
    "class weights": lambda out, labels, values: F.cross_entropy(
        out, labels.clamp(min=0), CLASS_WEIGHTS.to(out), ignore_index=1
    ),
    "smoothed": lambda out, labels, values: F.cross_entropy(
        out, labels, CLASS_WEIGHTS.to(out), label_smoothing=0.1
    ),
    "some columns": lambda out, labels, values: nn.L1Loss()(out[:, 1:], values[:, 1:]),
    "element weights": lambda out, labels, values: F.binary_cross_entropy_with_logits(
        out, values, weight=values[:, :1]
    ),
    "selected": lambda out, labels, values: torch.mean(
        F.cross_entropy(out, labels, reduction="none")[values[:, 0] > 0.4]
    ),
    "small count": lambda out, labels, values: (
        (out * (values > 0.9)).sum() / (values > 0.9).sum().clamp(min=3)
    ),
    "rows first": lambda out, labels, values: (out - values).square().mean(0).sum(),
    "columns of rows": lambda out, labels, values: (-2 * (out * values).mean(dim=0))[1:].mean(),
    "roots of columns": lambda out, labels, values: (out * values).square().mean(0).sqrt().mean(),
    "classes": lambda out, labels, values: (
        (out.sigmoid() * values).sum(0) / (out.sigmoid().sum(0) + values.sum(0))
    ).sum(),
    "balance": lambda out, labels, values: (
        F.one_hot(out.argmax(1), CLASSES).to(out).mean(0) * out.softmax(1).mean(0)
    ).sum(),
    "epsilon": lambda out, labels, values: (out * values).sum() / (values.sum() + 1e-6),
    "loop": lambda out, labels, values: torch.stack(
        [(one - other).norm() for one, other in zip(out, values, strict=True)]
    ).mean(),
    "added in a loop": lambda out, labels, values: sum((row * row).max() for row in out) / len(out),
}
ONE = {
    "root": lambda x: (x.square() + 1).sqrt(),
    "log": lambda x: (1 + x.abs()).log(),
    "bounded": lambda x: x.clamp(min=-1, max=3),
    "exponential": lambda x: torch.exp(-x.square() * 0.02),
    "power": lambda x: 2 ** -(x**2).clamp(max=20) + x,
    "operators": lambda x: 1 - x.detach() // 1 + abs(-x) * 0.3 + 1 / (1 + x**2),
    "tanh": lambda x: torch.tanh(x * 0.3),
    "negative": lambda x: -2 * x,
    "detached": lambda x: x.detach() + 1,
    "copied": lambda x: x / copied(x) + x,
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
        self.has_penalty = False
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
        return parts[0] + 1e-3 * out.square().mean() if self.has_penalty else parts[0] * 1.0


def problem(seed, rows):
    torch.manual_seed(seed)
    net = build_net()
    criterion = RandomFormula(seed)
    inputs = torch.randn(rows, 4)
    targets = class_targets(rows, rows // 4), torch.rand(rows, CLASSES)
    loss = criterion(net(inputs), *targets)
    gradients = (
        torch.autograd.grad(loss, [*net.parameters()], allow_unused=True)
        if loss.requires_grad
        else [None]
    )
    criterion.has_penalty = gradients[0] is None  # A draw may detach all of its sums.
    return net, criterion, inputs, targets


def check_step(seed):
    draw = random.Random(seed)
    sizes = draw.choice([[draw.randint(3, 12)], [draw.randint(3, 12)], [5, 1, 6], [4, 0, 3]])
    net, criterion, inputs, targets = problem(seed, sum(sizes))
    devices, size = draw.choice([(1, 1), (1, 2), (2, None), (3, None), (3, 1), (2, 2), (1, None)])
    with simulate(3) as cluster:
        names = ["cpu"] * devices if draw.random() < 0.7 else cluster.devices[:devices]
        plain = copy.deepcopy((net, criterion))
        step = make_step(net, criterion, devices=names, lr=0.0, micro_batch_size=size)
        run = step if len(sizes) == 1 else add_parts(step, sizes)
        loss, expected = plain_program(*plain, inputs, targets)
        for _ in range(2):
            assert_equal(run(inputs, targets).cpu(), loss)
            assert_same_gradients(gradients(net, step.criterion), expected)


@pytest.mark.parametrize("add", [True, False])
def test_a_weight_that_learns_is_an_error(add):
    net, _, inputs, targets = problem(0, 7)
    criterion = DataParallelCriterion(
        SUMS["by confidence"], weight=lambda out, labels, values: out.sigmoid().sum()
    )
    step = still_step(net, criterion, 2)
    with pytest.raises(ValueError, match=r"weight= returned a tensor with a gradient.*detach\(\)"):
        step(inputs, targets) if add else criterion(step.model(inputs), *targets)


def add_parts(step, sizes):
    """Returns a function that adds parts of a batch to a step, and applies them."""

    def run(inputs, targets):
        tensors = [tensor.split(sizes) for tensor in (inputs, *targets) if sizes]
        for part in zip(*tensors, strict=True):
            step.add(part[0], part[1:])
        return step.apply()

    return run


@pytest.mark.parametrize("seed", slow_but(range(60), *range(3), most=8))
def test_any_function_of_sums_is_exact(seed):
    for part in range(5):
        check_step(1000 * part + seed)


@pytest.mark.parametrize("seed", slow_but(range(10), 0))
def test_bits_are_those_of_any_number_of_devices(seed):
    found = []
    for devices in (1, 2, 3):
        net, criterion, inputs, targets = problem(seed, 11)
        step = make_step(
            net.float(), criterion.float(), devices=devices, micro_batch_size=2, reproducible="bits"
        )
        batch = inputs.float(), (targets[0], targets[1].float())
        losses = [step(*batch).item() for _ in range(3)]
        found.append(
            (
                losses,
                [
                    parameter.detach().clone()
                    for parameter in (*net.parameters(), *criterion.parameters())
                ],
            )
        )
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert all(map(torch.equal, parameters, found[0][1]))


def rank_updates(rank, seeds, strategy):
    """Returns losses and gradients of some draws on one of two ranks, which may have no rows."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        sizes = draw.choice([[4, 3], [7, 0], [0, 7], [1, 6]])
        size = draw.choice([None, 1, 2])
        net, criterion, inputs, targets = problem(seed, 7)
        criterion.requires_grad_(strategy == "ddp")  # FSDP2 shards the model alone.
        inputs, *targets = (tensor.split(sizes)[rank] for tensor in (inputs, *targets))
        model, split = parallelize(net, criterion, ["cpu"], strategy=strategy)
        parameters = [
            *model.parameters(),
            *(each for each in criterion.parameters() if each.requires_grad),
        ]
        step = TrainStep(model, split, torch.optim.SGD(parameters, lr=0.0), micro_batch_size=size)
        way = draw.choice(["by hand", "at once", "added"])
        if way == "by hand":
            loss = split(model(inputs), *targets)
            loss.backward()
        elif way == "at once":
            loss = step(inputs, tuple(targets))
        else:
            parts = [len(inputs) // 2, len(inputs) - len(inputs) // 2] if len(inputs) else []
            loss = add_parts(step, parts)(inputs, targets)
        found.append((loss.detach(), whole_gradients(parameters)))
    return found


@pytest.mark.parametrize(
    ("first", "strategy"),
    [
        (0, "ddp"),
        (0, "fsdp"),
        *[slow(first, strategy) for first in (8, 16) for strategy in ("ddp", "fsdp")],
    ],
)
def test_ranks_are_exact(first, strategy):
    seeds = range(first, first + 8)
    for found in run_ranks(2, rank_updates, seeds, strategy):
        for seed, (loss, found_gradients) in zip(seeds, found, strict=True):
            net, criterion, inputs, targets = problem(seed, 7)
            criterion.requires_grad_(strategy == "ddp")
            expected_loss, expected = plain_program(net, criterion, inputs, targets)
            assert_equal(loss, expected_loss.detach())
            assert_same_gradients(
                found_gradients,
                [each for each in expected if each is not None or strategy == "ddp"],
            )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_rank_without_rows_learns_that_constants_are_before_the_rows(rank, strategy):
    """It took the sums over constants for sums of columns, and its refusal came alone."""

    def pinball(out, values):
        quantiles = torch.tensor([0.1, 0.5, 0.9]).view(-1, 1, 1)
        errors = values - out
        return torch.maximum(quantiles * errors, (quantiles - 1) * errors).sum(0).mean()

    torch.manual_seed(0)
    net, inputs, values = build_net(), torch.randn(7, 4), torch.rand(7, CLASSES)
    expected_loss, expected = plain_program(net, pinball, inputs, values)
    inputs, values = (tensor.split([7, 0])[rank] for tensor in (inputs, values))
    model, criterion = parallelize(net, pinball, ["cpu"], strategy=strategy)
    loss = criterion(model(inputs), values)
    loss.backward()
    assert_equal(loss.detach(), expected_loss.detach())
    assert_same_gradients(whole_gradients([*model.module.parameters()]), expected)


def penalized_updates(rank, sizes, way, strategy):
    """Returns the loss and the gradients of an update whose criterion has a penalty on a parameter of the model."""
    net, inputs, target = penalty_problem()
    criterion = penalty_of(net)
    inputs, target = (tensor.split(sizes)[rank] for tensor in (inputs, target))
    model, split = parallelize(net, criterion, ["cpu"], strategy=strategy)
    if way == "by hand":
        loss = split(model(inputs), target)
        loss.backward()
    else:
        loss = TrainStep(model, split, sgd(net, lr=0.0), micro_batch_size=way)(inputs, target)
    return loss.detach(), gradients(net)


def penalty_problem():
    torch.manual_seed(0)
    return build_net(), torch.randn(7, 4), torch.arange(7) % CLASSES


def penalty_of(net):
    weight = next(net.parameters())
    return lambda out, target: (
        F.cross_entropy(out, target).sqrt() * (1 + out.square().mean())
        + 0.3 * weight.square().sum().sqrt()
    )


@pytest.mark.parametrize(
    ("sizes", "way"),
    [([4, 3], "by hand"), ([4, 3], None), ([2, 5], 2), ([7, 0], 2), ([0, 7], None)],
    ids=str,
)
def test_a_penalty_on_the_model_counts_once_on_ranks(sizes, way):
    net, inputs, target = penalty_problem()
    loss, expected = plain_program(net, penalty_of(net), inputs, target)
    for found, found_gradients in run_ranks(2, penalized_updates, sizes, way, "ddp"):
        assert_equal(found, loss.detach())
        assert_same_gradients(found_gradients, expected)


@on_ranks(2)
def test_a_penalty_on_the_model_is_refused_by_hand_without_rows(rank):
    net, inputs, target = penalty_problem()
    model, criterion = parallelize(net, penalty_of(net), ["cpu"])
    rows = [slice(0, 7), slice(0, 0)][rank]
    with pytest.raises(ValueError, match="parameters that are not its own, and a rank has no rows"):
        criterion(model(inputs[rows]), target[rows])
