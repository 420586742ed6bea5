"""The kind of a loss is chosen once, from the settings of a criterion, and no user of the criterion changes it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from balanced_parallel import AdditiveLoss, DataParallelCriterion, DataParallelModel, DiceLoss, TrainStep, verify
from balanced_parallel.loss.kinds import KnownMean, MeansInside, OfAllRows, OfSums, OneCount, Sum, Unreduced, WeighedMean
from balanced_parallel.loss.means import LossOfMeans


def two_means(output, target):
    return F.cross_entropy(output, target) + 0.1 * output.square().mean()


def one_mean(output, target):
    return F.cross_entropy(output, target, ignore_index=0)


def spread_of_outputs(output, target):
    return (output @ output.t()).logsumexp(1).mean() + F.cross_entropy(output, target)


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum") + output.square().sum()


def weigh(output, target):
    return (target != 0).sum()


class Shifted(nn.Module):
    """A cross entropy with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, output, target):
        return F.cross_entropy(output + self.shift, target)


CRITERIA = {
    "a sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), {}, Sum),
    "a sum by a setting": (lambda: summed, {"reduction": "sum"}, Sum),
    "a mean of torch": (lambda: nn.CrossEntropyLoss(ignore_index=0), {}, KnownMean),
    "a mean with class weights": (lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), {}, KnownMean),
    "a mean over rows": (lambda: nn.CrossEntropyLoss(), {"weight": "rows"}, WeighedMean),
    "a mean with a weight": (lambda: one_mean, {"weight": weigh}, WeighedMean),
    "two means": (lambda: two_means, {}, MeansInside),
    "a mean inside": (lambda: one_mean, {}, MeansInside),
    "a mean of a module with a parameter": (Shifted, {}, MeansInside),
    "a function of sums": (DiceLoss, {}, OfSums),
    "a function of all rows": (lambda: spread_of_outputs, {"whole": True}, OfAllRows),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_the_kind_follows_from_the_settings(name):
    make, settings, kind = CRITERIA[name]
    assert type(DataParallelCriterion(make(), **settings).kind) is kind


def test_a_call_may_select_another_reduction():
    criterion = DataParallelCriterion(F.cross_entropy)
    kinds = [type(criterion.kind.called_with({"reduction": name})[0]) for name in ("mean", "sum", "none")]
    assert kinds == [KnownMean, Sum, Unreduced]
    assert type(criterion.kind) is KnownMean


def train(net, criterion, devices, limit):
    """Returns the losses of three updates."""
    model = DataParallelModel(net, ["cpu"] * devices)
    parameters = [*net.parameters(), *criterion.parameters()]
    step = TrainStep(model, criterion, torch.optim.SGD(parameters, lr=0.05), micro_batch_size=limit)
    torch.manual_seed(0)
    return [float(step(torch.randn(7, 4), torch.randint(3, (7,)))) for _ in range(3)]


def train_plainly(net, criterion):
    learned = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []
    optimizer = torch.optim.SGD([*net.parameters(), *learned], lr=0.05)
    losses = []
    torch.manual_seed(0)
    for _ in range(3):
        inputs, targets = torch.randn(7, 4), torch.randint(3, (7,))
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def net(double):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def double_of(criterion):
    return criterion.double() if isinstance(criterion, nn.Module) else criterion


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", CRITERIA)
def test_every_kind_equals_the_plain_program(net, name, devices, limit):
    make, settings, _ = CRITERIA[name]
    plain = copy.deepcopy(net)
    expected = train_plainly(plain, double_of(make()))
    criterion = DataParallelCriterion(double_of(make()), **settings)
    torch.testing.assert_close(train(net, criterion, devices, limit), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CRITERIA)
def test_training_and_verify_leave_the_criterion_as_it_is(net, name):
    make, settings, _ = CRITERIA[name]
    criterion = DataParallelCriterion(double_of(make()), **settings)
    before = {key: value for key, value in vars(criterion).items() if not key.startswith("_")}
    train(copy.deepcopy(net), criterion, 2, 1)
    verify(copy.deepcopy(net), criterion, torch.randn(7, 4), torch.randint(3, (7,)), device_ids=["cpu"] * 2, micro_batch_size=2)
    after = {key: value for key, value in vars(criterion).items() if not key.startswith("_")}
    assert all(after[key] is value for key, value in before.items() if key != "training")


def test_two_steps_learn_on_their_own(net):
    criterion = DataParallelCriterion(one_mean)
    model = DataParallelModel(net, ["cpu"])
    first, second = (TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=2) for _ in range(2))
    first(torch.randn(5, 4), torch.randint(1, 3, (5,)))
    assert [type(step._kind) for step in (first, second)] == [OneCount, MeansInside]
    assert type(criterion.kind) is MeansInside


def test_each_step_compares_its_own_first_batch_with_halves(net, monkeypatch):
    compared = []
    monkeypatch.setattr(LossOfMeans, "_compare", lambda self, samples: compared.append(self))
    criterion = DataParallelCriterion(one_mean)
    for _ in range(3):
        model = DataParallelModel(copy.deepcopy(net), ["cpu"] * 2)
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(4, 4), torch.randint(1, 3, (4,)))
    assert len({id(loss) for loss in compared}) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, DiceLoss, Shifted])
def test_a_copy_has_a_kind_of_its_own_module(copied, make):
    criterion = DataParallelCriterion(make())
    other = copied(criterion)
    assert other.kind is not criterion.kind
    assert other.copies.criterion is other.module is not criterion.module


def test_an_additive_loss_is_no_mean():
    kind = DataParallelCriterion(AdditiveLoss(lambda output, target: output.sum(), lambda total: total)).kind
    assert (kind.passes, kind.is_mean, kind.reduction) == (2, False, "sum")
