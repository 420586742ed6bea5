"""Writes that torch does not record, such as ``parameter.data.mul_()``: each forward has the values of the plain program."""

import pytest
import torch
from helpers.optimizers import balanced_or_plain
from helpers.problems import assert_equal, build_net
from helpers.slow import slow
from helpers.updates import ROWS, SIMULATED, assert_same_on_devices, random_batches, values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    gather,
    simulate,
)


def mse():
    return DataParallelCriterion(nn.MSELoss())


def exchange(net):
    first = net[2].weight.data
    second = net[3].weight.data
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def roll(tensor):
    tensor.copy_(tensor.roll(1))


UNRECORDED = {
    "multiplied": lambda net: net[2].weight.data.mul_(0.5),
    "negative": lambda net: net[2].weight.data.neg_(),
    "two signs": lambda net: net[2].weight.data[1, 1:3].neg_(),
    "permuted rows": lambda net: net[2].weight.data.copy_(net[2].weight.data.flip(0)),
    "permuted elements": lambda net: roll(net[2].weight.data.view(-1)),
    "exchanged": exchange,
    "a little more": lambda net: net[2].bias.data[-1].add_(1e-14),
}
WHEN = [2, 9, 20, 33, 34, 36, 37]


def build_square():
    """A net whose inner weights have one shape."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)
    )


def plain(net, batches, write):
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    losses = []
    for number, (x, y) in enumerate(batches):
        write(net, number)
        optimizer.zero_grad()
        losses.append(nn.functional.mse_loss(net(x), y))
        losses[-1].backward()
        optimizer.step()
    return [*losses, *values_of(net)]


def on_devices(net, batches, write, is_balanced, by_step):
    model = DataParallelModel(net.to("sim:0"), SIMULATED)
    optimizer = balanced_or_plain(model, torch.optim.Adam, is_balanced, lr=0.02)
    step = TrainStep(model, mse(), optimizer, micro_batch_size=2)
    losses = []
    for number, (x, y) in enumerate(batches):
        write(net, number)
        if by_step:
            losses.append(step(x, y).cpu())
            continue
        optimizer.zero_grad()
        losses.append(mse()(model(x), y))
        losses[-1].backward()
        optimizer.step()
    return [*[loss.cpu() for loss in losses], *values_of(net)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("is_frozen", "is_balanced", "by_step"),
    [(True, False, True), (False, True, False), slow(False, False, True), slow(True, True, True)],
)
def test_an_update_follows_writes_that_torch_does_not_record(is_frozen, is_balanced, by_step):
    def write(net, number):
        if number in WHEN:
            [*UNRECORDED.values()][WHEN.index(number)](net)

    def build():
        torch.manual_seed(0)
        net = build_square()
        net[2].requires_grad_(not is_frozen)
        net[3].requires_grad_(not is_frozen)
        return net

    expected = plain(build(), random_batches(39), write)
    with simulate(3):
        assert_equal(on_devices(build(), random_batches(39), write, is_balanced, by_step), expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", UNRECORDED)
@pytest.mark.parametrize("is_training", [False, True])
def test_a_forward_follows_writes_that_torch_does_not_record(name, is_training):
    with simulate(3), torch.set_grad_enabled(is_training):
        net = build_square().to("sim:0")
        net[2].requires_grad_(False)
        net[3].requires_grad_(False)
        model = DataParallelModel(net)
        x = torch.randn(ROWS, 4)
        for _ in range(3):
            before = gather(model(x))
            UNRECORDED[name](net)
            found = gather(model(x))
            assert not torch.equal(found, before)
            assert_close(found, net(x.to("sim:0")), rtol=1e-15, atol=1e-15)


class Anchored(torch.optim.SGD):
    """Copies the values when it is made, and pulls towards them."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.anchors = {
            each: each.detach().clone() for group in self.param_groups for each in group["params"]
        }

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter, anchor in self.anchors.items():
            parameter.lerp_(anchor, 0.5)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("refresh", ["recorded", "always"])
def test_an_optimizer_is_made_of_values_that_torch_did_not_record(refresh):
    def trained(devices):
        net = build_net().to(devices[0])
        model = DataParallelModel(net, devices, refresh=refresh)
        for x, y in random_batches(1):
            model(x)
            net[0].weight.data.mul_(2.0)
            optimizer = BalancedOptimizer(model, Anchored, shard="elements", lr=0.1)
            mse()(model(x), y).backward()
            optimizer.step()
        return values_of(net)

    assert_same_on_devices(trained)


@pytest.mark.usefixtures("double")
def test_a_write_that_is_undone_after_a_failed_forward_is_followed():
    with simulate(3):
        net = build_net().requires_grad_(False)
        x = torch.randn(ROWS, 4)
        model = DataParallelModel(net.to("sim:0"))
        model(x)
        before = net[0].weight.clone()
        net[0].weight.data.mul_(0.5)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(ROWS, 3))
        net[0].weight.data.copy_(before)
        assert_close(gather(model(x)), net(x.to("sim:0")))


class Limited(nn.Linear):
    """Limits the norms of its weights in its forward, in a way that torch does not record."""

    def forward(self, x):
        self.weight.data.copy_(torch.renorm(self.weight.data, 2, 0, 0.3))
        return super().forward(x)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("is_frozen", "is_balanced"), [(True, False), (False, True), (False, False)]
)
def test_a_forward_that_writes_to_its_weights(is_frozen, is_balanced):
    def build():
        torch.manual_seed(0)
        net = build_square()
        net[2] = Limited(6, 6).requires_grad_(not is_frozen)
        return net

    def write(net, number):
        if number % 3 == 1:
            net[2].weight.data.mul_(2.0)

    expected = plain(build(), random_batches(12), write)
    with simulate(3):
        assert_equal(
            on_devices(build(), random_batches(12), write, is_balanced, by_step=True), expected
        )
