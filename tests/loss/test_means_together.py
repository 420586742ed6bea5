"""Shards are compared together, with copies of their rows: a loss may look like a mean where a shard is small."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_exact_update, build_net
from helpers.ranks import run_ranks
from helpers.steps import parallel_step, still_step
from torch import nn

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    PerReplica,
)

pytestmark = pytest.mark.usefixtures("double")


def each(output, labels):
    return F.cross_entropy(output, labels, reduction="none")


def kept(output, labels):
    """The loss of segmentation that keeps errors above a threshold, and 16 at least."""
    errors = each(output, labels)
    hardest = errors.detach().sort(descending=True).values[min(16, len(errors) - 1)]
    return errors[errors >= hardest.clamp(max=3.0)].mean()


def of_classes(output, labels):
    return torch.stack(
        [each(output, labels)[labels == label].mean() for label in labels.unique()]
    ).mean()


def hardest_sums(output, labels):
    hardest = each(output, labels).topk(min(16, len(output))).values
    return hardest.sum(), len(hardest)


OF_THE_BATCH = {
    "the hardest 4 rows": lambda out, labels: (
        each(out, labels).topk(min(4, len(out))).values.mean()
    ),
    "the hardest 16 rows": lambda out, labels: (
        each(out, labels).topk(min(16, len(out))).values.mean()
    ),
    "16 rows at least": kept,
    "the first positives": lambda out, labels: each(out, labels)[
        (labels > 0).nonzero().flatten()[:8]
    ].mean(),
    "the classes that are present": of_classes,
    "above the mean": lambda out, labels: (lambda losses: losses[losses > losses.mean()].mean())(
        each(out, labels)
    ),
    "over the largest": lambda out, labels: (
        each(out, labels) / each(out, labels).amax().detach()
    ).mean(),
    "normalised over the batch": lambda out, labels: F.mse_loss(
        F.normalize(out, dim=0), F.one_hot(labels, CLASSES).to(out)
    ),
    "sums of the hardest": AdditiveLoss(hardest_sums, lambda total: total[0] / total[1]),
}
LAYOUTS = [(3, 1), (1, 4), (1, 1)]  # devices, and rows of a micro-batch


def make_batch(rows=24):
    torch.manual_seed(3)
    return torch.randn(rows, 4), torch.randint(CLASSES, (rows,))


@pytest.mark.parametrize(("devices", "micro_batch_size"), LAYOUTS)
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_loss_of_some_rows_of_the_batch_is_refused_in_the_first_update(
    name, devices, micro_batch_size
):
    step = still_step(
        build_net(),
        DataParallelCriterion(OF_THE_BATCH[name]),
        devices,
        micro_batch_size=micro_batch_size,
    )
    with pytest.raises(
        ValueError, match=r"add up|for some rows, and .* for others|function of sums"
    ):
        step(*make_batch())


class Balanced(nn.Module):
    """A mean with weights in a buffer, and with a state that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 2, CLASSES))
        self.register_buffer("calls", torch.zeros(()))
        self.rows = 0

    def forward(self, output, labels):
        self.calls += 1
        self.rows += len(output)
        return F.cross_entropy(output, labels, self.weights) + output.pow(2).mean()


def centred_advantages(output, labels):
    """Advantages that add up to zero, and so does the loss of all rows, but for rounding."""
    logits = output.log_softmax(1)[torch.arange(len(output)), labels]
    advantages = torch.where(labels % 2 == 0, 1.0, -1.0)
    return -(torch.exp(logits - logits.detach()) * advantages).mean()


OF_THE_ROWS = {
    "ignored labels": lambda out, labels: (
        2 * F.cross_entropy(out, labels.masked_fill(labels == 0, -100))
    ),
    "a bounded count": lambda out, labels: (
        (each(out, labels) * (labels > 1)).sum() / (labels > 1).sum().clamp(min=1)
    ),
    "sorted rows": lambda out, labels: each(out, labels).sort().values.mean(),
    "above a threshold": lambda out, labels: each(out, labels)[each(out, labels) > 1].mean(),
    "the hardest classes": lambda out, labels: out.topk(2, dim=1).values.mean(),
    "focal": lambda out, labels: (
        (1 - torch.exp(-each(out, labels))) ** 2 * each(out, labels)
    ).mean(),
    "advantages": centred_advantages,
    "tiny": lambda out, labels: 1e-20 * F.cross_entropy(out, labels),
    "row by row": lambda out, labels: (
        sum(each(out[i : i + 1], labels[i : i + 1]).sum() for i in range(len(out))) / len(out)
    ),
}


@pytest.mark.parametrize(("devices", "micro_batch_size"), LAYOUTS[:2])
@pytest.mark.parametrize("name", ["a buffer", *OF_THE_ROWS])
def test_other_losses_stay_exact(name, devices, micro_batch_size):
    net = build_net()
    criterion = OF_THE_ROWS.get(name) or Balanced()
    step = still_step(
        net, DataParallelCriterion(criterion), devices, micro_batch_size=micro_batch_size
    )
    for _ in range(2):
        assert_exact_update(step, net, criterion, *make_batch(7))


def test_the_comparison_leaves_the_state_of_a_criterion_and_random_numbers_as_they_are():
    criterion = Balanced()
    output = torch.randn(8, CLASSES)
    labels = make_batch(8)[1]
    state = torch.get_rng_state()
    DataParallelCriterion(criterion)(PerReplica(output.split(4), [4, 4]), labels)
    assert (criterion.calls, criterion.rows) == (1, 4)  # of the first replica
    assert torch.equal(torch.get_rng_state(), state)


def rank_errors(rank, sizes, name, micro_batch_size):
    """Returns what a loss raises on this rank, which has ``sizes[rank]`` rows."""
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    inputs, targets = (tensor[rows] for tensor in make_batch(sum(sizes)))
    criterion = DataParallelCriterion(OF_THE_BATCH[name])
    step = parallel_step(build_net(), criterion, ["cpu"], micro_batch_size=micro_batch_size)
    with pytest.raises(ValueError, match="does not add up over the rows") as error:
        step(inputs, targets) if micro_batch_size else criterion(step.model(inputs), targets)
    return str(error.value)


@pytest.mark.parametrize(
    ("sizes", "name", "micro_batch_size"),
    [
        ([5, 2], "the hardest 16 rows", None),
        ([7, 0], "the hardest 4 rows", 1),
    ],
)
def test_all_ranks_refuse_a_loss_together(sizes, name, micro_batch_size):
    first, second = run_ranks(2, rank_errors, sizes, name, micro_batch_size)
    assert first == second
