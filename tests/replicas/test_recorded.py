"""Replicas with ``refresh="recorded"``: they follow every write, and copy what was written.

Writes that torch does not record, such as ``parameter.data.mul_()``: each forward has the values of the plain program.
"""

import copy
import inspect

import pytest
import torch
from helpers.optimizers import balanced_or_plain, sgd
from helpers.problems import assert_equal, build_net
from helpers.slow import slow
from helpers.updates import (
    ROWS,
    SIMULATED,
    assert_same_on_devices,
    random_batches,
    values_of,
)
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    gather,
    parallelize,
    simulate,
)
from balanced_parallel.replicas.recorded import checksum


def recorded(net, devices=SIMULATED):
    """A model that has run before."""
    model = DataParallelModel(net.to(devices[0]), devices)
    model(torch.randn(ROWS, 4))
    return model


def mse():
    return DataParallelCriterion(nn.MSELoss())


def half(net):
    return net[0].weight.detach() * 0.5


def half_of_state(net):
    return {name: 0.5 * value for name, value in net.state_dict().items()}


def write_in_inference_mode(net):
    with torch.inference_mode():
        net[0].weight.mul_(0.5)


def set_data_of_all(net):
    vector = nn.utils.parameters_to_vector(net.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, net.parameters())


def unfreeze(net):
    net[0].weight.data.mul_(0.5)
    net[0].weight.requires_grad_(True)


WRITES = {
    "in place": lambda net: net[0].weight.detach().mul_(0.5),
    "in inference mode": write_in_inference_mode,
    "assigned data": lambda net: setattr(net[0].weight, "data", half(net)),
    "assigned data of all": set_data_of_all,
    "swapped": lambda net: torch.utils.swap_tensors(net[0].weight, nn.Parameter(half(net))),
    "loaded": lambda net: net.load_state_dict(half_of_state(net)),
    "loaded by assignment": lambda net: net.load_state_dict(half_of_state(net), assign=True),
    "replaced": lambda net: setattr(net[0], "weight", nn.Parameter(half(net))),
    "unfrozen": unfreeze,
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("is_trained", [False, True])
def test_replicas_follow_recorded_writes(name, is_trained):
    with simulate(3):
        net = build_net().requires_grad_(is_trained and name != "unfrozen")
        model = recorded(net)
        x = torch.randn(ROWS, 4)
        before = gather(model(x))
        WRITES[name](net)
        found = gather(model(x))
        assert_close(found, net(x.to("sim:0")))
        assert not torch.equal(found, before)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shard", ["elements", "parameters"])
def test_a_balanced_optimizer_does_not_lose_a_write(shard):
    """Owners have pieces of other copies, so the step would mix old and new elements."""

    def trained(net, model, optimizer):
        for x, y in random_batches(3):
            optimizer.zero_grad()
            mse()(model(x), y).backward()
            net[0].weight.data.mul_(0.5)
            optimizer.step()
        return values_of(net)

    net = build_net()
    other = copy.deepcopy(net)
    expected = trained(net, DataParallelModel(net, ["cpu"]), sgd(net))
    with simulate(3):
        model = recorded(other)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, shard=shard, lr=0.1)
        assert_equal(trained(other, model, optimizer), expected)


@pytest.mark.usefixtures("double")
def test_a_balanced_optimizer_that_fails_leaves_the_copies_right():
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("in the middle")

    with simulate(3):
        net = build_net()
        model = recorded(net)
        optimizer = BalancedOptimizer(model, Fails, lr=0.1)
        x, y = next(random_batches(1))
        mse()(model(x), y).backward()
        optimizer.shards.inner.fails = True
        with pytest.raises(RuntimeError, match="in the middle"):
            optimizer.step()
        assert_close(gather(model(x)), net(x.to("sim:0")))


def through_busiest(moved):
    """Returns the bytes that one of four devices has sent to others and received from them."""
    between = {ends: count for ends, count in moved.items() if "cpu" not in ends}
    return max(
        sum(count for ends, count in between.items() if f"sim:{index}" in ends)
        for index in range(4)
    )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("is_balanced", [False, True])
def test_bytes_do_not_depend_on_frozen_weights(is_balanced):
    def moved(width):
        torch.manual_seed(0)
        with simulate(4) as cluster:
            net = (
                nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
                .requires_grad_(False)
                .append(nn.Linear(4, 8, bias=False))
            )
            model = DataParallelModel(net.to("sim:0"))
            optimizer = balanced_or_plain(model, torch.optim.Adam, is_balanced, lr=0.05)
            step = TrainStep(model, mse(), optimizer)
            for x, _ in random_batches(4):
                before = cluster.moved
                step(x, x.repeat(1, 2))
            moved = cluster.moved - before
            return moved, sum(parameter.nbytes for parameter in net[2].parameters())

    small, _ = moved(8)
    large, size = moved(800)
    assert small == large
    assert size <= through_busiest(large) <= (3.3 if is_balanced else 4.3) * size


REFRESH = "refresh='never', expected 'always' or 'recorded'"


@pytest.mark.parametrize("call", [DataParallelModel, parallelize])
def test_other_ways_to_refresh_are_refused(call):
    with pytest.raises(ValueError, match=REFRESH):
        call(build_net(), device_ids=["cpu"] * 2, refresh="never")
    assert inspect.signature(call).parameters["refresh"].default == "recorded"


KINDS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.bool,
    torch.int64,
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_checksums_tell_other_bits_apart(dtype):
    tensor = torch.randint(2, (3, 5)).to(dtype)
    others = [tensor.clone() for _ in range(15)]
    for place, other in enumerate(others):
        flat = other.view(torch.uint8).view(-1)
        flat[place * tensor.itemsize] ^= 1 if dtype == torch.bool else 128
    same = [tensor.clone(), torch.cat([tensor[:1], tensor])[1:]]
    found = torch.stack([checksum([each]) for each in (tensor, *others, *same)])
    assert len(found[:16].unique()) == 16
    assert found[0] == found[16] == found[17]
    assert checksum([tensor[:0], tensor[0, 0]]).shape == ()


@pytest.mark.parametrize("distance", [1, 1021, 2042, 1021 * 1021])
def test_checksums_tell_places_and_signs_apart(distance):
    """Words stand in rows of 1021."""
    tensor = torch.linspace(1, 2, 1021 * 1022, dtype=torch.float64)
    exchanged = tensor.clone()
    negative = tensor.clone()
    exchanged[[0, distance]] = tensor[[distance, 0]]
    negative[[0, distance]] *= -1
    assert len({checksum([each]).item() for each in (tensor, exchanged, negative, -tensor)}) == 4


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
