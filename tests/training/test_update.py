"""One update: unscaled, clipped, scheduled, with all optimizers together.

Gradients that a step divides: each once, whichever optimizer has its parameter.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_batch, gradients
from helpers.slow import pairs, slow
from helpers.steps import batch, make_step, rows_of, run, tolerance_of
from helpers.updates import values_of
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.testing import assert_close

from balanced_parallel import BalancedOptimizer, DataParallelModel, TrainStep, parallelize, simulate

CPUS = ["cpu"] * 3


def make_optimizers(net, *, with_bias=True):
    """An optimizer and a scheduler for each of the two layers, the second with its bias or without it."""
    last = list(net[2].parameters()) if with_bias else [net[2].weight]
    optimizers = [sgd(net[0], lr=0.5), torch.optim.AdamW(last, lr=0.1)]
    schedulers = [ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    return optimizers, schedulers


def check_several(rank, ranks, precision):
    """A layer is given to an optimizer later, as one does who unfreezes. The targets do not say what they weigh."""
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    error = tolerance_of(precision)
    plain = build_net()
    net = build_net()
    weighted = nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, CLASSES))
    references, reference_schedulers = make_optimizers(plain, with_bias=False)
    model, criterion = parallelize(net, weighted, CPUS if ranks == 1 else None)
    optimizers, schedulers = make_optimizers(net, with_bias=False)
    settings = {
        "micro_batch_size": 2,
        "max_grad_norm": 0.1,
        "scheduler": tuple(schedulers),
        "precision": precision,
    }
    step = TrainStep(model, criterion, optimizers, **settings)
    assert step.optimizer is optimizers
    mine = rows_of(rank, ranks)
    for number in range(4):
        if number == 1:
            references[1].add_param_group({"params": [plain[2].bias]})
            optimizers[1].add_param_group({"params": [net[2].bias]})
        inputs, targets = batch(number)
        plain.zero_grad()
        loss = weighted(plain(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            [one for each in references for group in each.param_groups for one in group["params"]],
            0.1,
        )
        assert norm > 0.1
        for one in (*references, *reference_schedulers):
            one.step()
        assert_close(step(inputs[mine], targets[mine]), loss, rtol=error, atol=error)
        assert_close(step.grad_norm, norm, rtol=error, atol=0.0)
        assert_same_gradients(gradients(net), gradients(plain), error)
        if precision == "fp32":
            assert_close(list(net.parameters()), list(plain.parameters()), rtol=error, atol=error)
        net.load_state_dict(plain.state_dict())
    assert [one.get_last_lr() for one in schedulers] == [
        one.get_last_lr() for one in reference_schedulers
    ]


@pytest.mark.parametrize(
    ("ranks", "precision"), [(1, "fp32"), (2, "fp32"), (2, "fp16"), slow(1, "fp16")]
)
def test_several_optimizers_and_schedulers_equal_the_plain_program(ranks, precision):
    run(ranks, check_several, precision)


class Overflows(torch.autograd.Function):
    """Multiplies the gradient by infinity."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


class Overflowing(nn.Linear):
    overflows = True

    def forward(self, inputs):
        return F.linear(
            inputs, Overflows.apply(self.weight) if self.overflows else self.weight, self.bias
        )


def check_overflow(rank, ranks):
    """The gradient of the last layer overflows, that of the first does not: neither steps, and the scale falls once."""
    net = build_net()
    net[2] = Overflowing(6, 5)
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), CPUS if ranks == 1 else None)
    optimizers, schedulers = make_optimizers(net)
    step = TrainStep(
        model, criterion, optimizers, scheduler=schedulers, max_grad_norm=1.0, precision="fp16"
    )
    before = values_of(net)
    step(*class_batch(4))
    assert all(map(torch.equal, net.parameters(), before))
    assert not optimizers[1].state
    assert [one.get_last_lr() for one in schedulers] == [[0.5], [0.1]]
    assert step.precision.scaler.get_scale() == 2.0**15
    net[2].overflows = False
    step(*class_batch(4))
    assert not any(map(torch.equal, net.parameters(), before))
    assert [one.get_last_lr() for one in schedulers] == [[0.25], [0.05]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_overflow_in_one_optimizer_skips_all_optimizers(ranks):
    run(ranks, check_overflow)


def test_parameter_in_two_optimizers_raises_an_error():
    net = build_net()
    both = [sgd(net), sgd(net[2])]
    message = (
        r"model\.2\.weight of shape \(5, 6\) is in the optimizers 0 and 1, expected in one of them"
    )
    with pytest.raises(ValueError, match=message):
        make_step(net, optimizer=both)
    other = nn.Parameter(torch.zeros(2))
    several = [torch.optim.SGD([*net[0].parameters(), other], lr=0.1), sgd(net[2])]
    step = make_step(net, optimizer=several)
    step(*class_batch(3))
    several[1].add_param_group({"params": [other]})
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(2,\) is in the optimizers 0 and 1"
    ):
        step(*class_batch(3))


NO_OPTIMIZER = "the optimizer is an object of type generator, expected an instance of Optimizer, or"
NO_SCHEDULER = "the scheduler is an object of type SGD, expected an instance of LRScheduler, or"
OF_ANOTHER = "ConstantLR was made for another Adam, expected the optimizer of this step: its"
INVALID = {
    NO_OPTIMIZER: lambda net, optimizer: {"optimizer": net.parameters()},
    r"the optimizer is a tensor of shape \(6, 4\), expected": lambda net, optimizer: {
        "optimizer": list(net.parameters())
    },
    "no optimizer was given, expected one or more": lambda net, optimizer: {"optimizer": []},
    NO_SCHEDULER: lambda net, optimizer: {"scheduler": [optimizer]},
    "ReduceLROnPlateau needs a metric: call its step": lambda net, optimizer: {
        "scheduler": [ConstantLR(optimizer), ReduceLROnPlateau(optimizer)]
    },
    OF_ANOTHER: lambda net, optimizer: {
        "scheduler": [ConstantLR(optimizer), ConstantLR(torch.optim.Adam(net.parameters()))]
    },
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_optimizers_and_schedulers_raise_an_error(message):
    net = build_net()
    optimizer = sgd(net)
    settings = {"optimizer": optimizer, **INVALID[message](net, optimizer)}
    with pytest.raises((TypeError, ValueError), match=message):
        make_step(net, **settings)


def test_schedulers_of_schedulers_are_those_of_their_optimizer():
    net = build_net()
    optimizer = sgd(net)
    parts = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.5)]
    sequence = SequentialLR(optimizer, parts, [2])
    make_step(net, optimizer=optimizer, scheduler=[sequence, ChainedScheduler(parts)])
    balanced = BalancedOptimizer(DataParallelModel(net, CPUS), torch.optim.Adam, lr=0.1)
    make_step(net, optimizer=balanced, scheduler=ConstantLR(balanced))


class Embedding(nn.Module):
    """A model whose last layer is that of the criterion: the head of a face recogniser, or a tied generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        return hidden + self.head(hidden) @ self.head.weight


class Head(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden, target):
        return F.cross_entropy(self.head(hidden) * self.scale, target, ignore_index=0)


def counted(hidden, target):
    return (target != 0).sum()


def shared_batch():
    torch.manual_seed(0)
    return class_batch(11)


def shared_gradients():
    net = Embedding()
    head = Head(net.head)
    inputs, targets = shared_batch()
    loss = head(net(inputs), targets)
    loss.backward()
    return loss.detach(), gradients(net, head)


SIZES = [4, 7, 0]


def check_shared(rank, ranks, precision, given):
    """Loss and gradients of a window, where the head is in the optimizer, where it is not, and where it is given twice."""
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    loss, expected = shared_gradients()
    net = Embedding()
    head = Head(net.head)
    model, criterion = parallelize(net, head, CPUS if ranks == 1 else None, weight=counted)
    optimized = {
        "once": list(nn.ModuleList([net, head]).parameters()),
        "outside": list(net.first.parameters()),
        "twice": [*net.parameters(), *head.parameters()],  # torch warns
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "optimizer contains a parameter group with duplicate parameters"
        )
        optimizer = torch.optim.SGD(optimized[given], lr=0.0)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2, precision=precision)
    inputs, targets = shared_batch()
    mine = slice(None) if ranks == 1 else slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for _ in range(3):
        found = step(inputs[mine], targets[mine])
        assert_close(found, loss, rtol=tolerance_of(precision), atol=1e-10)
        assert_same_gradients(gradients(net, head), expected, tolerance_of(precision))


@pytest.mark.parametrize(
    ("ranks", "given", "precision"),
    pairs([1, 2, 3], ["once", "outside", "twice"], ["fp32", "fp16"], fast=4),
)
def test_parameter_shared_by_model_and_criterion_is_divided_once(ranks, precision, given):
    run(ranks, check_shared, precision, given)


class TwoSteps(torch.optim.SGD):
    """Evaluates the loss again after a first change of the parameters, as SAM does. The closure has a default."""

    def step(self, closure=None):
        super().step()
        torch.enable_grad()(closure)()
        super().step()


class NeedsClosure(torch.optim.SGD):
    def step(self, *, closure):
        super().step(closure)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("balanced", [False, True])
def test_optimizers_that_need_a_closure_are_named(balanced, precision):
    """The error was "'NoneType' object is not callable"."""
    net = build_net()
    step = make_step(net, devices=3, kind=TwoSteps, is_balanced=balanced, precision=precision)
    name = type(step.optimizer).__name__
    message = rf"{name}\.step\(\) failed without a closure: 'NoneType' object is not callable; if it needs one, call optimizer"
    with pytest.raises(RuntimeError, match=message) as caught:
        step(*class_batch(3))
    note = caught.value.__notes__[-1]
    assert note.startswith(
        "This was the optimizer's step, which may have changed some parameters and not others: go on from"
    )
    with pytest.raises(
        TypeError,
        match="NeedsClosure evaluates the loss several times per step, and TrainStep once: expected",
    ):
        make_step(net, optimizer=NeedsClosure(net.parameters(), lr=0.1))


def test_optimizers_that_need_a_closure_are_named_before_they_are_sharded():
    class OverMatrices(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            closure()

    with simulate(2):
        message = "OverMatrices failed to update small tensors without a closure, which shows if shard='parameters' is exact"
        with pytest.raises(TypeError, match=message):
            BalancedOptimizer(DataParallelModel(build_net()), OverMatrices)
