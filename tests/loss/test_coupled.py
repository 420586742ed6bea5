"""``AdditiveLoss``: statistics of any structure, and errors in one line."""

import pytest
import torch
from helpers.coupled import (
    KINDS,
    assert_same_update,
    correlation_loss,
    correlation_statistics,
    coupled_problem,
    gradients_of,
    plain_update,
)
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    Rows,
    TrainStep,
    parallelize,
    verify,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_criterion_alone_has_the_graph_of_all_outputs(kind, devices):
    module, criterion, inputs, targets = coupled_problem(kind)
    loss = criterion(DataParallelModel(module, ["cpu"] * devices)(inputs), targets)
    loss.backward()
    assert_same_update((loss.detach(), gradients_of(module, criterion)), plain_update(kind))


def value_of(statistics, finish=torch.sum):
    criterion = DataParallelCriterion(AdditiveLoss(statistics, finish))
    return criterion(PerReplica([torch.arange(6.0).reshape(3, 2), torch.ones(2, 2)], [3, 2]))


def test_statistics_that_do_not_add_up_are_found_in_the_first_batch():
    with pytest.raises(ValueError, match=r"number 1 of the first rows is 2\.5, but of their halves 0\.5 and 3\.5; expected sums"):
        value_of(lambda output: (output.sum(), output.mean()), sum)
    with pytest.raises(ValueError, match="number 0 of the first rows is a tensor of shape"):
        value_of(lambda output: output)
    with pytest.raises(ValueError, match="number 0"):
        value_of(lambda output: output.amax(0))


def test_statistics_of_other_types_and_shapes_are_refused():
    with pytest.raises(TypeError, match="the statistics contain str 'a', expected tensors and numbers"):
        value_of(lambda output: (output.sum(), "a"))
    with pytest.raises(ValueError, match=r"shapes \[\(2,\)\] and \[\(1,\)\], expected equal shapes"):
        value_of(lambda output: output.sum(0)[: 1 if (output == 1).all() else 2])
    assert value_of(lambda output: (len(output), output.sum()), lambda total: total[1] / total[0]) == 19 / 5


def test_settings_of_a_divisor_are_refused():
    loss = AdditiveLoss(correlation_statistics, correlation_loss)
    for settings in ({"weight": "rows"}, {"minimum": 1.0}, {"reduction": "sum"}):
        with pytest.raises(ValueError, match="given with an AdditiveLoss"):
            DataParallelCriterion(loss, **settings)
        with pytest.raises(ValueError, match="given with whole=True"):
            DataParallelCriterion(correlation_loss, whole=True, **settings)


def test_settings_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match="statistics=3, expected a function, or a subclass with a method statistics"):
        AdditiveLoss(3, sum)
    with pytest.raises(TypeError, match="finish=None, expected a function"):
        AdditiveLoss(torch.sum)
    with pytest.raises(ValueError, match="whole='yes', expected True or False"):
        DataParallelCriterion(correlation_loss, whole="yes")


@pytest.mark.parametrize("kind", ["pairs", "correlation"])
def test_verify_proves_any_split(kind):
    module, criterion, inputs, targets = coupled_problem(kind)
    report = verify(module, criterion, inputs, targets, device_ids=["cpu"] * 2, micro_batch_size=2)
    assert report.equal, report
    assert report.micro_batches > 1


def test_an_output_without_rows_must_be_the_same_everywhere():
    def loss(features, auxiliary):
        return features.square().sum() + auxiliary

    criterion, net = DataParallelCriterion(loss, whole=True), build_net()
    outputs = DataParallelModel(net, ["cpu"] * 2)(torch.randn(5, 4))
    with pytest.raises(ValueError, match="has no rows and differs between replicas"):
        criterion(outputs.map(lambda output: (output, output.mean())))


class ScaledErrors(AdditiveLoss):
    """Squared errors, times a parameter in the statistics."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def statistics(self, output, target):
        return (self.scale * (output - target).square()).sum(), output.numel()

    def finish(self, total):
        return total[0] / total[1]


def test_a_parameter_in_the_statistics_learns_from_the_only_shard():
    net, criterion, inputs, target = build_net(), ScaledErrors(), torch.randn(4, 4), torch.rand(4, 5)
    loss = criterion(net(inputs), target)
    (expected,) = torch.autograd.grad(loss, [criterion.scale])
    step = TrainStep(
        DataParallelModel(net, ["cpu"]), DataParallelCriterion(criterion), torch.optim.SGD(criterion.parameters(), 0.0)
    )
    torch.testing.assert_close(step(inputs, target), loss.detach())
    torch.testing.assert_close(criterion.scale.grad, expected)


NAMES = ["a", "bb", "ccc", "dddd", "eeeee"]


def named_loss(output, names, tags):
    assert [len(names), len(tags)] == [len(output)] * 2
    return ((output @ output.t()).sum(1) * torch.tensor([float(len(name)) for name in names])).mean()


def loss_of_named_rows(rank):
    torch.manual_seed(0)
    net, inputs = build_net(), torch.randn(5, 4)
    expected = named_loss(net(inputs), NAMES, NAMES)
    model, criterion = parallelize(net, DataParallelCriterion(named_loss, whole=True), ["cpu"])
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    return criterion(model(inputs[rows]), Rows(NAMES[rows]), NAMES[rows]).detach(), expected.detach()


def test_entries_of_all_ranks_are_in_the_order_of_the_rows():
    for loss, expected in run_ranks(2, loss_of_named_rows):
        torch.testing.assert_close(loss, expected)
