"""Lines of an old loop that read, change and clear ``parameter.grad``, kept with a :class:`BalancedOptimizer`.

They do on several devices what they do in the plain program.
"""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from helpers.problems import CLASSES, build_net
from helpers.slow import slow_but
from torch import nn
from torch.testing import assert_close

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, simulate

pytestmark = pytest.mark.usefixtures("double")

DEVICES = {
    "one device": ["sim:0"],
    "three replicas": ["cpu"] * 3,
    "four devices": ["sim:0", "sim:1", "sim:2", "sim:3"],
}


class Loop:
    """A program on one device, or that of ``devices``; its lines are the same."""

    def __init__(self, devices, kind=torch.optim.SGD, shard=None, **settings):
        self.net = build_net().to(devices[0] if devices else "cpu")
        self.device = self.net[0].weight.device
        self.parameters = list(self.net.parameters())
        if devices is None:
            self.model = self.net
            self.criterion = nn.CrossEntropyLoss()
            self.optimizer = kind(self.parameters, **settings)
        else:
            self.model = DataParallelModel(self.net, devices)
            self.criterion = DataParallelCriterion(nn.CrossEntropyLoss())
            self.optimizer = BalancedOptimizer(self.model, kind, shard=shard, **settings)
        self.generator = torch.Generator().manual_seed(7)
        self.log = []

    def loss(self):
        x = torch.randn(9, 4, generator=self.generator)
        y = torch.randint(CLASSES, (9,), generator=self.generator)
        return self.criterion(self.model(x), y)

    def backward(self):
        self.loss().backward()

    def noise(self, tensor):
        return torch.randn(tensor.shape, generator=self.generator).to(tensor)

    def note(self, value):
        self.log.append(float(value))


def clip_by_norm(loop):
    loop.backward()
    loop.note(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))


def clip_by_hand(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad.data.clamp_(-0.02, 0.02)
    total = sum(parameter.grad.data.norm(2).item() ** 2 for parameter in loop.parameters) ** 0.5
    for parameter in loop.parameters:
        parameter.grad.data.mul_(min(1.0, 0.05 / (total + 1e-6)))
    loop.note(total)


def assign(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad = parameter.grad * 0.5 + loop.noise(parameter)


def write_rows(loop):
    loop.backward()
    weight = loop.net[0].weight
    weight.grad[0] = 0
    weight.grad[1:3, 1] += 1
    weight.grad.t()[2].fill_(0.25)
    weight.grad.view(-1)[3:5].neg_()
    weight.grad[weight.grad > 0.5] = 0.5
    for row in weight.grad.unbind():
        row.sub_(row.mean())
    for half in weight.grad.chunk(2):
        half.mul_(2)
    torch.add(weight.grad, weight.grad, out=weight.grad)
    weight.grad.detach().add_(weight.grad)


def read(loop):
    loop.backward()
    vector = nn.utils.parameters_to_vector([parameter.grad for parameter in loop.parameters])
    loop.note(vector.norm())
    loop.note(torch.cat([parameter.grad.flatten() for parameter in loop.parameters]).abs().max())
    loop.note(sum((parameter.grad * parameter).sum() for parameter in loop.parameters).detach())
    loop.note(all(torch.isfinite(parameter.grad).all() for parameter in loop.parameters))
    loop.note(loop.parameters[1].grad.cpu().numpy().sum())
    loop.note(copy.deepcopy(loop.parameters[0].grad).sum())
    loop.note(pickle.loads(pickle.dumps(loop.parameters[0].grad)).cpu().sum())
    file = io.BytesIO()
    torch.save({"grads": [parameter.grad for parameter in loop.parameters]}, file)
    file.seek(0)
    loop.note(sum(each.cpu().sum() for each in torch.load(file)["grads"]))
    assert "tensor" in repr(loop.parameters[0].grad)
    assert loop.parameters[0].grad.is_contiguous()


def accumulate(loop):
    for number in range(4):
        (loop.loss() / 4).backward()
        if number == 2:
            nn.utils.clip_grad_norm_(loop.parameters, 0.2)
            loop.note(loop.parameters[0].grad.sum())


def accumulate_with_assignments(loop):
    loop.backward()
    loop.parameters[0].grad = None
    loop.parameters[1].grad = torch.ones_like(loop.parameters[1])
    loop.parameters[2].grad = loop.parameters[2].grad * 2
    loop.backward()
    loop.note(sum(parameter.grad.sum() for parameter in loop.parameters))


def accumulate_without_reduction(loop):
    no_sync = getattr(loop.model, "no_sync", contextlib.nullcontext)
    with no_sync():
        loop.backward()
        loop.note(loop.parameters[0].grad.sum())
        loop.backward()
    loop.backward()
    loop.note(loop.parameters[0].grad.sum())


def hold_gradients(loop):
    """Two tasks, each with gradients of its own, which are added up by hand."""
    loop.backward()
    first = [parameter.grad for parameter in loop.parameters]
    loop.net.zero_grad()
    loop.backward()
    second = [parameter.grad for parameter in loop.parameters]
    loop.optimizer.zero_grad()
    loop.backward()
    for parameter, one, other in zip(loop.parameters, first, second, strict=True):
        loop.note((one * other).sum())
        parameter.grad = one - 0.5 * other + parameter.grad
    loop.parameters[0].grad = first[0]


def gradient_of_gradients(loop):
    """A penalty on the gradients themselves, which a second backward differentiates."""
    loop.loss().backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in loop.parameters)
    loop.note(penalty.detach())
    gradients = torch.autograd.grad(penalty, loop.parameters)
    for parameter, gradient in zip(loop.parameters, gradients, strict=True):
        parameter.grad = parameter.grad.detach() + 0.1 * gradient


def assign_in_the_groups(loop):
    loop.backward()
    for group in loop.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad * 0.5
    loop.backward()
    loop.note(loop.parameters[0].grad.norm())


def clear_in_the_groups(loop):
    loop.backward()
    for group in loop.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    loop.backward()


def scale(loop):
    scaler = torch.amp.GradScaler(loop.device.type, init_scale=128.0)
    scaler.scale(loop.loss()).backward()
    scaler.unscale_(loop.optimizer)
    loop.note(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))


def multiply(parameter):
    parameter.grad.mul_(3)


def hooks(loop):
    handles = [
        parameter.register_hook(lambda gradient: gradient * 2) for parameter in loop.parameters[:2]
    ]
    handles.append(loop.parameters[2].register_post_accumulate_grad_hook(multiply))
    loop.backward()
    loop.backward()
    for handle in handles:
        handle.remove()


def few_rows(loop):
    """The forward of one row runs on the first device alone."""
    loop.criterion(loop.model(torch.ones(1, 4)), torch.tensor([1])).backward()
    loop.note(nn.utils.clip_grad_norm_(loop.parameters, 0.1))
    loop.backward()
    loop.note(nn.utils.clip_grad_norm_(loop.parameters, 0.1))


def set_tensors_once(loop):
    """Gradients in one vector, in which autograd accumulates."""
    vector = torch.zeros(
        sum(parameter.numel() for parameter in loop.parameters), device=loop.device
    )
    start = 0
    for parameter in loop.parameters:
        parameter.grad = vector[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    loop.backward()
    loop.note(vector.norm())
    vector.mul_(0.5)
    loop.backward()
    vector.mul_(0.1 / vector.norm())


LINES = [
    clip_by_norm,
    clip_by_hand,
    assign,
    write_rows,
    read,
    accumulate,
    accumulate_with_assignments,
    accumulate_without_reduction,
    hold_gradients,
    gradient_of_gradients,
    assign_in_the_groups,
    clear_in_the_groups,
    scale,
    hooks,
    few_rows,
    set_tensors_once,
]
CLEARS = {
    "optimizer": lambda loop: loop.optimizer.zero_grad(),
    "net": lambda loop: loop.net.zero_grad(),
    "model": lambda loop: loop.model.zero_grad(),
    "optimizer in place": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "net in place": lambda loop: loop.net.zero_grad(set_to_none=False),
    "model in place": lambda loop: loop.model.zero_grad(set_to_none=False),
    "None by hand": lambda loop: [
        setattr(parameter, "grad", None) for parameter in loop.parameters
    ],
    "zeros by hand": lambda loop: [
        parameter.grad.detach_().zero_() for parameter in loop.parameters
    ],
    "zeros of data": lambda loop: [parameter.grad.data.zero_() for parameter in loop.parameters],
    "del": lambda loop: [delattr(parameter, "grad") for parameter in loop.parameters],
}


def run(devices, lines, clear, **settings):
    loop = Loop(devices, **settings)
    for _ in range(3):
        lines(loop)
        loop.optimizer.step()
        loop.note(loop.parameters[1].grad.sum() if loop.parameters[1].grad is not None else 0)
        CLEARS[clear](loop)
    return [*loop.log, *(parameter.detach().cpu() for parameter in loop.parameters)]


def assert_equal_to_the_plain_program(
    devices, lines, clear, kind=torch.optim.SGD, shard=None, **settings
):
    settings = settings or {"lr": 0.1, "momentum": 0.9}
    expected = run(None, lines, clear, kind=kind, **settings)
    with simulate(4):
        result = run(DEVICES[devices], lines, clear, kind=kind, shard=shard, **settings)
    assert_close(result, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("lines", LINES, ids=lambda lines: lines.__name__)
@pytest.mark.parametrize("devices", ["three replicas", "four devices"])
def test_lines_equal_the_plain_program(devices, lines):
    assert_equal_to_the_plain_program(devices, lines, "optimizer")


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("devices", ["one device", "four devices"])
def test_gradients_are_cleared_as_in_the_plain_program(devices, clear):
    assert_equal_to_the_plain_program(devices, clip_by_norm, clear)
    assert_equal_to_the_plain_program(devices, accumulate_without_reduction, clear)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    "lines", slow_but(LINES, clip_by_norm, write_rows), ids=lambda lines: lines.__name__
)
def test_lines_equal_the_plain_program_with_whole_parameters(lines):
    assert_equal_to_the_plain_program(
        "four devices", lines, "net", torch.optim.AdamW, "parameters", lr=0.1
    )


def test_complex_gradients_may_be_conjugated():
    with simulate(3):
        net = nn.Linear(2, 4, dtype=torch.complex128)
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        model(torch.randn(6, 2, dtype=torch.complex128)).gather("cpu").abs().sum().backward()
        gradient = net.weight.grad
        expected = net.weight.grad.clone()
        for each in (gradient, expected):
            each.conj().add_(1j)
            each.imag.mul_(2)
            each.mul_(each.mT.conj().sum())
        assert_close(gradient.clone(), expected)
        assert_close(gradient.conj() * gradient, expected.conj() * expected)
        optimizer.step()


def test_operators_that_change_the_shape_in_place_are_an_error():
    with simulate(3):
        loop = Loop(DEVICES["four devices"][:3], lr=0.1)
        loop.backward()
        with pytest.raises(
            TypeError,
            match=r"t_.* would change the shape of parameter.grad.*parameter.grad.clone\(\)",
        ):
            loop.parameters[0].grad.t_()


def test_parameters_without_elements_do_not_hinder_an_optimizer():
    """Adafactor divides by the number of elements."""
    with simulate(2):
        net = build_net()
        net.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adafactor, lr=0.1)
        before = net[0].weight.detach().cpu()
        model(torch.randn(6, 4)).gather("cpu").sum().backward()
        optimizer.step()
        assert not net[0].weight.cpu().equal(before)
