"""Optimizers of today, whose parameters belong to one device or rank as a whole: equal to the plain optimizer."""

import copy
import importlib
import itertools
import pkgutil

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import assert_same, assert_same_state
from helpers.optimizers import train as small_train
from helpers.problems import assert_equal, build_net
from helpers.ranks import on_ranks, run_ranks
from torch import nn
from torch.utils._pytree import tree_leaves

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)
from balanced_parallel.optim.balanced import assign_owners

pytestmark = pytest.mark.usefixtures("double")


ROWS = 11


class Mixed(nn.Module):
    """A layer that is used twice, a frozen parameter, and a parameter without a gradient.

    Matrices are square: their gradients have full rank. SOAP and Shampoo amplify rounding where they do not.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.middle(self.middle(self.first(x).tanh()).tanh()))


def matrices(net):
    return [parameter for parameter in net.parameters() if parameter.dim() == 2]


def trained(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def muon_groups(net):
    others = [parameter for parameter in net.parameters() if parameter.dim() != 2]
    return [
        {"params": matrices(net), "use_muon": True},
        {"params": others, "use_muon": False, "lr": 0.003},
    ]


def layer_groups(net):
    rest = [*net.middle.parameters(), *net.last.parameters(), net.unused]
    return [
        {"params": [*net.first.parameters()], "lr": 0.02, "weight_decay": 0.1},
        {"params": rest},
    ]


KINDS = {  # class, settings, function that makes the parameters of a net
    "Muon": ("torch.optim.Muon", {"lr": 0.05}, matrices),
    "Adafactor": ("torch.optim.Adafactor", {"lr": 0.05}, nn.Module.parameters),
    "Lion": ("pytorch_optimizer.Lion", {"lr": 0.01}, layer_groups),
    "LAMB": ("pytorch_optimizer.Lamb", {"lr": 0.05, "weight_decay": 0.1}, layer_groups),
    "SOAP": ("pytorch_optimizer.SOAP", {"lr": 0.05, "precondition_frequency": 2}, layer_groups),
    "Shampoo": (
        "pytorch_optimizer.Shampoo",
        {"lr": 0.05, "preconditioning_compute_steps": 2},
        nn.Module.parameters,
    ),
    "Muon with AdamW": ("pytorch_optimizer.Muon", {"lr": 0.05}, muon_groups),
    "values when it is made": ("helpers.optimizers.ToStart", {"lr": 0.05}, trained),
    "schedule-free": (
        "schedulefree.AdamWScheduleFree",
        {"lr": 0.05, "warmup_steps": 3},
        layer_groups,
    ),
}
resolve = pkgutil.resolve_name  # imports pytorch_optimizer where it is used: this takes a second


def train(step, part=slice(None)):
    """Trains, with a scheduler and the modes of schedule-free optimizers."""
    optimizer = step.optimizer
    generator = torch.Generator().manual_seed(5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(3):
        if number in (0, 2):
            getattr(optimizer, "train", lambda: None)()
        x, target = torch.randn(2, ROWS, 5, generator=generator)
        step(x[part], target[part])
        scheduler.step()
        if number in (1, 2):
            getattr(optimizer, "eval", lambda: None)()


def balanced(model, criterion, kind):
    make, settings, choose = KINDS[kind]
    optimizer = BalancedOptimizer(model, resolve(make), choose(model.module), **settings)
    return optimizer, TrainStep(model, criterion, optimizer, micro_batch_size=2, max_grad_norm=0.3)


def plain(kind):
    """Returns parameters and state of the plain optimizer after three updates, and after six."""
    make, settings, choose = KINDS[kind]
    net = Mixed()
    results = []
    optimizer = resolve(make)(choose(net), **settings)
    step = TrainStep(
        DataParallelModel(net, ["cpu"]),
        DataParallelCriterion(nn.MSELoss()),
        optimizer,
        max_grad_norm=0.3,
    )
    for _ in range(2):
        train(step)
        results.append(copy.deepcopy((dict(net.named_parameters()), optimizer.state_dict())))
    return results


def check(model, optimizer, step, expected, part=slice(None)):
    """Compares two stages of training. The state of the plain optimizer is loaded in between, as a run does that moves."""
    for values, state in expected:
        train(step, part)
        for name, parameter in model.module.named_parameters():
            found = whole(parameter).detach().cpu()
            assert_equal({name: found}, {name: values[name].detach()})
        assert_same_state(optimizer.state_dict(), state)
        optimizer.load_state_dict(state)
        assert_same_state(optimizer.state_dict(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_equal_the_plain_optimizer(kind):
    expected = plain(kind)
    with simulate(3):
        model = DataParallelModel(Mixed())
        optimizer, step = balanced(model, DataParallelCriterion(nn.MSELoss()), kind)
        check(model, optimizer, step, expected)
        devices = {
            tensor.device
            for group in optimizer.param_groups
            for tensor in group["params"]
            if tensor.requires_grad
        }
        assert len(devices) == 3


def check_ranks(rank, expected):
    for strategy, (kind, stages) in itertools.product(["ddp", "fsdp"], expected.items()):
        model, criterion = parallelize(Mixed(), nn.MSELoss(), ["cpu"], strategy=strategy)
        optimizer, step = balanced(model, criterion, kind)
        check(model, optimizer, step, stages, slice(0, 7) if rank == 0 else slice(7, ROWS))
        assert (
            0 < len(optimizer.state) < len(stages[0][1]["state"])
        )  # Each rank has its part alone.


FEW = ["Muon", "schedule-free", "values when it is made"]
OTHERS = ["SOAP", "Adafactor", "Lion", "LAMB", "Shampoo", "Muon with AdamW"]


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"]
)
def test_ranks_equal_the_plain_optimizer(kinds):
    run_ranks(2, check_ranks, {kind: plain(kind) for kind in kinds})


@on_ranks(2)
def test_state_of_frozen_shards_is_empty(rank):
    """Shards in it would be gathered by one rank alone, which would wait for the others."""
    model, _ = parallelize(Mixed(), nn.MSELoss(), ["cpu"], strategy="fsdp")
    optimizer = BalancedOptimizer(model, resolve("helpers.optimizers.ToStart"))
    state = optimizer.state_dict()["state"]
    found = [tuple(state[number]["start"].shape) for number in range(len(state))]
    expected = [tuple(parameter.shape) for parameter in Mixed().parameters()]
    expected[6] = (0,)
    assert found == expected


INEXACT = {
    "Prodigy": ("pytorch_optimizer.Prodigy", {}),
    "DAdaptAdaGrad": ("pytorch_optimizer.DAdaptAdaGrad", {}),
    "DAdaptSGD": ("pytorch_optimizer.DAdaptSGD", {}),
    "LAMB with a global norm": ("pytorch_optimizer.Lamb", {"pre_norm": True}),
    "random noise": ("pytorch_optimizer.Gravity", {}),
    "SparseAdam": ("torch.optim.SparseAdam", {}),
    "D-Adaptation at a small rate": (
        "pytorch_optimizer.DAdaptAdam",
        {"lr": 0.01},
    ),  # one size for all parameters grows slowly
    "D-Adaptation at a small rate of groups": ("pytorch_optimizer.DAdaptLion", {"lr": 0.001}),
    "a count of steps beside the parameters": ("pytorch_optimizer.MADGRAD", {"lr": 0.01}),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_updates_that_depend_on_other_parameters_raise_an_error(kind):
    name, settings = INEXACT[kind]
    with simulate(2):
        message = (
            "differs from|does not support dense"
            if kind == "SparseAdam"
            else f"{name.split('.')[1]} with shard="
        )
        with pytest.raises(TypeError, match=message):
            BalancedOptimizer(DataParallelModel(build_net()), resolve(name), **settings)


def test_elements_of_other_libraries_are_exact_or_raise_an_error():
    pytorch_optimizer = importlib.import_module("pytorch_optimizer")
    net = build_net()
    expected = copy.deepcopy(net)
    with simulate(3):
        model = DataParallelModel(net)
        for kind in (pytorch_optimizer.SOAP, pytorch_optimizer.Lamb, torch.optim.Adafactor):
            with pytest.raises(TypeError, match=f"{kind.__name__} with shard='elements' differs"):
                BalancedOptimizer(model, kind, shard="elements", lr=0.1)
        with pytest.raises(TypeError, match="Muon failed to update small tensors"):
            BalancedOptimizer(model, torch.optim.Muon, matrices(net), shard="elements")
        optimizer = BalancedOptimizer(model, pytorch_optimizer.Lion, shard="elements", lr=0.1)
        small_train(model, optimizer)
    reference = pytorch_optimizer.Lion(expected.parameters(), lr=0.1)
    small_train(DataParallelModel(expected, ["cpu"]), reference)
    assert_same(net, expected)


def test_owners_have_as_many_bytes():
    sizes = [50, 40, 30, 20, 10, 10, 5, 5]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    owners = assign_owners([frozen, *parameters], 3)
    loads = [
        sum(size for size, each in zip(sizes, parameters, strict=True) if owners[each] == owner)
        for owner in range(3)
    ]
    assert sorted(loads) == [55, 55, 60]


@pytest.mark.libraries
@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit"])
def test_8_bit_optimizers_equal_the_plain_optimizer(kind):
    """Within their rounding. State of 4,096 elements and more is in 8 bits; ``shard=None`` owns whole parameters."""
    torch.set_default_dtype(torch.float32)
    make = getattr(importlib.import_module("bitsandbytes.optim"), kind)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 80))
    expected = copy.deepcopy(net)
    states = []
    for each, devices in ((expected, ["cpu"]), (net, ["cpu"] * 3)):
        model = DataParallelModel(each, devices)
        optimizer = (
            make(each.parameters(), lr=1e-2)
            if each is expected
            else BalancedOptimizer(model, make, lr=1e-2)
        )
        step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), optimizer)
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            step(*torch.randn(2, ROWS, 80, generator=generator))
        states.append(optimizer.state_dict()["state"])
    assert_same(net, expected, 2e-3)
    assert states[0].keys() == states[1].keys()
    assert {leaf.dtype for leaf in tree_leaves(states[1]) if isinstance(leaf, torch.Tensor)} >= {
        torch.uint8
    }
