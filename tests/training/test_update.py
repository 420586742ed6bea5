"""One update: each gradient is divided once, whoever has its parameter, and all optimizers step together."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize

CPUS = ["cpu"] * 3


class Embedding(nn.Module):
    """A model whose last layer is that of the criterion: the head of a face recogniser, or a tied generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        return hidden + self.head(hidden) @ self.head.weight


class Head(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head, self.scale = head, nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden, target):
        return F.cross_entropy(self.head(hidden) * self.scale, target, ignore_index=0)


def counted(hidden, target):
    return (target != 0).sum()


def learned(*modules):
    """Their parameters, each once."""
    return list(nn.ModuleList(modules).parameters())


def make_shared():
    net = Embedding()
    return net, Head(net.head)


def shared_batch():
    torch.manual_seed(0)
    return torch.randn(11, 4), class_targets(11)


def shared_gradients():
    net, head = make_shared()
    inputs, targets = shared_batch()
    loss = head(net(inputs), targets)
    loss.backward()
    return loss.detach(), gradients(net, head)


def tolerance_of(precision):
    return 2e-2 if precision == "fp16" else 1e-5 if torch.get_default_dtype() == torch.float32 else 1e-10


SIZES = [4, 7, 0]


def run(ranks, check, *arguments):
    """Runs a check in this process, or on several ranks. Its arguments are its rank, the number of ranks and ``arguments``."""
    if ranks > 1:
        return run_ranks(ranks, check, ranks, *arguments)
    before = torch.get_default_dtype()
    try:
        return [check(0, 1, *arguments)]
    finally:
        torch.set_default_dtype(before)


def check_shared(rank, ranks, precision, given):
    """Loss and gradients of a window, where the head is in the optimizer, where it is not, and where it is given twice."""
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    loss, expected = shared_gradients()
    net, head = make_shared()
    model, criterion = parallelize(net, head, CPUS if ranks == 1 else None, weight=counted)
    optimized = {
        "once": learned(net, head),
        "outside": learned(net.first),
        "twice": [*net.parameters(), *head.parameters()],  # torch warns
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        optimizer = torch.optim.SGD(optimized[given], lr=0.0)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2, precision=precision)
    inputs, targets = shared_batch()
    mine = slice(None) if ranks == 1 else slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for _ in range(3):
        found = step(inputs[mine], targets[mine])
        torch.testing.assert_close(found, loss, rtol=tolerance_of(precision), atol=1e-10)
        assert_same_gradients(gradients(net, head), expected, tolerance_of(precision))
    return True


@pytest.mark.parametrize("given", ["once", "outside", "twice"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_parameter_of_model_and_criterion_is_divided_once(ranks, precision, given):
    run(ranks, check_shared, precision, given)


def check_added_group(rank, ranks, precision):
    """A layer that is given to the optimizer later, as one does who unfreezes."""
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    plain, weighted = (
        build_net(),
        nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, CLASSES)),
    )  # the targets do not say what they weigh
    reference = torch.optim.AdamW(plain[2].parameters(), lr=0.1)
    net = build_net()
    model, criterion = parallelize(net, weighted, CPUS if ranks == 1 else None)
    optimizer = torch.optim.AdamW(net[2].parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2, precision=precision)
    for number in range(4):
        if number == 1:
            reference.add_param_group({"params": list(plain[0].parameters())})
            optimizer.add_param_group({"params": list(net[0].parameters())})
        torch.manual_seed(number)
        inputs, targets = torch.randn(7, 4), class_targets(7, ignored=1)
        plain.zero_grad()
        weighted(plain(inputs), targets).backward()
        reference.step()
        mine = slice(None) if ranks == 1 else [slice(0, 3), slice(3, 7)][rank]
        step(inputs[mine], targets[mine])
        assert_same_gradients(gradients(net), gradients(plain), tolerance_of(precision))
        net.load_state_dict(plain.state_dict())
    return True


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_that_is_added_later_is_divided_once(ranks, precision):
    run(ranks, check_added_group, precision)


def make_optimizers(net):
    """An optimizer and a scheduler for each of the two layers."""
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.5), torch.optim.AdamW(net[2].parameters(), lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    return optimizers, schedulers


def check_several(rank, ranks):
    torch.set_default_dtype(torch.float64)
    plain, net = build_net(), build_net()
    references, reference_schedulers = make_optimizers(plain)
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), CPUS if ranks == 1 else None)
    optimizers, schedulers = make_optimizers(net)
    step = TrainStep(
        model, criterion, optimizers, micro_batch_size=2, max_grad_norm=0.1, scheduler=tuple(schedulers), precision="fp32"
    )
    assert step.optimizer is optimizers
    for number in range(3):
        torch.manual_seed(number)
        inputs, targets = torch.randn(7, 4), class_targets(7, ignored=1)
        plain.zero_grad()
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm > 0.1
        for one in (*references, *reference_schedulers):
            one.step()
        mine = slice(None) if ranks == 1 else [slice(0, 3), slice(3, 7)][rank]
        torch.testing.assert_close(step(inputs[mine], targets[mine]), loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(net), gradients(plain))
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert [one.get_last_lr() for one in schedulers] == [[0.0625], [0.0125]]
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_optimizers_and_schedulers_equal_the_plain_program(ranks):
    run(ranks, check_several)


def check_overflow(rank, ranks):
    """The gradient of the last layer overflows, that of the first does not: neither steps, and the scale falls once."""
    net = build_net()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), CPUS if ranks == 1 else None)
    optimizers, schedulers = make_optimizers(net)
    step = TrainStep(model, criterion, optimizers, scheduler=schedulers, max_grad_norm=1.0, precision="fp16")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    hook = net[2].weight.register_hook(lambda gradient: gradient * torch.inf)
    step(torch.randn(4, 4), class_targets(4))
    assert all(map(torch.equal, net.parameters(), before))
    assert not optimizers[1].state
    assert [one.get_last_lr() for one in schedulers] == [[0.5], [0.1]]
    assert step.precision.scaler.get_scale() == 2.0**15
    hook.remove()
    step(torch.randn(4, 4), class_targets(4))
    assert not any(map(torch.equal, net.parameters(), before))
    assert [one.get_last_lr() for one in schedulers] == [[0.25], [0.05]]
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_in_one_optimizer_skips_all(ranks):
    run(ranks, check_overflow)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_is_skipped_too(fused):
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    step = TrainStep(DataParallelModel(net, CPUS), DataParallelCriterion(nn.MSELoss()), optimizer, precision="fp16")
    step(torch.randn(4, 4), torch.rand(4, 5))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    step(torch.randn(4, 4), torch.full((4, 5), torch.inf))
    assert all(map(torch.equal, net.parameters(), before))
    assert [int(state["step"]) for state in optimizer.state.values()] == [1] * 4


def make_step(net, optimizer, **settings):
    return TrainStep(DataParallelModel(net, CPUS), DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, **settings)


def test_a_parameter_in_two_optimizers_is_named():
    net = build_net()
    both = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    message = r"model\.2\.weight of shape \(5, 6\) is in the optimizers 0 and 1, expected in one of them"
    with pytest.raises(ValueError, match=message):
        make_step(net, both)
    other = nn.Parameter(torch.zeros(2))
    several = [torch.optim.SGD([*net[0].parameters(), other], lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    step = make_step(net, several)
    step(torch.randn(3, 4), class_targets(3))
    several[1].add_param_group({"params": [other]})
    with pytest.raises(ValueError, match=r"a parameter of shape \(2,\) is in the optimizers 0 and 1"):
        step(torch.randn(3, 4), class_targets(3))


def test_optimizers_and_schedulers_of_another_kind():
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match=r"the optimizer is an object of type generator, expected Optimizer, or"):
        make_step(net, net.parameters())
    with pytest.raises(TypeError, match=r"the optimizer is a tensor of shape \(6, 4\), expected"):
        make_step(net, list(net.parameters()))
    with pytest.raises(ValueError, match="no optimizer was given, expected one or more"):
        make_step(net, [])
    with pytest.raises(TypeError, match=r"the scheduler is an object of type SGD, expected LRScheduler, or"):
        make_step(net, optimizer, scheduler=[optimizer])
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric: call its step"):
        make_step(net, optimizer, scheduler=[torch.optim.lr_scheduler.ConstantLR(optimizer), plateau])


def by_deepcopy(parts):
    return copy.deepcopy(parts)


def by_pickle(parts):
    return pickle.loads(pickle.dumps(parts))


def train(step, numbers, mine=slice(None)):
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        inputs, targets = torch.randn(7, 4), class_targets(7, ignored=1)
        losses.append(step(inputs[mine], targets[mine]))
    return torch.stack([*losses, *(parameter.detach().sum() for parameter in step.model.parameters())])


def check_copied(rank, ranks, duplicate, whole, precision):
    """The copy and the original go on as one that was never copied."""
    mine = slice(None) if ranks == 1 else [slice(0, 3), slice(3, 7)][rank]

    def make():
        net = build_net()
        model, criterion = parallelize(net, nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5)), CPUS if ranks == 1 else None)
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
        other = torch.optim.SGD(net[2].parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        settings = {"micro_batch_size": 2, "precision": precision, "scheduler": scheduler}
        return model, criterion, [optimizer, other], TrainStep(model, criterion, [optimizer, other], **settings)

    expected = train(make()[-1], range(5), mine)
    parts = make()
    step = parts[-1]
    train(step, range(2), mine)
    copied = duplicate(parts)[-1] if whole else duplicate(step)
    assert not {id(p) for p in copied.model.parameters()} & {id(p) for p in step.model.parameters()}
    for one in (copied, step):
        torch.testing.assert_close(train(one, range(2, 5), mine), expected[2:], rtol=0, atol=0)
    return True


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("duplicate", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_trains_as_the_original_would(ranks, whole, duplicate, precision):
    run(ranks, check_copied, duplicate, whole, precision)


def test_a_copy_begins_a_window_of_its_own(double):
    net = build_net()
    step = make_step(net, torch.optim.SGD(net.parameters(), lr=0.0))
    step.add(torch.randn(5, 4), class_targets(5))
    copied = copy.deepcopy(step)
    inputs, targets = torch.randn(7, 4), class_targets(7)
    torch.testing.assert_close(copied(inputs, targets), F.cross_entropy(net(inputs), targets).detach())
    assert step._accumulation is not None
