"""Shards of parameters: checkpoints, changes between steps, shared parameters, copies.

Gradients of sharded parameters: read, written, clipped, changed by hooks.

Equal shards of parameters.
"""

import copy
import gc
import pickle

import pytest
import torch
from helpers.optimizers import (
    train,
)
from helpers.problems import CLASSES, build_net
from helpers.updates import assert_same_on_devices, random_batches, values_of
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    gather,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double", "buckets")


def test_replaced_parameters_raise_an_error():
    with simulate(2):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        for other in (model, DataParallelModel(net)):
            with pytest.raises(
                ValueError, match="parameters of the module have a BalancedOptimizer already"
            ):
                BalancedOptimizer(other, torch.optim.SGD, lr=1.0)
        net[1].note = "an attribute is not a parameter"
        train(model, optimizer, 1)
        net[0].bias = nn.Parameter(torch.zeros(6, device="sim:0"))
        for _ in range(2):
            with pytest.raises(
                RuntimeError,
                match="other parameters than when its BalancedOptimizer was made.*make a new one",
            ):
                train(model, optimizer, 1)
        del optimizer
        gc.collect()
        train(model, BalancedOptimizer(model, torch.optim.SGD, lr=1.0), 1)


class SharedHead(nn.Module):
    def __init__(self, weight, names=("weight", "own")):
        super().__init__()
        parameters = {
            "weight": weight,
            "own": nn.Parameter(torch.full((CLASSES,), 0.3, device=weight.device)),
        }
        for name in names:
            self.register_parameter(name, parameters[name])

    def forward(self, x, y):
        return ((x @ self.weight) @ self.weight.T * self.own - y).square().mean()


READS = {
    "nothing": lambda optimizer, weight: None,
    "param_groups": lambda optimizer, weight: optimizer.param_groups,
    "gradient": lambda optimizer, weight: None if weight.grad is None else weight.grad.clone(),
    "zeroed": lambda optimizer, weight: (
        optimizer.zero_grad()
    ),  # It is refused between add() and apply().
}


READ = [
    ("no_sync of the model", "nothing"),
    ("no_sync of the model", "zeroed"),
    ("no_sync of two models", "gradient"),
    ("train step", "param_groups"),
    ("train step", "gradient"),
]


@pytest.mark.parametrize(("how", "read"), READ)
def test_gradients_of_a_shared_parameter_that_wait_elsewhere_are_not_lost(how, read):
    """The optimizer takes ``grad`` of a parameter away, for which the gradients of other replicas may wait."""

    def trained(devices):
        net = build_net().to(devices[0])
        head = SharedHead(net[2].weight)
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        other = DataParallelModel(net, devices[::2])
        kind = torch.optim.SGD
        parameters = [*net.parameters(), head.own]
        optimizer = (
            kind(parameters, 0.05)
            if len(devices) == 1
            else BalancedOptimizer(model, kind, parameters, lr=0.05)
        )
        step = TrainStep(model, criterion, optimizer)

        def backward(x, y):
            loss = criterion(model(x), y)
            loss = (
                loss + gather(other(x + 1)).square().mean().to(loss.device)
                if how == "no_sync of two models"
                else loss
            )
            loss.backward()

        for _ in range(3):
            batches = list(random_batches(3))
            for x, y in batches[:2]:
                if how == "train step":
                    step.add(x, y)
                else:
                    with model.no_sync(), other.no_sync():
                        backward(x, y)
                READS[read](optimizer, net[2].weight)
            if how == "train step":
                step.add(*batches[2])
                step.apply()
            else:
                backward(*batches[2])
                optimizer.step()
                optimizer.zero_grad()
        return values_of(net, head)

    assert_same_on_devices(trained)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_raise_an_error(copied):
    model = DataParallelModel(build_net(), ["cpu"] * 2)
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.05)
    with pytest.raises(TypeError, match=r"expected its state_dict\(\): copy the model, and load"):
        copied((model, optimizer) if copied is not copy.copy else optimizer)


def test_a_converted_submodule_raises_an_error_with_a_fix():
    with simulate(2):
        model = DataParallelModel(build_net(), [0, 1])
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        x = torch.randn(5, 4)
        gather(model(x)).sum().backward()
        optimizer.step()
        model.module.float()
        for use in (lambda: model(x.float()), optimizer.step, lambda: model(x.float())):
            with pytest.raises(RuntimeError, match=r"converted or unfrozen\): make a new one"):
                use()


WRITES = {
    "multiplied": lambda tensor: tensor.mul_(0.5),
    "clamped": lambda tensor: tensor.clamp_(-0.1, 0.1),
    "copied": lambda tensor: tensor.copy_(torch.zeros_like(tensor)),
    "an element": lambda tensor: tensor.view(-1)[:1].fill_(0.0),
}


@pytest.mark.parametrize("shard", ["elements", "parameters"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_piece_of_a_parameter_is_not_lost_without_a_word(write, shard):
    """The next step began with the model's own parameters, so the write had no effect."""
    with simulate(2):
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, shard=shard, lr=0.1)
        train(model, optimizer, 2)
        with torch.no_grad():
            write(optimizer.param_groups[0]["params"][0])
        with pytest.raises(
            RuntimeError, match=r"param_groups was written to.*model\.parameters\(\)"
        ):
            train(model, optimizer, 1)
        with torch.no_grad():
            write(next(model.parameters()))
        train(model, optimizer, 2)


@pytest.mark.parametrize("refresh", ["recorded", "always"])
def test_other_lines_of_a_loop_write_to_no_piece(refresh):
    """Clipping, a scheduler, a state that is loaded, and values that are written to the model's own parameters."""
    with simulate(3):
        model = DataParallelModel(build_net(), refresh=refresh)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(3):
            train(model, optimizer, 1)
            (group,) = optimizer.param_groups
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
            optimizer.zero_grad()
            model.double()
