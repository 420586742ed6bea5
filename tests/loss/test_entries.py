"""Entries of the result of a criterion: the loss of a step, and values to log, in every layout."""

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.plain import dense
from helpers.problems import build_net, class_targets
from helpers.ranks import on_ranks
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
)

Named = collections.namedtuple("Named", ["ce", "loss"])


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    ce: torch.Tensor


def terms(output, target):
    return F.cross_entropy(output, target), output.square().mean()


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def total_and_parts(output, target):
    ce, l2 = terms(output, target)
    return {"ce": ce, "loss": ce + 0.1 * l2, "l2": l2}


def named_tuple(output, target):
    ce, l2 = terms(output, target)
    return Named(ce, ce + 0.1 * l2)


def record(output, target):
    ce, l2 = terms(output, target)
    return Record(ce + 0.1 * l2, ce)


def loss_and_accuracy(output, target):
    return {"loss": F.cross_entropy(output, target), "accuracy": accuracy(output, target)}


def accuracy_without_a_graph(output, target):
    loss = F.cross_entropy(output, target)
    with torch.no_grad():
        kept = target > 1
        share = (kept & (output.argmax(1) == target)).sum() / kept.sum().clamp(min=1)
        return {"loss": loss, "accuracy": accuracy(output, target), "share": share.sqrt()}


def several_losses_and_accuracy(output, target):
    return {
        "accuracy": accuracy(output, target),
        "loss": {"ce": F.cross_entropy(output, target), "l2": output.square().mean()},
    }


def tuple_with_accuracy(output, target):
    return F.cross_entropy(output, target), accuracy(output, target)


def accuracy_first(output, target):
    return [accuracy(output, target), *terms(output, target)]


def detached(output, target):
    ce, l2 = terms(output, target)
    return ce + 0.1 * l2, ce.detach(), l2.detach()


def with_a_number(output, target):
    return {
        "loss": F.cross_entropy(output, target),
        "accuracy": accuracy(output, target),
        "lr": 0.1,
        "rows": len(target),
    }


def with_a_bounded_mean(output, target):
    kept = target > 1
    hits = (output.argmax(1) == target) & kept
    return {"loss": F.cross_entropy(output, target), "hits": hits.sum() / kept.sum().clamp(min=1)}


def of_sums(output, target):
    loss = F.cross_entropy(output, target, reduction="sum")
    return {"loss": loss, "hits": (output.argmax(1) == target).double().sum(), "twice": 2 * loss}


# A criterion, settings of DataParallelCriterion, the loss in its result, and the names of values to log in it.
CASES = {
    "accuracy without a graph": (
        accuracy_without_a_graph,
        {},
        lambda result: result["loss"],
        ["accuracy", "share"],
    ),
    "total and parts": (total_and_parts, {}, lambda result: result["loss"], ["ce", "l2"]),
    "named tuple": (named_tuple, {}, lambda result: result.loss, ["ce"]),
    "dataclass": (record, {}, lambda result: result.loss, ["ce"]),
    "accuracy": (loss_and_accuracy, {}, lambda result: result["loss"], ["accuracy"]),
    "several losses": (
        several_losses_and_accuracy,
        {},
        lambda result: sum(result["loss"].values()),
        ["accuracy"],
    ),
    "tuple": (tuple_with_accuracy, {}, lambda result: result[0], ["1"]),
    "accuracy first": (accuracy_first, {}, lambda result: result[1] + result[2], ["0"]),
    "detached": (detached, {}, lambda result: result[0], ["1", "2"]),
    "number": (with_a_number, {}, lambda result: result["loss"], ["accuracy"]),
    "bounded mean": (with_a_bounded_mean, {}, lambda result: result["loss"], ["hits"]),
    "weight": (loss_and_accuracy, {"weight": "rows"}, lambda result: result["loss"], ["accuracy"]),
    "weights": (
        loss_and_accuracy,
        {"weight": {"loss": lambda target: len(target), "accuracy": lambda target: len(target)}},
        lambda result: result["loss"],
        ["accuracy"],
    ),
    "sums": (of_sums, {"reduction": "sum"}, lambda result: result["loss"], ["hits", "twice"]),
    "all rows": (loss_and_accuracy, {"whole": True}, lambda result: result["loss"], ["accuracy"]),
}
pytestmark = pytest.mark.usefixtures("double")
ROWS = 11
UPDATES = 2


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 4, generator=generator), torch.randint(5, (ROWS,), generator=generator)


def value_of(result, name):
    """Returns the value of an entry, by the name or the number that it has in the metrics of a step."""
    if isinstance(result, Named):
        result = result._asdict()
    if isinstance(result, (tuple, list)):
        result = {str(number): entry for number, entry in enumerate(result)}
    entry = result[name] if isinstance(result, dict) else getattr(result, name)
    return entry.detach().item()


def plain(case):
    """Returns losses, values to log and parameters of the plain program."""
    criterion, _, pick, names = CASES[case]
    net = build_net()
    optimizer = sgd(net)
    losses = []
    values = []
    for number in range(UPDATES):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        result = criterion(net(inputs), targets)
        pick(result).backward()
        optimizer.step()
        losses.append(pick(result).detach().item())
        values.append([value_of(result, name) for name in names])
    return losses, values, [parameter.detach() for parameter in net.parameters()]


def check(case, wrap, rows=slice(None), in_parts=False, **settings):
    """Compares a step with the plain program. ``wrap`` returns the model and the criterion of a net and a criterion."""
    criterion, arguments, _, names = CASES[case]
    net = build_net()
    model, criterion = wrap(net, DataParallelCriterion(criterion, **arguments))
    step = TrainStep(model, criterion, sgd(model), **settings)
    losses, values, parameters = plain(case)
    for number in range(UPDATES):
        inputs, targets = (
            tensor[rows[number % len(rows)] if isinstance(rows, list) else rows]
            for tensor in batch(number)
        )
        if in_parts:
            step.add(inputs[:4], targets[:4])
            step.add(inputs[4:], targets[4:])
            loss = step.apply()
        else:
            loss = step(inputs, targets)
        metrics = step.metrics()
        assert loss.item() == pytest.approx(losses[number], rel=1e-10)
        assert [metrics[name] for name in names] == pytest.approx(values[number], rel=1e-10)
    assert "lr" not in metrics
    for parameter, expected in zip(model.module.parameters(), parameters, strict=True):
        assert_close(dense(parameter), expected, rtol=1e-10, atol=1e-12)


def replicas(devices):
    return lambda net, criterion: (DataParallelModel(net, devices), criterion)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2, "in_parts": True}], ids=str)
def test_a_step_trains_on_the_loss_and_returns_the_other_values(case, settings):
    """Everything was added up: the loss was 110 % too large."""
    check(case, replicas(["cpu"] * 3), **settings)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_ranks_also_without_rows(rank, strategy):
    rows = [
        [slice(0, 4), slice(0, 0)],
        [slice(4, ROWS), slice(0, ROWS)],
    ][rank]

    def wrap(net, criterion):
        return parallelize(net, criterion, ["cpu"], strategy=strategy)

    for case in ("total and parts", "accuracy", "weights"):
        check(case, wrap, rows)
    for case in ("tuple", "accuracy without a graph", "all rows"):
        check(case, wrap, rows, micro_batch_size=2)


@pytest.mark.parametrize("case", [case for case in CASES if case != "number"])
def test_a_loop_by_hand_gets_the_same_structure(case):
    criterion, arguments, pick, _ = CASES[case]
    net = build_net()
    inputs, targets = batch(0)
    result = DataParallelCriterion(criterion, **arguments)(
        DataParallelModel(net, ["cpu"] * 3)(inputs), targets
    )
    expected = criterion(net(inputs), targets)
    assert isinstance(result, dict if hasattr(expected, "loss") else type(expected))
    assert pick(result).item() == pytest.approx(pick(expected).item(), rel=1e-12)
    gradients = [torch.autograd.grad(pick(value), net.parameters()) for value in (result, expected)]
    assert_close(*gradients, rtol=1e-10, atol=1e-12)


def total_beside_its_parts(output, target):
    ce, l2 = terms(output, target)
    return {"total": ce + 0.1 * l2, "l2": output.abs().mean()}


def a_mean_in_two_losses(output, target):
    ce, l2 = terms(output, target)
    return {"all": ce + 0.1 * l2, "ce": ce}


def a_total_computed_again(output, target):
    """The loss of torch was called twice, and the total was added to its part."""
    return {
        "ce": F.cross_entropy(output, target),
        "all": sum(terms(output, target)),
        "error": output.abs().mean(),
    }


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 1}], ids=str)
@pytest.mark.parametrize(
    ("criterion", "text"),
    [
        (a_total_computed_again, r"the sums of \['ce'\] in \['all'\] too"),
        (total_beside_its_parts, "an entry 'total' beside others"),
        (a_mean_in_two_losses, r"the same cross_entropy in \['all'\] and \['ce'\]"),
    ],
)
def test_a_total_without_the_name_of_the_loss_is_an_error(criterion, text, settings):
    net = build_net()
    inputs, targets = batch(0)
    step = make_step(net, criterion, devices=3, **settings)
    with pytest.raises(
        ValueError, match=rf"the criterion returned {text}, .*expected the total in an entry 'loss'"
    ):
        step(inputs, targets)
    # A loop chooses the loss itself.
    result = DataParallelCriterion(criterion)(step.model(inputs), targets)
    assert all(value.isfinite() for value in result.values())


def losses_over_one_number(output, target):
    """The sum in both losses is a number of targets: they were refused as a total and its part."""
    positives = (target > 0).sum() + 0.5
    return {
        "ce": F.cross_entropy(output, target, reduction="sum") / positives,
        "l1": output.abs().sum() / positives,
    }


def equal_losses(output, target):
    """Two heads that begin with equal weights."""
    return [F.cross_entropy(part, target) for part in (output, output.clone())]


@pytest.mark.parametrize("criterion", [losses_over_one_number, equal_losses])
def test_losses_that_have_no_sum_of_rows_in_common_are_added(criterion):
    net = build_net()
    inputs, targets = batch(0)
    losses = criterion(net(inputs), targets)
    expected = sum(losses.values() if isinstance(losses, dict) else losses)
    step = make_step(net, criterion, devices=3, lr=0.0)
    assert_close(step(inputs, targets), expected.detach())


def with_an_unknown_value(output, target):
    return {"loss": F.cross_entropy(output, target), "largest": output.square().amax()}


def with_a_constant(output, target):
    rows = torch.tensor(float(len(target)))
    return {"loss": F.cross_entropy(output, target), "rows": rows, "size": output.new_tensor(5)}


UNKNOWN = {"largest": with_an_unknown_value, "rows": with_a_constant}


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 1}], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_value_does_not_stop_a_step_and_is_never_a_mean_of_means(name, settings):
    """The number of rows of the first shard was returned."""
    net = build_net()
    inputs, targets = batch(0)
    step = make_step(net, UNKNOWN[name], devices=3, lr=0.0, **settings)
    unknown = "is not a function of sums over the rows"
    for _ in range(3):
        assert_close(step(inputs, targets), F.cross_entropy(net(inputs), targets).detach())
        with pytest.raises(
            ValueError, match=f"the value '{name}' beside the loss {unknown}.*return_outputs=True"
        ):
            step.metrics()
    with pytest.raises(ValueError, match=rf"the loss\['{name}'\] of .* {unknown}"):
        step.criterion(step.model(inputs), targets)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_number_that_differs_between_shards_is_refused_in_a_loop_by_hand(devices):
    """Numbers of two equal shards were equal, and half of that of the batch."""
    net = build_net()
    inputs, targets = batch(0)
    inputs = inputs[:10]
    targets = targets[:10]
    model = DataParallelModel(net, ["cpu"] * devices)
    with pytest.raises(ValueError, match="for some rows, and .* for others; .* log no number of"):
        DataParallelCriterion(with_a_number)(model(inputs), targets)
    result = DataParallelCriterion(
        lambda output, target: {"loss": F.cross_entropy(output, target), "lr": 0.1}
    )(model(inputs), targets)
    assert result["lr"].item() == pytest.approx(0.1)


def test_a_loss_with_other_tensors_is_a_loss_alone():
    head = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [5])
    loss = DataParallelCriterion(head)(
        DataParallelModel(nn.Identity(), ["cpu"] * 2)(batch(0)[0]), class_targets(ROWS)
    )
    assert loss.shape == ()


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 1}], ids=str)
def test_a_number_that_was_read_from_values_is_not_that_of_one_shard(settings):
    """An accuracy with ``.item()`` was left out without a word."""

    def criterion(output, target):
        accuracy = (output.argmax(1) == target).double().mean().item()
        return {"loss": F.cross_entropy(output, target), "accuracy": accuracy}

    net = build_net()
    inputs, targets = batch(0)
    step = make_step(net, criterion, devices=3, lr=0.0, **settings)
    for _ in range(3):
        step(inputs, targets)
        with pytest.raises(ValueError, match=r"the value 'accuracy' .* without \.item\(\)"):
            step.metrics()


class Scaled(nn.Module):
    """Returns a loss and a value to log that a parameter scales."""

    def __init__(self, has_root):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.has_root = has_root

    def forward(self, output, target):
        ce = F.cross_entropy(output, target)
        return {
            "loss": (ce.sqrt() if self.has_root else ce) * self.scale.exp(),
            "scaled": ce * self.scale,
        }


@pytest.mark.parametrize(("has_root", "forwards"), [(False, 3), (True, 6)])
def test_a_value_to_log_has_the_parameter_of_its_update(has_root, forwards):
    """The optimizer writes to the parameter before the value is asked for."""
    net = build_net()
    criterion = Scaled(has_root)
    step = make_step(net, criterion, devices=1, lr=0.5, micro_batch_size=4)
    for number in range(2):
        inputs, targets = batch(number)
        expected = criterion(net(inputs), targets)["scaled"].item()
        calls = []
        handle = net.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step(inputs, targets)
        handle.remove()
        assert step.metrics()["scaled"] == pytest.approx(expected, rel=1e-12)
    assert len(calls) == forwards


def test_a_value_to_log_has_the_bound_of_its_divisor():
    """A divisor of zero made nan of it."""

    def criterion(output, target):
        kept = target > 9
        hits = (output.sum(1) * kept).sum() / kept.sum().clamp(min=1)
        return {"loss": F.cross_entropy(output, target), "hits": hits}

    net = build_net()
    weight = {"loss": len, "hits": lambda target: (target > 9).sum()}
    split = DataParallelCriterion(criterion, weight=weight, minimum={"loss": 0, "hits": 1})
    step = TrainStep(DataParallelModel(net, ["cpu"] * 2), split, sgd(net))
    inputs, targets = batch(0)
    step.add(inputs[:4], targets[:4])
    step.add(inputs[4:], targets[4:])
    step.apply()
    assert step.metrics()["hits"] == 0
