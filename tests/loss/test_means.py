"""Criteria that compute means of torch inside equal the plain program, in any layout. Others are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import (
    CLASSES,
    assert_exact,
    assert_exact_update,
    build_net,
    class_targets,
)
from helpers.slow import slow
from helpers.steps import still_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    PerReplica,
)

pytestmark = pytest.mark.usefixtures("double")


def two_outputs(criterion, rows=8):
    """Returns the loss of two replicas, and that of one."""
    torch.manual_seed(0)
    output = torch.randn(rows, CLASSES)
    values = torch.rand(rows, CLASSES)
    halves = PerReplica(output.split([rows // 2, rows - rows // 2]), [rows // 2, rows - rows // 2])
    return DataParallelCriterion(criterion)(halves, values), criterion(output, values)


REFUSED = {
    "a norm of another order": lambda out, values: (out - values).norm(p=1),
    "a log of a sum of exponentials": lambda out, values: out.logsumexp((0, 1)),
    "a variance": lambda out, values: (out - out.mean()).square().mean(),
    "a view that is written to": lambda out, values: write_to_a_view(out),
    "an alias of a mean that is written to": lambda out, values: write_to_an_alias(
        F.mse_loss(out, values), out.abs().mean()
    ),
    "an alias of a zero that is written to": lambda out, values: write_to_an_alias(
        torch.zeros(1), out.abs().mean()
    ),
    "a loss with another derivative": lambda out, values: Tripled.apply(F.mse_loss(out, values)),
    "a random number": lambda out, values: F.mse_loss(out, values) * torch.rand(()),
    "a median": lambda out, values: (out - values).abs().median(),
    "a mean times a value of the rows": lambda out, values: F.mse_loss(out, values) * values.amax(),
    "the output itself": lambda out, values: out[0, 0],
    "a bounded value": lambda out, values: (
        (out * values).sum() / (out - values).abs().amax().clamp(min=1)
    ),
    "a mean through an autograd function": lambda out, values: (
        MeanOfSquares.apply(out) + F.mse_loss(out, values)
    ),
    "a derivative of a mean": lambda out, values: derivative_of_mean(out, values),
    "a largest value without its dimension": lambda out, values: out.max().mean(),
}


def derivative_of_mean(out, values):
    """Returns the penalty of IRM."""
    scale = torch.ones((), requires_grad=True)
    loss = F.mse_loss(out * scale, values)
    return torch.autograd.grad(loss, scale, create_graph=True)[0].square()


class MeanOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(context, output):
        context.save_for_backward(output)
        return output.pow(2).mean()

    @staticmethod
    def backward(context, gradient):
        return gradient * 2 * context.saved_tensors[0] / context.saved_tensors[0].numel()


def without_graph(function):
    with torch.no_grad():
        return function()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss * 1.0

    @staticmethod
    def backward(context, gradient):
        return gradient * 3


def divide_in_place(total, *numbers):
    for number in numbers:
        total /= number
    return total.div_(2)


def write_to_an_alias(total, mean):
    alias = total.view(())
    total += mean
    return alias * 1.0


def write_to_a_view(output):
    loss = torch.zeros(1)
    loss[0].add_(output.exp().mean())
    return loss.sum()


COUPLED = {
    "contrastive": lambda out, values: F.cross_entropy(out @ out.T, torch.arange(len(out))),
    "centred": lambda out, values: F.mse_loss(out - out.mean(0), values),
    "variances": lambda out, values: out.std(0).mean() + F.mse_loss(out, values),
    "weights of classes": lambda out, values: (
        F.cross_entropy(out, values.argmax(1), reduction="none")
        * (1 / (1 + F.one_hot(values.argmax(1), CLASSES).sum(0)))[values.argmax(1)]
    ).mean(),
}
OTHER_TERMS = {
    "times the rows": lambda out, values: F.mse_loss(out, values) * len(out),
    "a constant of the rows": lambda out, values: F.mse_loss(out, values) + len(out),
    "a mean that one half lacks": lambda out, values: (
        F.mse_loss(out, values) + (out.mean() if len(out) > 1 else 0)
    ),
}
CONSTANTS = {
    "over twelve": lambda out, values: out.sum() / 12,
    "over the columns": lambda out, values: out.pow(2).sum() / out.size(1),
}
OVER_ITS_VALUE = {
    "over its value": lambda out, values: (
        F.mse_loss(out, values) / F.mse_loss(out, values).item() + F.l1_loss(out, values)
    )
}
OF_COLUMNS = {
    "one row less": lambda out, values: (out.sum(0) / (len(out) - 1)).pow(2).sum(),
    "the first rows": lambda out, values: out[:2].mean(0).pow(2).sum(),
    "pairs of rows": lambda out, values: sum(pair.mean(0).pow(2).sum() for pair in out.split(2)),
    "standardised rows": lambda out, values: F.mse_loss(
        (out - out.mean(0)) / (out.square().mean(0) + 1).sqrt(), values
    ),
    "counts that are read": lambda out, values: read_counts(out) @ (out - values).square().mean(0),
    "rows in a view of a constant": lambda out, values: (
        rows_in_a_view(len(out)) @ (out - values).square().mean(0)
    ),
    "rows that numpy writes in a constant": lambda out, values: (
        rows_by_numpy(len(out)) @ (out - values).square().mean(0)
    ),
    # Its value is that of the batch, and its gradient is not.
    "rows over means without a graph": lambda out, values: (
        (out - values).square() / (out - values).square().mean(0).detach()
    ).mean(),
    "a value in a nested list": lambda out, values: (
        torch.tensor([[out.detach().amax(), 1, 1, 1, 1]]) @ (out - values).square().mean(0)
    ).sum(),
    "the largest of each column": lambda out, values: out.max(0).values.sum(),
}


def read_counts(output):
    counts = torch.ones(CLASSES)
    for label in output.argmax(1).tolist():
        counts[label] += 1
    return counts


def rows_by_numpy(rows):
    weights = torch.ones(CLASSES)
    weights.numpy()[0] = rows
    return weights


def rows_in_a_view(rows):
    weights = torch.ones(CLASSES)
    weights[:1].fill_(rows)
    return weights


OF_MORE_ROWS = ("variances",)  # a deviation of one row is nan
MESSAGES = [  # of an error, the losses, and the numbers of rows
    (r"is not a function of sums over the rows.*weight=.*weight='rows'.*whole=True", REFUSED, (8,)),
    (r"does not add up over the rows: .*whole=True.*AdditiveLoss.*weight=", COUPLED, (2, 6)),
    (
        r"computes .* for some rows, and .* for others; expected the same means .*weight=",
        OTHER_TERMS,
        (2, 6),
    ),
    (
        r"computes mse_loss / .* \+ l1_loss for some rows, and mse_loss / .* \+ l1_loss for others",
        OVER_ITS_VALUE,
        (2, 6),
    ),
    (
        r"expected a number that follows .*clamp\(min=1\).* weight=.*multiply by 1 / constant",
        CONSTANTS,
        (2, 6),
    ),
    (r"add up over the rows|for some rows, and|not a function of sums", OF_COLUMNS, (6, 7)),
]


@pytest.mark.parametrize(
    ("message", "loss", "rows"),
    [
        pytest.param(message, loss, rows, id=f"{name}-{rows}")
        for message, losses, sizes in MESSAGES
        for name, loss in losses.items()
        for rows in sizes
        if rows > 2 or name not in OF_MORE_ROWS
    ],
)
def test_losses_that_are_no_sums_of_means_are_refused_in_the_first_batch(message, loss, rows):
    with pytest.raises(ValueError, match=message):
        two_outputs(lambda out, values: loss(out.requires_grad_(), values), rows)


class OfColumns(nn.Module):
    """A mean of the rows, times weights of the columns, which are a buffer, over learned ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.linspace(1.0, 2.0, CLASSES))
        self.scales = nn.Parameter(torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, out, values):
        errors = (out - values).square().mean(0)
        return (self.weights * errors / self.scales).sum() + errors @ self.weights


def balance_of_positions(out):
    tokens = out.permute(0, 2, 3, 1).reshape(-1, out.size(1)).softmax(1)
    counts = F.one_hot(tokens.argmax(1), tokens.size(1)).to(out)
    return (counts.mean(0) * tokens.mean(0)).sum()


PRIOR = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)


def dice_of_classes(predicted, wanted, dim=0):
    sums = predicted.sum(dim) + wanted.sum(dim)
    return (1 - 2 * (predicted * wanted).sum(dim) / sums).mean()


def present(out, labels):
    counts = F.one_hot(labels, CLASSES).sum(0)
    errors = F.cross_entropy(out, labels, reduction="none")
    sums = (F.one_hot(labels, CLASSES) * errors.unsqueeze(1)).sum(0)
    return (sums[counts > 0] / counts[counts > 0]).mean()


def pinball(quantiles, errors):
    quantiles = quantiles.view(-1, 1, 1).to(errors)
    return torch.maximum(quantiles * errors, (quantiles - 1) * errors).sum(0).mean()


ANCHORS = {"weight": torch.full((CLASSES,), 0.3, dtype=torch.float64), "layers": [torch.ones(2)]}


def test_tensors_in_a_dictionary_beside_the_arguments_have_no_rows():
    """Anchors of a penalty, as of elastic weights, were a sum over the rows of each shard."""

    def anchored(out, values):
        penalty = ANCHORS["weight"].square().sum() + ANCHORS["layers"][0].sum()
        return F.mse_loss(out, values) + 0.1 * penalty

    found, expected = two_outputs(anchored)
    assert_close(found, expected)


def fill_zeros(output, values):
    losses = torch.zeros(CLASSES)
    for column, weight in enumerate(torch.arange(1.0, CLASSES)):
        losses[column] = weight * (output[:, column] * values[:, column]).exp().mean()
    return losses.norm()


def add_in_places(output, values):
    """Means of the rows of each class, and those of classes that are there."""
    labels = values.argmax(1)
    errors = F.cross_entropy(output, labels, reduction="none")
    sums = torch.zeros(CLASSES).index_add(0, labels, errors)
    columns = torch.zeros(CLASSES, CLASSES)
    columns.index_add_(0, labels, output)
    counts = torch.zeros(CLASSES).scatter_add_(0, labels, torch.ones(len(output)))
    present = torch.bincount(labels, minlength=CLASSES) > 0
    return (sums / counts.clamp(min=1)).sum() / present.sum() + columns.square().mean().sqrt()


def group_means(output, values):
    """Means of groups, whose dimension is before that of the rows."""
    groups = (values.argmax(1) == torch.arange(CLASSES).unsqueeze(1)).to(output)
    counts = groups.sum(1)
    return (groups @ output.exp().sum(1) / (counts + (counts == 0).to(output))).logsumexp(0)


def histogram(output):
    """Soft counts of an output, whose centres are before the rows."""
    centres = torch.linspace(-1, 1, 7)
    return torch.exp(-(output[:, 0].unsqueeze(0) - centres.unsqueeze(1)).square()).sum(dim=1)


def double_in_a_loop(output):
    total, weight = output.square().mean(), torch.tensor(0.1)
    for _ in range(40):
        total, weight = total + 0.01 * total, weight + 0.01 * weight
    return total * weight


ROWS_FIRST = {
    "weights that are made inside": lambda out, values: (
        torch.tensor([1.0, 2, 3, 4, 5]) @ (out - values).square().mean(0)
        + (F.mse_loss(out, values) * out.new_tensor([1.0, 2])).prod()
    ),
    "a prior that is made inside": lambda out, values: F.kl_div(
        out.softmax(1).mean(0).log(), torch.full((CLASSES,), 1 / CLASSES), reduction="sum"
    ),
    "written zeros": fill_zeros,
    "places": add_in_places,
    "groups": group_means,
    "a histogram": lambda out, values: (
        (histogram(out) / histogram(out).sum() - histogram(values) / histogram(values).sum())
        .abs()
        .sum()
    ),
    "thresholds": lambda out, values: (
        (torch.sigmoid(out[:, 0] - torch.arange(3.0)[:, None]).mean(1) - values[:, :3].mean(0))
        .square()
        .sum()
    ),
    "columns of a stack": lambda out, values: (
        torch.stack([out.exp(), values], 1).sum(0)[0] / torch.stack([out, values], dim=1).sum(0)[1]
    ).sum(),
    "ones of the rows": lambda out, values: out.abs().sum() / torch.ones(len(out)).sum(),
    "doubled in a loop": lambda out, values: double_in_a_loop(out * values),
    "sum": lambda out, values: ((out - values) ** 2).mean(0).sum(),
    "axis": lambda out, values: torch.mean((out - values) ** 2, axis=-2, keepdim=True).sum(),
    "one column": lambda out, values: (lambda means: means[0] + 2 * means[1])(out.exp().mean(0)),
    "positions": lambda out, values: (out * values).unflatten(1, (5, 1)).mean((0, 1)).sum(),
    "step by step": lambda out, values: (out - values).exp().unsqueeze(1).mean(0).mean(0).sum(),
    "constants": OfColumns().double(),
    # As many entries as a shard has rows.
    "a stack": lambda out, values: torch.stack([out.mean(1), values.sum(1)]).mean(0).sum(),
    "transposed": lambda out, values: (out.T[:2] * values.T[:2]).mean(0).sum(),
    "a ratio": lambda out, values: (out.mean(0) / values.mean(0)).sum(),
    "a mean over each column": lambda out, values: (
        (out * (values > 0.5)).sum(0) / (values > 0.5).sum(0).clamp(min=1)
    ).sum(),
    "explained": lambda out, values: (
        (out - values).square().sum(0) / (values.square().mean(0) - values.mean(0).square())
    ).mean(),
    "classes come first": lambda out, values: dice_of_classes(
        out.softmax(1).T.flatten(1), values.T.flatten(1), 1
    ),
    "classes and positions": lambda out, values: dice_of_classes(
        out.unflatten(1, (5, 1, 1)).sigmoid().transpose(0, 1).reshape(5, -1),
        values.T.reshape(5, -1),
        -1,
    ),
    "classes that are present": lambda out, values: present(out, values.argmax(1)),
    "balance of positions": lambda out, values: balance_of_positions(
        out[:, :, None, None] * values[:, None, :3, None]
    ),
    "entropy of the mean": lambda out, values: torch.special.entr(out.softmax(1).mean(0)).sum(),
    "weights of classes outside": lambda out, values: (
        (PRIOR * out.exp().mean(0)).sum()
        + F.kl_div(out.softmax(1).mean(0).log(), PRIOR, reduction="sum")
    ),
    "an ensemble": lambda out, values: (
        torch.cat([out[None], (out * values).unsqueeze(0)]).mean(0).square().mean()
    ),
    "named arguments": lambda out, values: (
        torch.unsqueeze(input=out, dim=1).mean((0, 1)).exp().sum()
    ),
    "a list of transposes": lambda out, values: (
        torch.cat([out.T.contiguous(), values.T.contiguous()]).square().sum()
    ),
    "the largest column": lambda out, values: out.exp().sum(0).max() / values.sum(0).max(),
    "written": lambda out, values: out.exp().mean(0).add_(1).log_().sum(),
    "a determinant": lambda out, values: torch.logdet(out.T @ out / len(out) + torch.eye(CLASSES)),
    "a divided product": lambda out, values: torch.mm(out.t(), values).div_(len(out)).norm(),
    "an Einstein sum": lambda out, values: (
        torch.einsum("bc, bd -> cd", out.exp(), values) / torch.einsum("bc->c", values)
    ).sum(),
    "classes in a view": lambda out, values: dice_of_classes(
        out.sigmoid()[..., None].permute(1, 0, 2).contiguous().view(CLASSES, -1),
        values[..., None].permute(1, 0, 2).contiguous().view(CLASSES, -1),
        1,
    ),
    "rows without their dimension": lambda out, values: (
        out.softmax(1).gather(1, values.argmax(1)[:, None]).squeeze() ** 0.7
    ).mean(),
    # The rows are behind a dimension of constants.
    "quantiles": lambda out, values: pinball(torch.tensor([0.1, 0.5, 0.9]), values - out),
    "prototypes": lambda out, values: (
        torch.cdist(torch.eye(6, CLASSES).to(out), out).mean(0).exp().mean()
    ),
    "an ensemble of constants": lambda out, values: (
        torch.vmap(lambda scale: scale * out)(torch.arange(4.0).to(out)).mean(0).square().mean()
    ),
}


@pytest.mark.parametrize("rows", [5, slow(10)])  # Some shards have a row.
@pytest.mark.parametrize("name", ROWS_FIRST)
def test_sums_and_means_along_the_rows_are_exact_in_any_function_of_them(name, rows):
    module, criterion = nn.Linear(4, CLASSES), copy.deepcopy(ROWS_FIRST[name])
    inputs, values = torch.randn(rows, 4), torch.rand(rows, CLASSES)
    assert_exact(module, criterion, inputs, values)
    step = still_step(module, DataParallelCriterion(criterion), 2, micro_batch_size=2)
    assert_exact_update(step, module, criterion, inputs, values)


def test_a_product_that_is_divided_by_the_rows_names_the_order_that_is_exact():
    def ratio(out, values):
        return out.abs().mean() * values.sum() / len(out)

    with pytest.raises(ValueError, match=r"for others;.* a\.mean\(\) \* \(b\.sum\(\) / len\(b\)\)"):
        two_outputs(ratio)
    found, expected = two_outputs(lambda out, values: out.abs().mean() * (values.sum() / len(out)))
    assert_close(found, expected)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_small_shards_are_all_compared_with_their_halves(micro_batch_size):
    """Two rows with as many positive targets each look independent."""
    values = torch.tensor(
        [
            [1.0, 0.0, 0.0],
            [0.0, 1.0, 0.0],
            [1.0, 1.0, 0.0],
            [1.0, 1.0, 1.0],
            [0.0, 0.1, 0.0],
            [1.0, 0.0, 0.0],
        ]
    )

    def balanced(output, values):
        is_positive = (values > 0.55).to(values)
        return F.binary_cross_entropy_with_logits(
            output, is_positive, pos_weight=3 - is_positive.mean()
        )

    step = still_step(
        nn.Linear(4, 3), DataParallelCriterion(balanced), 1, micro_batch_size=micro_batch_size
    )
    with pytest.raises(ValueError, match="is not a function of sums over the rows"):
        step(torch.randn(6, 4), values)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_count_is_compared_exactly_in_lower_precision(precision):
    """8191 and the 4 x 2047 of the halves differ by less than float32 needs for a sum of 8192 numbers."""
    rows = torch.ones(8192, 1, dtype=torch.float32)
    criterion = DataParallelCriterion(
        lambda out, values: (out - values).pow(2).sum() / (len(out) - 1), precision=precision
    )
    with pytest.raises(
        ValueError, match="the count of a sum over a number of the first rows, 1 times, is 8191"
    ):
        criterion(PerReplica(rows.split(4096), [4096, 4096]), 2 * rows)


WEIGHT = nn.Parameter(torch.tensor([0.5, 0.25]))
ACCEPTED = {
    "a norm": lambda out, values: (out - values).norm(),
    "a squared sum of norms": lambda out, values: (out.norm() + 2 * values.norm()).square(),
    "a norm of zero": lambda out, values: (out * 0).norm() + out.square().mean(),
    "a dot product": lambda out, values: torch.dot(out[:, 0], values[:, 0]) / len(out),
    "an Einstein sum": lambda out, values: torch.einsum("bd,bd->", out - values, out).tanh(),
    "a trace": lambda out, values: torch.trace(out.T @ (out - values)),
    "a penalty with another derivative": lambda out, values: (
        F.mse_loss(out, values).sqrt() + Tripled.apply(WEIGHT).sum()
    ),
    "a loss that is read without a graph": lambda out, values: (
        lambda loss: (loss, without_graph(lambda: loss.to(loss.dtype) * 2))[0].sqrt()
    )(F.mse_loss(out, values)),
    "a sum that is divided in place": lambda out, values: divide_in_place(
        out.square().sum(), len(out)
    ).sqrt(),
    "a count without a graph": lambda out, values: (
        out.abs().sum() / without_graph(lambda: (values > 0.5).sum())
    ),
    "a weight without a graph": lambda out, values: (
        F.mse_loss(out, values)
        * without_graph(lambda: F.l1_loss(out, values) / (1 + out.square().mean()))
    ),
    "a condition on a count": lambda out, values: torch.where(
        (values > 2).sum() > 0, out.exp().mean(), out.mean()
    ),
    "a count that is bounded from above": lambda out, values: (
        (out * values).sum() / values.sum().clamp(1, 2)
    ),
    "the larger of two counts": lambda out, values: (
        (out * values).sum() / torch.maximum(values.sum(), (9 * values).sum())
    ),
    "a mean that is written to": lambda out, values: F.mse_loss(out, values).exp_(),
    "zero times what is not used": lambda out, values: (
        F.mse_loss(out, values) + 0.0 * out.exp().sum()
    ),
    "a zero to begin with": lambda out, values: (
        torch.zeros(1) + torch.tensor(0.0) + F.mse_loss(out, values)
    ),
    "logs on the way": lambda out, values: (
        log(F.mse_loss(out, values)) + out.abs().sum() / len(out)
    ),
    "a loss of zero": lambda out, values: F.mse_loss(out, out.detach()),
    "an unbound parameter": lambda out, values: sum(
        weight * out.mean() for weight in nn.Parameter(torch.ones(3)).unbind()
    ),
    "a minimum with its place": lambda out, values: (
        F.mse_loss(out, values.sort(1)[0]) + out.min(1)[0].mean()
    ),
    "by keyword": lambda out, values: (
        torch.mean(input=out) + torch.sum(input=out * values) / values.sum()
    ),
    "a part of a bounded count": lambda out, values: (
        (out * values).sum() / ((3 * values.sum()).clamp(min=1000) / 2)
    ),
    "a count at its bound": lambda out, values: (
        (out * values).sum() / torch.clamp(values.sum(), min=1000)
    ),
    "a bounded count of outputs": lambda out, values: (
        (out * values).sum() / out.sigmoid().sum().clamp(min=1)
    ),
    "dictionaries": lambda out, values: {
        "a": F.mse_loss(out, values),
        "b": None,
        "c": 0.0,
        "d": 2.0,
    },
}


def log(loss):
    assert loss.item() > 0
    assert loss.exp() > 1
    assert f"{loss.detach():.2f}" != ""
    return loss


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_ways_to_write_sums_of_means_are_exact(name):
    result, expected = two_outputs(ACCEPTED[name], rows=9)
    if isinstance(expected, dict):
        assert (result["b"], result["c"], result["d"]) == (None, 0, 2)
        result = result["a"]
        expected = expected["a"]
    assert_close(result, expected.reshape(()))


def count_forwards(criterion, micro_batch_size=2, devices=2):
    """Returns the number of forwards of each of three updates."""
    torch.manual_seed(0)
    net = build_net()
    inputs = torch.randn(8, 4)
    numbers = []
    counts = []
    net.register_forward_hook(lambda *_: numbers.append(1))
    step = still_step(
        net, DataParallelCriterion(criterion), devices, micro_batch_size=micro_batch_size
    )
    for _ in range(3):
        step(inputs, class_targets(8))
        counts.append(len(numbers))
        numbers.clear()
    return counts


PASSES = [
    (lambda out, target: F.cross_entropy(out, target), [8, 4, 4]),
    # As losses over tokens of TRL are.
    (
        lambda out, target: out.sum() / ((2 * (target > 1).sum()).clamp(min=1) / 2),
        [8, 4, 4],
    ),
    (
        lambda out, target: F.cross_entropy(out, target) + 0.4 * F.cross_entropy(out**2, target),
        [8, 4, 4],
    ),
    (lambda out, target: F.cross_entropy(out, target) + 0.1 + 0.0 * out.sum(), [8, 4, 4]),
    (lambda out, target: out.abs().sum() / len(out) + 2 * out.exp().sum() / len(out), [8, 4, 4]),
    (lambda out, target: F.cross_entropy(out, target) + out.abs().mean(), [8, 8, 8]),
    (
        lambda out, target: (out.sum(1) * (target > 1)).sum() / (target > 1).sum().clamp(min=1),
        [8, 4, 4],
    ),
    (
        lambda out, target: (
            (out.sum(1) * (target > 1)).sum() / (target > 1).sum().clamp(min=1) + 0.1
        ),
        [8, 8, 8],
    ),
    (lambda out, target: out.where(out > 0, torch.nan).log().nanmean(), [8, 4, 4]),
    (  # Several counts in one tensor.
        lambda out, target: (
            out.abs().sum() / torch.stack([(target > 1).sum(), (target > 0).sum()])
        ).sum(),
        [8, 8, 8],
    ),
]


@pytest.mark.parametrize(("criterion", "counts"), PASSES)
def test_means_over_one_count_take_one_pass_after_the_first_update(criterion, counts):
    assert count_forwards(criterion) == counts
    assert count_forwards(criterion, None) == [2, 2, 2]


def test_any_loss_is_computed_where_nothing_is_split():
    def loss(output, target):
        return F.cross_entropy(output, target) * output.amax()

    assert count_forwards(loss, None, 1) == [1, 1, 1]
    for micro_batch_size, devices in ((8, 1), (None, 2)):
        with pytest.raises(
            ValueError,
            match="the loss of an object of type function is not a function of sums over the rows",
        ):
            count_forwards(loss, micro_batch_size, devices)
