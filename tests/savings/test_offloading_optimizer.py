"""``offload_optimizer``: the same updates, with the state on the host."""

import copy

import pytest
import torch
from helpers.optimizers import sgd
from helpers.ranks import on_ranks, run_ranks
from helpers.updates import values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    memory,
    parallelize,
    savings,
    simulate,
)

KIB = 2**10


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    for rows in (7, 5, 6, 9)[:count]:
        targets = torch.randint(3, (rows,), generator=generator)
        targets[1] = -100
        yield torch.randn(rows, 6, generator=generator), targets


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "groups": lambda parameters: torch.optim.Adam(
        [{"params": parameters[:1], "lr": 0.3}, {"params": parameters[1:]}], lr=0.1
    ),
}


def train(
    net, make, batches, device="cpu", *, decay=0.5, offloaded=False, devices=None, **settings
):
    """Trains with clipping and a scheduler. Returns the optimizer."""
    net.to(device)
    optimizer = make(list(net.parameters()))
    if offloaded:
        savings.offload_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    model = DataParallelModel(net, devices or [device])
    step = TrainStep(
        model,
        DataParallelCriterion(nn.CrossEntropyLoss()),
        optimizer,
        max_grad_norm=0.3,
        **settings,
    )
    for inputs, targets in batches:
        step(inputs, targets)
        scheduler.step()
    return optimizer


def assert_equal_states(first, second):
    assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=2e-6, check_device=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_state_are_those_of_the_plain_optimizer(name):
    plain = make_net()
    net = make_net()
    reference = train(plain, OPTIMIZERS[name], batches())
    with simulate(2):
        devices = ["sim:0", "sim:1"]
        optimizer = train(
            net,
            OPTIMIZERS[name],
            batches(),
            "sim:0",
            offloaded=True,
            devices=devices,
            micro_batch_size=2,
        )
        assert {
            parameter.device.type
            for group in optimizer.param_groups
            for parameter in group["params"]
        } == {"sim"}
        tensors = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert_equal_states(optimizer, reference)
        assert_close(
            list(net.parameters()), list(plain.parameters()), check_device=False, rtol=0, atol=2e-6
        )
        del optimizer, net


def test_a_run_goes_on_from_a_plain_checkpoint_and_back():
    plain = make_net()
    reference = train(plain, OPTIMIZERS["adamw"], batches(2))
    reference.zero_grad()
    states = copy.deepcopy((plain.state_dict(), reference.state_dict()))
    with simulate(1) as cluster:
        net = make_net().to("sim:0")
        optimizer = OPTIMIZERS["adamw"](list(net.parameters()))
        savings.offload_optimizer(optimizer)
        net.load_state_dict(states[0])
        before = cluster.live
        optimizer.load_state_dict(states[1])
        assert cluster.live == before  # torch would have moved the state to the parameters
        for inputs, targets in batches():
            nn.functional.cross_entropy(net(inputs.to("sim:0")), targets.to("sim:0")).backward()
            optimizer.step()
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(inputs), targets).backward()
            reference.step()
            reference.zero_grad()
        assert_equal_states(optimizer, reference)
        del net, optimizer


def test_parameters_without_gradients_stay_and_written_ones_count():
    with simulate(1):
        net = make_net().to("sim:0")
        optimizer = OPTIMIZERS["adamw"](list(net.parameters()))
        savings.offload_optimizer(optimizer)
        for written in (False, True):
            with torch.no_grad():
                net[2].bias.fill_(3.0 if written else 1.0)
            net[0](torch.ones(2, 6, device="sim:0")).sum().backward()
            optimizer.step()
            assert net[2].bias.tolist() == [3.0 if written else 1.0] * 3
        assert len(optimizer.state) == 2
        del net, optimizer


@pytest.mark.usefixtures("trace_in_this_process")
def test_devices_hold_no_state_and_an_estimate_knows_it():
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024)
    batch = (torch.zeros(4, 1024), torch.zeros(4, 1024))
    estimate = memory.estimate(
        net, nn.MSELoss(), *batch, device_kind="sim", savings="offload_optimizer"
    )
    plain = memory.estimate(net, nn.MSELoss(), *batch, device_kind="sim")
    assert (
        plain.parts[0]["optimizer state"]
        >= 2 * 4 * 1024 * KIB
        > estimate.parts[0]["optimizer state"]
        == 0
    )
    with simulate(1) as cluster:
        model = DataParallelModel(net.to("sim:0"))
        criterion = DataParallelCriterion(nn.MSELoss())
        step = TrainStep(model, criterion, torch.optim.AdamW(net.parameters()))
        savings.offload_optimizer(step.optimizer)
        for _ in range(2):
            cluster.reset_peak()
            step(*batch)
        assert max(estimate.allocated) == pytest.approx(cluster.peak[0], rel=0.01)
        assert memory.fit(step, *batch).rows == 4
        del step
    del net


@pytest.mark.usefixtures("trace_in_this_process")
def test_a_plan_for_one_device_chooses_it_and_runs():
    def make():
        return nn.Sequential(nn.Linear(512, 512))

    batch = torch.zeros(16, 512), torch.zeros(16, 512)
    plan = memory.plan(
        make(), nn.MSELoss(), *batch, batch_size=16, capacity="2.8MiB", device_kind="sim"
    )
    assert plan.chosen.savings == ("offload_optimizer",)
    assert plan.chosen.exact
    assert plan.chosen.host_traffic == 3 * 4 * (512 * 512 + 512)
    assert "savings.offload_optimizer(optimizer)" in plan.lines
    with simulate(1, memory="2.8MiB"):
        net = make().to("sim:0")
        *_, step = plan.apply(net, nn.MSELoss(), lr=0.1)
        for _ in range(2):
            step(*batch)
        names = {
            "nn": nn,
            "module": make(),
            "criterion": nn.MSELoss(),
            "inputs": batch[0],
            "targets": batch[1],
        }
        del net, step, _
        exec("\n".join(plan.lines), names)
        del names


def train_on_ranks(rank):
    with simulate(2):
        model, criterion = parallelize(make_net(), nn.CrossEntropyLoss(), strategy="ddp")
        optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
        savings.offload_optimizer(optimizer)
        step = TrainStep(model, criterion, optimizer, max_grad_norm=0.3, micro_batch_size=2)
        for inputs, targets in batches():
            step(inputs[rank::2], targets[rank::2])
        return values_of(model)


def test_ranks_of_ddp_are_updated_with_reduced_gradients():
    plain = make_net()
    train(plain, OPTIMIZERS["adamw"], batches(), decay=1.0)
    for parameters in run_ranks(2, train_on_ranks):
        assert_close(parameters, list(plain.parameters()), rtol=0, atol=2e-6)


@on_ranks(2)
def test_shards_are_refused(rank):
    with simulate(2):
        model = parallelize(make_net(), strategy="fsdp")
        with pytest.raises(
            TypeError,
            match="shards of FSDP2, expected whole ones: the ranks share the state already",
        ):
            savings.offload_optimizer(torch.optim.AdamW(model.parameters()))


def test_a_closure_and_other_optimizers_are_refused():
    with simulate(2):
        net = make_net().to("sim:0")
        optimizer = sgd(net)
        savings.offload_optimizer(optimizer)
        with pytest.raises(
            TypeError, match="step.. got a closure, whose backward .* expected step"
        ):
            optimizer.step(lambda: 0.0)
        with pytest.raises(ValueError, match="on the host already, expected one call"):
            savings.offload_optimizer(optimizer)
        balanced = BalancedOptimizer(DataParallelModel(net), torch.optim.SGD, lr=0.1)
        with pytest.raises(
            TypeError, match="of type BalancedOptimizer, expected an optimizer of whole parameters"
        ):
            savings.offload_optimizer(balanced)
        del net, optimizer, balanced
