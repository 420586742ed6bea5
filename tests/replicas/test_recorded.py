"""Replicas with ``refresh="recorded"``: they follow what torch records, and other writes are errors that name the parameter."""

import copy
import itertools
import re

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import on_ranks
from helpers.slow import slow_but
from helpers.updates import ROWS, Unrecorded, assert_equal, random_batches, values_of
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    gather,
    parallelize,
    simulate,
)
from balanced_parallel.replicas.recorded import FIRST, INTERVAL, checksums

SIMULATED = ["sim:0", "sim:1", "sim:2"]


def recorded(net, devices=SIMULATED):
    """A model that has run more often than the first forwards, which are all compared."""
    model = DataParallelModel(net.to(devices[0]), devices, refresh="recorded")
    for _ in range(FIRST + 1):
        model(torch.randn(ROWS, 4))
    return model


def run_often(model):
    """Runs a model until its copies were compared, and once more."""
    for _ in range(INTERVAL + 1):
        model(torch.randn(ROWS, 4))


def mse():
    return DataParallelCriterion(nn.MSELoss())


class ThroughData(torch.optim.SGD):
    """Writes through ``.data``, as many optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])


def by_hand(net, devices, optimizer):
    model, criterion = DataParallelModel(net, devices, refresh="recorded"), mse()
    for x, y in random_batches(12):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def by_step(net, devices, optimizer):
    step = TrainStep(DataParallelModel(net, devices, refresh="recorded"), mse(), optimizer, micro_batch_size=2)
    for x, y in random_batches(12):
        step(x, y)


OPTIMIZERS = [torch.optim.Adam, Unrecorded, ThroughData]
CASES = [*itertools.product([by_hand, by_step], OPTIMIZERS)]


@pytest.mark.usefixtures("double", "buckets")
@pytest.mark.parametrize(("train", "kind"), slow_but(CASES, (by_hand, Unrecorded), (by_step, ThroughData)))
def test_replicas_follow_every_optimizer(train, kind):
    def trained(devices):
        net = build_net().to(devices[0])
        net[0].requires_grad_(False)
        train(net, devices, kind(net.parameters(), 0.05))
        return values_of(net)

    expected = trained(["cpu"])
    with simulate(3):
        assert_equal(trained(SIMULATED), expected)


def write_in_place(net):
    with torch.no_grad():
        net[0].weight.mul_(0.5)


def write_in_inference_mode(net):
    with torch.inference_mode():
        net[0].weight.mul_(0.5)


def set_data(net):
    net[0].weight.data = net[0].weight.data * 0.5


def set_data_of_all(net):
    vector = nn.utils.parameters_to_vector(net.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, net.parameters())


def swap(net):
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(net[0].weight.detach() * 0.5))


def load(net):
    net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})


def load_by_assignment(net):
    net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()}, assign=True)


def replace(net):
    net[0].weight = nn.Parameter(net[0].weight.detach() * 0.5)


def unfreeze(net):
    net[0].weight.data.mul_(0.5)
    net[0].weight.requires_grad_(True)


WRITES = [write_in_place, write_in_inference_mode, set_data, set_data_of_all, swap]
WRITES += [load, load_by_assignment, replace, unfreeze]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("is_trained", [False, True])
def test_replicas_follow_recorded_writes(write, is_trained):
    with simulate(3):
        net = build_net().requires_grad_(is_trained and write is not unfreeze)
        model, x = recorded(net), torch.randn(ROWS, 4)
        before = gather(model(x))
        write(net)
        found = gather(model(x))
        torch.testing.assert_close(found, net(x.to("sim:0")))
        assert not torch.equal(found, before)


def multiply(weight):
    weight.data.mul_(0.5)


def change_signs(weight):
    weight.data.neg_()


def permute(weight):
    weight.data.copy_(weight.data.flip(0))


def add_once(weight):
    weight.data.view(-1)[-1] += 1e-14


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("write", [multiply, change_signs, permute, add_once], ids=lambda write: write.__name__)
def test_another_write_is_an_error_that_names_the_parameter(write):
    with simulate(3):
        net, x = build_net().requires_grad_(False), torch.randn(ROWS, 4)
        model = recorded(net)
        write(net[2].weight)
        with pytest.raises(RuntimeError, match=r"^2\.weight differs from its copy on sim:1, .*model\.refresh_replicas\(\)"):
            run_often(model)
        torch.testing.assert_close(gather(model(x)), net(x.to("sim:0")))  # the error has refreshed them
        write(net[0].weight)
        model.refresh_replicas()
        for _ in range(2 * INTERVAL):
            torch.testing.assert_close(gather(model(x)), net(x.to("sim:0")))


@pytest.mark.usefixtures("double")
def test_an_evaluation_has_averages_that_are_swapped_in_and_refuses_merged_weights():
    """The trained weights are copied where it begins and ends. Frozen ones are compared before its first forward runs."""
    with simulate(3):
        net, x = build_net(), torch.randn(ROWS, 4)
        net[0].requires_grad_(False)
        model = recorded(net)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        for factor in (0.5, 2.0):
            for parameter in trained:
                parameter.data.mul_(factor)
            with torch.no_grad() if factor < 1 else torch.enable_grad():
                torch.testing.assert_close(gather(model(x)), net(x.to("sim:0")))
        net[0].weight.data += 1
        with pytest.raises(RuntimeError, match=r"^0\.weight differs"), torch.no_grad():
            model(x)


@pytest.mark.usefixtures("double")
def test_a_checkpoint_compares_the_copies():
    with simulate(3):
        net = build_net()
        net[0].requires_grad_(False)
        model = recorded(net)
        step = TrainStep(model, mse(), torch.optim.SGD(net.parameters(), 0.1))
        for x, y in random_batches(2):
            step(x, y)
        state = copy.deepcopy(step.state_dict())
        step.load_state_dict({**state, "model": {name: value / 2 for name, value in state["model"].items()}})
        step.state_dict()
        net[0].bias.data.zero_()
        with pytest.raises(RuntimeError, match=r"^0\.bias differs"):
            step.state_dict()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shard", ["elements", "parameters"])
def test_a_balanced_optimizer_does_not_lose_a_write(shard):
    """Owners have pieces of other copies, so the step would mix old and new elements."""
    with simulate(3):
        net = build_net()
        model = recorded(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, shard=shard, lr=0.1)
        batches = random_batches(3)
        x, y = next(batches)
        mse()(model(x), y).backward()
        net[0].weight.data.mul_(0.5)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"^0\.weight differs"):
            model(x)


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
        torch.testing.assert_close(gather(model(x)), net(x.to("sim:0")))


@pytest.mark.usefixtures("double", "buckets")
@pytest.mark.parametrize("is_balanced", [False, True])
def test_an_update_that_runs_again_after_an_out_of_memory(is_balanced):
    def trained(devices, fails):
        net = build_net().to(devices[0])
        model = DataParallelModel(net, devices, refresh="recorded")
        kind = torch.optim.Adam
        optimizer = BalancedOptimizer(model, kind, lr=0.05) if is_balanced else kind(net.parameters(), 0.05)
        step = TrainStep(model, mse(), optimizer, micro_batch_size="auto")
        for number, (x, y) in enumerate(random_batches(6)):
            if number == 2 and fails:
                handle = net.register_forward_hook(out_of_memory)
                step(x, y)
                handle.remove()
                assert step.micro_batch_size == 1
            else:
                step(x, y)
        return values_of(net)

    def out_of_memory(module, inputs, output):
        if len(output) > 1:
            raise torch.OutOfMemoryError("too many rows")

    expected = trained(["cpu"], fails=False)
    with simulate(3):
        assert_equal(trained(SIMULATED, fails=True), expected)


@pytest.mark.usefixtures("double")
def test_two_models_share_a_parameter_that_each_of_them_trains():
    def trained(devices):
        net = build_net().to(devices[0])
        other = nn.Sequential(net[0], nn.Tanh()).to(devices[0])
        models = [DataParallelModel(each, devices, refresh="recorded") for each in (net, other)]
        optimizers = [ThroughData(net.parameters(), 0.1), Unrecorded(other.parameters(), 0.05)]
        for x, y in random_batches(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                (gather(model(x)) - y.sum().to(devices[0])).square().mean().backward()
                optimizer.step()
        return values_of(net)

    expected = trained(["cpu"])
    with simulate(3):
        assert_equal(trained(SIMULATED), expected)


@pytest.mark.usefixtures("double")
def test_bytes_do_not_depend_on_frozen_weights():
    def moved(width, is_balanced):
        torch.manual_seed(0)
        with simulate(4) as cluster:
            net = (
                nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)).requires_grad_(False).append(nn.Linear(4, 8, bias=False))
            )
            model = DataParallelModel(net.to("sim:0"), refresh="recorded")
            kind = torch.optim.Adam
            optimizer = BalancedOptimizer(model, kind, lr=0.05) if is_balanced else kind(net.parameters(), 0.05)
            step = TrainStep(model, mse(), optimizer)
            for x, _ in random_batches(4):
                before = cluster.moved
                step(x, x.repeat(1, 2))
            moved = cluster.moved - before
            return moved, sum(parameter.nbytes for parameter in net[2].parameters())

    for is_balanced in (False, True):
        (small, _), (large, size) = moved(8, is_balanced), moved(800, is_balanced)
        assert small == large
        between = [sum(count for ends, count in large.items() if f"sim:{i}" in ends and "cpu" not in ends) for i in range(4)]
        assert size <= max(between) <= (3.3 if is_balanced else 4.3) * size


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.libraries
@pytest.mark.usefixtures("double")
def test_lora():
    """The reference without adapters freezes these for a forward."""
    peft = pytest.importorskip("peft")

    def trained(devices, cluster=None):
        net = peft.get_peft_model(build_net(), peft.LoraConfig(r=1, target_modules=["0", "2"])).to(devices[0])
        for parameter in net.parameters():  # the second matrix of an adapter is zero
            parameter.data.add_(0.1)
        model = DataParallelModel(net, devices, refresh="recorded")
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        step, seen = TrainStep(model, mse(), optimizer, micro_batch_size=2), []
        for number, (x, y) in enumerate(random_batches(INTERVAL)):
            before = cluster and cluster.moved
            with torch.no_grad(), net.disable_adapter():
                seen.append(gather(model(x)).cpu())
            step(x, y)
            if number == FIRST and cluster:
                most = 10 * sum(each.nbytes for each in net.parameters() if each.requires_grad)
                between = {ends: count for ends, count in (cluster.moved - before).items() if "cpu" not in ends}
                assert max(between.values()) < most
        return [*seen, *values_of(net)]

    expected = trained(["cpu"])
    with simulate(3) as cluster:
        assert_equal(trained(SIMULATED, cluster), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "Lookahead", "SAM"])
def test_optimizers_of_another_library(name):
    """Their modes and steps write through ``.data``."""
    library = pytest.importorskip("pytorch_optimizer")

    def trained(devices):
        net = build_net().to(devices[0])
        model, kind = DataParallelModel(net, devices, refresh="recorded"), getattr(library, name)
        if name == "SAM":
            optimizer = kind(net.parameters(), base_optimizer=torch.optim.SGD, lr=0.05)
        elif name == "Lookahead":
            optimizer = kind(torch.optim.SGD(net.parameters(), 0.05))
        else:
            optimizer = kind(net.parameters(), lr=0.05)
        seen = []
        for x, y in random_batches(2 * INTERVAL):
            getattr(optimizer, "train", bool)()
            for step in ["first_step", "second_step"] if name == "SAM" else ["step"]:
                optimizer.zero_grad()
                mse()(model(x), y).backward()
                getattr(optimizer, step)()
            getattr(optimizer, "eval", bool)()
            with torch.no_grad():
                seen.append(gather(model(x)).cpu())
        return [*seen, *values_of(net)]

    expected = trained(["cpu"])
    with simulate(3):
        assert_equal(trained(SIMULATED), expected)


@pytest.mark.slow
@on_ranks(2)
def test_ranks_have_no_replicas_to_refresh(rank):
    with pytest.raises(ValueError, match="refresh='never', expected 'always' or 'recorded'"):
        parallelize(build_net(), nn.MSELoss(), ["cpu"], refresh="never")
    model, criterion = parallelize(build_net(), nn.MSELoss(), ["cpu"], refresh="recorded")
    x, y = next(random_batches(1))
    assert criterion(model(x), y) > 0


def test_settings():
    with pytest.raises(ValueError, match=re.escape("refresh='never', expected 'always' or 'recorded'")):
        DataParallelModel(build_net(), ["cpu"] * 2, refresh="never")
    with pytest.raises(ValueError, match=re.escape("refresh=None, expected 'always' or 'recorded'")):
        parallelize(build_net(), device_ids=["cpu"] * 2, refresh=None)
    with simulate(3):
        model = copy.deepcopy(parallelize(build_net(), device_ids=SIMULATED, refresh="recorded"))
        for _ in range(FIRST):
            model(torch.randn(ROWS, 4))
        model.module[0].weight.data.zero_()
        with pytest.raises(RuntimeError, match="differs"):
            run_often(model)


KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_checksums_tell_other_bits_apart(dtype):
    tensor = torch.randint(2, (3, 5)).to(dtype)
    others = [tensor.clone() for _ in range(15)]
    for place, other in enumerate(others):
        flat = other.view(torch.uint8).view(-1)
        flat[place * tensor.itemsize] ^= 128
    found = checksums([tensor, *others, tensor.clone(), tensor.t().contiguous().t()])
    assert len(found[:16].unique()) == 16
    assert found[0] == found[16] == found[17]
    assert checksums([tensor[:0], tensor[0, 0]]).shape == (2,)
