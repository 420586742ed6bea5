"""Gradients that a step divides: each once, whichever optimizer has its parameter."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients, plain_program
from helpers.steps import make_step, run, tolerance_of
from torch import nn

from balanced_parallel import TrainStep, parallelize


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_of_another_optimizer_are_exact(precision):
    net, x, target = build_net(), torch.randn(9, 4), class_targets(9)
    _, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    first, *others = net.parameters()
    other = torch.optim.SGD([first], lr=0.1)
    step = make_step(net, optimizer=torch.optim.SGD(others, lr=0.1), micro_batch_size=2, precision=precision)
    step(x, target)
    error = 1e-6 if precision == "fp32" else 1e-2
    torch.testing.assert_close(first.grad, expected[0], rtol=error, atol=error)
    other.step()


class Prompted(torch.nn.Module):
    """A buffer that learns, which no optimizer has."""

    def __init__(self):
        super().__init__()
        self.net = build_net()
        self.register_buffer("prompt", torch.ones(4).requires_grad_())

    def forward(self, x):
        return self.net(x * self.prompt)


def test_gradient_of_a_buffer_equals_the_plain_program(double):
    module, x, target = Prompted(), torch.randn(11, 4), class_targets(11, 3)
    F.cross_entropy(module(x), target).backward()
    expected, module.prompt.grad = module.prompt.grad.clone(), None
    step = make_step(
        module, nn.CrossEntropyLoss(torch.ones(5)), torch.optim.SGD(module.net.parameters(), lr=0.0), micro_batch_size=2
    )
    for _ in range(2):
        step(x, target)
        torch.testing.assert_close(module.prompt.grad, expected)


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


SIZES = [4, 7, 0]


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
def test_parameter_shared_by_model_and_criterion_is_divided_once(ranks, precision, given):
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
def test_added_param_group_is_divided_once(ranks, precision):
    run(ranks, check_added_group, precision)
