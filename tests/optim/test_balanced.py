"""``BalancedOptimizer``: parameters, state and settings of the plain optimizer."""

import copy

import pytest
import torch
from helpers.optimizers import (
    assert_same,
    assert_same_state,
    batches,
    plain,
    sgd,
    train,
)
from helpers.problems import BODIES, CLASSES, assert_equal, build_net
from helpers.updates import values_of
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    parallelize,
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


def test_schedulers_and_closures_equal_the_plain_program():
    def scheduled(model, criterion, optimizer):
        def closure(x, target):
            optimizer.zero_grad()
            criterion(model(x), target).backward()

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, target in batches(3):
            optimizer.step(lambda x=x, target=target: closure(x, target))
            scheduler.step()
        return scheduler.get_last_lr()

    net = build_net()
    expected = copy.deepcopy(net)
    rates = scheduled(expected, nn.CrossEntropyLoss(), sgd(expected, lr=1.0))
    with simulate(3):
        model = DataParallelModel(net)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        assert (
            scheduled(model, criterion, BalancedOptimizer(model, torch.optim.SGD, lr=1.0)) == rates
        )
        assert_same(net, expected)


@pytest.mark.parametrize("shard", ["elements", "parameters"])
def test_gradient_scaler_skips_steps_with_overflow(shard):
    with simulate(2):
        net = build_net().float()
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), precision="fp16")
        optimizer = BalancedOptimizer(model, torch.optim.SGD, shard=shard, lr=1.0)
        scaler = torch.amp.GradScaler("sim", init_scale=2.0**30)
        before = values_of(net)
        (x, target) = next(batches(1))
        scaler.scale(criterion(model(x.float()), target)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**29
        assert_equal(values_of(net), before)


def test_param_groups_equal_the_plain_program():
    net = build_net()

    def groups(net):
        return [
            {"params": net[0].parameters(), "lr": 0.5},
            {"params": [net[2].weight], "weight_decay": 0.1},
        ]

    expected, reference = plain(net, lambda net: torch.optim.Adam(groups(net), lr=0.1))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, params=groups(net), lr=0.1)
        train(model, optimizer)
        assert_same(net, expected)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        assert net[2].bias.grad is not None  # nobody's: as in the plain program
        with pytest.raises(RuntimeError, match="takes its param groups when it is made"):
            optimizer.add_param_group({"params": [net[2].bias]})
        one, two = (torch.optim.Adam(each) for each in (net.parameters(), groups(net)[::-1]))
        for other, message in ((one, "different number of"), (two, "doesn't match the size")):
            with pytest.raises(ValueError, match=f"loaded state dict .*{message}"):
                optimizer.load_state_dict(other.state_dict())


def test_parameters_of_a_criterion_are_updated_in_place():
    net = build_net()
    criterion = nn.AdaptiveLogSoftmaxWithLoss(CLASSES, CLASSES, cutoffs=[2, 3], div_value=1.0)
    expected = copy.deepcopy(nn.ModuleList([net, criterion]))
    reference = torch.optim.Adam(expected.parameters(), lr=0.1)
    train(
        expected[0], reference, 3, criterion=lambda output, target: expected[1](output, target).loss
    )
    with simulate(3):
        model = DataParallelModel(net)
        split = DataParallelCriterion(criterion.to("sim:0"))
        optimizer = BalancedOptimizer(
            model, torch.optim.Adam, [*net.parameters(), *criterion.parameters()], lr=0.1
        )
        train(model, optimizer, 3, criterion=split)
        assert_same(nn.ModuleList([net, criterion]), expected)


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
