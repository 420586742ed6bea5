"""Updates in the backward: the plain loop's parameters and state, without all gradients at once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import Sometimes, build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, parallelize, simulate
from balanced_parallel.savings import LinearCrossEntropy, release_gradients_in_backward

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, centered=True),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.bias = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(5))
        self.output = nn.Linear(4, 5)

    def forward(self, inputs):
        return self.output(torch.tanh(self.layer(torch.tanh(self.layer(inputs))))) + self.bias


NETS = {"mlp": build_net, "tied": Tied, "sometimes": Sometimes}


def loop(net, make_optimizer, released, forward=None, before_step=None):
    """Five steps with a schedule. Returns losses, parameters and the optimizer's state."""
    parameters = list(net.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.03}]
    optimizer = make_optimizer(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if released:
        release_gradients_in_backward(optimizer)
    losses, generator = [], torch.Generator().manual_seed(5)
    for number in range(5):
        inputs, targets = torch.randn(7, 4, generator=generator), class_targets(7, number)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets) if forward is None else forward(inputs, targets)
        loss.backward()
        if released:
            assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if number == 2:  # a checkpoint is loaded
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return losses, parameters, optimizer.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_plain_loops_are_equal(double, optimizer, net):
    expected, found = (loop(NETS[net](), OPTIMIZERS[optimizer], released) for released in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("net", NETS)
def test_replicas_equal_the_plain_loop(double, optimizer, net):
    expected = loop(NETS[net](), OPTIMIZERS[optimizer], False)
    module = NETS[net]()
    model, criterion = DataParallelModel(module, ["cpu"] * 2), DataParallelCriterion(nn.CrossEntropyLoss())
    found = loop(module, OPTIMIZERS[optimizer], True, lambda inputs, targets: criterion(model(inputs), targets))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_replicas_on_simulated_devices_equal_the_plain_loop(double):
    expected = loop(build_net(), OPTIMIZERS["SGD"], False)
    with simulate(3) as cluster:
        module = build_net().to(cluster.devices[0])
        model, criterion = DataParallelModel(module), DataParallelCriterion(nn.CrossEntropyLoss())
        found = loop(module, OPTIMIZERS["SGD"], True, lambda inputs, targets: criterion(model(inputs), targets))
        for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)


def test_gradients_never_exist_at_once():
    layers, width, peaks = 8, 256, []
    for released in (False, True):
        torch.manual_seed(0)
        with simulate(1) as cluster:
            net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(cluster.devices[0])
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
            if released:
                release_gradients_in_backward(optimizer)
            inputs = torch.randn(2, width).pin_memory().to(cluster.devices[0], non_blocking=True)
            with cluster.forbidding_waits():
                for _ in range(2):
                    net(inputs).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        peaks.append(cluster.peak[0])
    size = 4 * width * width
    assert peaks[0] >= 2 * layers * size
    assert peaks[1] <= (layers + 2.5) * size  # the parameters, one gradient and a little more


def test_frozen_and_added_parameters_are_updated_by_the_step(double):
    nets = [build_net() for _ in range(2)]
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1) for net in nets]
    nets[1][0].bias.requires_grad_(False)
    release_gradients_in_backward(optimizers[1])
    nets[1][0].bias.requires_grad_(True)
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.add_param_group({"params": list(net[2].parameters())})
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.ones(3, 4)), class_targets(3)).backward()
            optimizer.step()
    assert nets[1][0].weight.grad is None
    assert nets[1][0].bias.grad is not None
    torch.testing.assert_close(list(nets[0].parameters()), list(nets[1].parameters()), rtol=1e-10, atol=1e-10)


def test_accumulation_is_refused():
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients_in_backward(optimizer)
    net(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer.step\(\): call this after each backward"):
        net(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    net(torch.ones(1, 4)).sum().backward()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    with pytest.raises(RuntimeError, match=r"shape \(6, 4\) was updated in the backward, and has a gradient again"):
        optimizer.step()


def test_removing_the_handle_brings_back_the_plain_optimizer():
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = release_gradients_in_backward(optimizer)
    with pytest.raises(ValueError, match="released already"):
        release_gradients_in_backward(optimizer)
    handle.remove()
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is not None for parameter in net.parameters())
    release_gradients_in_backward(optimizer).remove()


def test_a_deleted_optimizer_updates_nothing():
    net = build_net()
    release_gradients_in_backward(torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_that_need_all_gradients_are_refused():
    net = build_net()
    model = DataParallelModel(net, ["cpu"] * 2)
    with pytest.raises(TypeError, match="LBFGS needs the gradients of all parameters at once"):
        release_gradients_in_backward(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(TypeError, match="the optimizer is a Own, expected one of torch.optim"):
        release_gradients_in_backward(Own(net.parameters()))
    with pytest.raises(TypeError, match="the optimizer is a BalancedOptimizer, expected one of torch.optim"):
        release_gradients_in_backward(BalancedOptimizer(model, torch.optim.SGD, lr=0.1))
    with pytest.raises(TypeError, match="the optimizer is a Sequential"):
        release_gradients_in_backward(net)


def check_ranks(rank):
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients_in_backward(optimizer)
    model, criterion = parallelize(net, nn.CrossEntropyLoss())  # starts the process group
    message = "needs one process, 2 ranks reduce their gradients after the backward"
    with pytest.raises(RuntimeError, match=message):
        criterion(model(torch.ones(2, 4)), class_targets(2)).backward()
    with pytest.raises(RuntimeError, match=message):
        release_gradients_in_backward(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="release_gradients_in_backward was applied to SGD"):
        TrainStep(model, criterion, optimizer)(torch.ones(2, 4), class_targets(2))
    return True


def test_ranks_are_refused():
    assert run_ranks(2, check_ranks, fresh=True) == [True, True]


def test_heads_with_parameters_are_released_too(double):
    found = []
    for released in (False, True):
        torch.manual_seed(1)
        net, head = nn.Embedding(11, 6), LinearCrossEntropy(6, 11)
        head.linear.weight = net.weight  # both the first and the last layer
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        if released:
            release_gradients_in_backward(optimizer)
        model, criterion = DataParallelModel(net, ["cpu"] * 2), DataParallelCriterion(head)
        for _ in range(3):
            tokens = torch.arange(7)
            criterion(model(tokens), tokens + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(net.weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
