"""``BalancedOptimizer``: parameters, state and settings of the plain optimizer."""

import pytest
import torch
from helpers.optimizers import (
    assert_same,
    assert_same_state,
    plain,
    train,
)
from helpers.problems import BODIES, CLASSES, assert_equal, build_net
from helpers.updates import values_of
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelModel,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double", "buckets")

KINDS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {},
    "Adadelta": {"lr": 1.0},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "ASGD": {},
}


def channels_last():
    layers = (
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 8, 2),
        nn.Conv2d(8, 8, 1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


NETWORKS = BODIES | {"channels last": channels_last}
LARGE = 25 * 2**20
SMALL = 1
CASES = [
    *((SMALL, kind, "mlp", None) for kind in KINDS),
    *((LARGE, "AdamW", network, None) for network in NETWORKS),
    (LARGE, "Adam", "mlp", ["cpu"] * 3),  # a plain optimizer
]


@pytest.mark.parametrize(("buckets", "kind", "network", "devices"), CASES, indirect=["buckets"])
def test_elementwise_optimizers_equal_the_plain_program(kind, network, devices):
    net = NETWORKS[network]()
    optimizer_class = getattr(torch.optim, kind)
    settings = {"lr": 0.1} | KINDS[kind]
    expected, reference = plain(net, lambda net: optimizer_class(net.parameters(), **settings))
    with simulate(4):
        model = DataParallelModel(net, devices)
        optimizer = BalancedOptimizer(model, optimizer_class, **settings)
        train(model, optimizer)
        assert_same(net, expected)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        for parameters in zip(
            *model.replicas.copies.by_device.values(), net.parameters(), strict=True
        ):
            assert all(
                parameter.cpu().equal(parameters[-1].detach().cpu()) for parameter in parameters
            )


def test_state_dict_and_step_hooks_are_called():
    seen = []
    with simulate(2):
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.1)
        optimizer.register_state_dict_pre_hook(lambda this: seen.append(("saving", this)))
        optimizer.register_state_dict_post_hook(lambda this, state: {**state, "extra": 1})
        optimizer.register_state_dict_post_hook(lambda this, state: seen.append(("saved", this)))
        optimizer.register_load_state_dict_pre_hook(
            lambda this, state: {k: v for k, v in state.items() if k != "extra"}
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda this, state: seen.append(("loading", this))
        )
        optimizer.register_load_state_dict_post_hook(lambda this: seen.append(("loaded", this)))
        state = optimizer.state_dict()
        assert state["extra"] == 1
        optimizer.load_state_dict(state)
        assert state["extra"] == 1
        assert seen == [(word, optimizer) for word in ("saving", "saved", "loading", "loaded")]
        steps = []
        optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
        optimizer.register_step_post_hook(lambda *_: steps.append("after"))
        optimizer.step()
        assert steps == ["before", "after"]


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["sim:0", "sim:1"]], ids=["cpu", "sim"])
def test_empty_parameter_lists_raise_an_error(devices):
    with simulate(2):
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            BalancedOptimizer(DataParallelModel(nn.Tanh(), devices), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            BalancedOptimizer(
                DataParallelModel(build_net().to(devices[0]), devices), torch.optim.SGD, [], lr=0.1
            )
        frozen = DataParallelModel(build_net().to(devices[0]).requires_grad_(False), devices)
        optimizer = BalancedOptimizer(frozen, torch.optim.SGD, lr=0.1)
        before = values_of(frozen)
        frozen(torch.randn(4, 4))
        optimizer.step()
        assert_equal(values_of(frozen), before)
