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
    "gradient": lambda optimizer, weight: (
        optimizer.gradient(weight) if isinstance(optimizer, BalancedOptimizer) else weight.grad
    ),
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
