"""Hooks of parameters: called once per update, with the gradient of the whole batch. Hooks of modules: a warning."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.problems import build_net, class_batch, class_targets
from helpers.slow import pairs
from helpers.steps import make_step, parallel_step, rows_of, run, tolerance_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import TrainStep, parallelize

CPUS = ["cpu"] * 3
# It lies between the entries of the gradient, and of those of parts of the batch.
LIMIT = 0.02


def clamp(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


def halve(parameter):
    parameter.grad = parameter.grad / 2


def hook(net, calls):
    """Clamps each gradient, and halves that of the last bias afterwards. Notes how often it is called."""
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: calls.append(1))  # returns None
        parameter.register_hook(clamp)
    net[2].bias.register_post_accumulate_grad_hook(halve)


def train(step, way, inputs, targets):
    if way != "add":
        return step(inputs, targets)
    step.add(inputs[:2], targets[:2])
    step.add(inputs[2:], targets[2:])
    return step.apply()


def check_hooks(rank, ranks, way, precision, strategy):
    torch.set_default_dtype(torch.float32 if precision == "fp16" else torch.float64)
    net = build_net()
    plain = Plain(net, nn.CrossEntropyLoss(), clip=0.1)
    calls = []
    hook(plain.module, [])
    model, criterion = parallelize(
        net, nn.CrossEntropyLoss(), CPUS if ranks == 1 else None, strategy=strategy
    )
    hook(net, calls)
    optimizer = sgd(net)
    size = {"micro": 1, "auto": "auto"}.get(way)
    step = TrainStep(
        model, criterion, optimizer, micro_batch_size=size, precision=precision, max_grad_norm=0.1
    )
    for number in range(3):
        torch.manual_seed(number)
        inputs = torch.randn(7, 4) * 3
        targets = class_targets(7, ignored=2)
        loss = plain(inputs, targets)
        mine = rows_of(rank, ranks)
        found = train(step, way, inputs[mine], targets[mine])
        assert_close(found, loss, rtol=tolerance_of(precision), atol=1e-10)
        assert_close(step.grad_norm, plain.norm, rtol=tolerance_of(precision), atol=0.0)
        error = tolerance_of(precision)
        plain.assert_same(net, gradients=strategy != "fsdp", rtol=error, atol=error)
        assert len(calls) == 4 * (number + 1)


CASES = pairs(["step", "micro", "add", "auto"], ["replicas", "ddp"], ["fp32", "fp16"])


@pytest.mark.parametrize(("way", "strategy", "precision"), [*CASES, ("micro", "fsdp", "fp32")])
def test_hooks_of_parameters_get_the_gradient_of_the_batch(strategy, precision, way):
    run(1 if strategy == "replicas" else 2, check_hooks, way, precision, strategy)


class Branches(nn.Module):
    """The second branch is taken if the rows say so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(4, 5)

    def forward(self, inputs):
        return self.first(inputs) + (self.second(inputs) if (inputs > 0).all() else 0)


def check_unused(rank, ranks):
    """A hook is not called for a parameter without a gradient. Autograd called it with None on a rank that had not used it."""
    torch.set_default_dtype(torch.float64)
    net = Branches()
    calls = []
    net.second.weight.register_hook(lambda gradient: calls.append(gradient.shape))
    step = parallel_step(net, devices=CPUS if ranks == 1 else None)
    inputs = -torch.ones(2, 4)
    step(inputs, class_targets(2))
    assert calls == []
    step(inputs if rank else -inputs, class_targets(2))
    assert calls == [(5, 4)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_are_called_for_gradients_only(ranks):
    run(ranks, check_unused)


def test_hooks_are_back_after_each_part_of_an_update():
    net = build_net()
    calls = []
    handle = net[0].weight.register_hook(lambda gradient: calls.append(1))
    step = make_step(net)
    inputs, targets = class_batch(7)
    step.add(inputs, targets)
    assert calls == []
    F.cross_entropy(net(inputs), targets).backward()
    assert calls == [1]
    with pytest.raises(RuntimeError):
        step.add(inputs[:, :2], targets)
    F.cross_entropy(net(inputs), targets).backward()
    with pytest.warns(UserWarning, match="this update drops them"):
        step(inputs, targets)
    assert calls == [1] * 3
    handle.remove()
    step(inputs, targets)
    assert calls == [1] * 3


def test_hooks_with_gradients_in_pieces_are_refused():
    net = build_net()
    net[0].weight.register_hook(clamp)
    step = make_step(net, devices=3, is_balanced=True)
    with pytest.raises(
        TypeError,
        match="a parameter has a hook of its gradient, of which BalancedOptimizer has pieces, expected",
    ):
        step(*class_batch(7))


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_hooks_of_modules_are_warned_of_once_where_a_batch_is_cut(register):
    net = build_net()
    getattr(net[2], register)(lambda *of: None)
    inputs, targets = class_batch(7)

    message = r"module\.2 has a hook of its backward, which gets gradients of one micro-batch"
    for settings in (
        {"devices": 2},
        {"devices": 1, "micro_batch_size": 2},
        {"devices": 1, "micro_batch_size": "auto"},
    ):
        step = make_step(net, **settings)
        with pytest.warns(UserWarning, match=message) as seen:
            step(inputs, targets)
            step(inputs, targets)
        assert [warning.filename for warning in seen] == [__file__]
    with pytest.warns(UserWarning, match="has a hook of its backward"):
        make_step(net, devices=1).add(inputs, targets)
    with warnings.catch_warnings(action="error"):
        make_step(net, devices=1)(inputs, targets)
