"""Ranks with different settings: each rank raises the error, which names the settings, the ranks and their values."""

import copy
import re

import pytest
import torch
from helpers.problems import CLASSES, build_net, class_targets
from helpers.ranks import on_ranks, run_ranks
from helpers.updates import values_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

from balanced_parallel import (
    BalancedOptimizer,
    ByCost,
    DataParallelCriterion,
    RankBatchSampler,
    TrainStep,
    parallelize,
)
from balanced_parallel.runtime import collectives

SGD = torch.optim.SGD
ADAM = torch.optim.AdamW


def make_step(
    kind=SGD,
    lr=0.1,
    loss=nn.CrossEntropyLoss,
    strategy="ddp",
    balanced=False,
    groups=1,
    schedule=None,
    out_dims=None,
    **settings,
):
    model, criterion = parallelize(
        build_net().double(), loss(), strategy=strategy, out_dims=out_dims
    )
    parameters = list(model.parameters())
    params = [
        {"params": parameters[: len(parameters) // groups]},
        {"params": parameters[len(parameters) // groups :]},
    ][:groups]
    optimizer = BalancedOptimizer(model, kind, lr=lr) if balanced else kind(params, lr=lr)
    scheduler = None if schedule is None else StepLR(optimizer, schedule)
    return TrainStep(model, criterion, optimizer, scheduler=scheduler, **settings)


def train(step, rank, number=0, rows=5):
    torch.manual_seed(number)
    inputs = torch.randn(2 * rows, 4, dtype=torch.float64)
    targets = class_targets(2 * rows)
    mine = slice(0, rows) if rank == 0 else slice(rows, None)
    return step(inputs[mine], targets[mine])


def error_of(call):
    """Returns the error that names how the ranks differ."""
    with pytest.raises(ValueError, match="^the ranks differ, expected the same ") as caught:
        call()
    return str(caught.value)


def error_of_settings(rank, name):
    """Returns the error of an update in which rank 1 has settings of its own."""
    return error_of(lambda: train(make_step(**SETTINGS[name][rank]), rank))


LOSSES = {
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": lambda: nn.CrossEntropyLoss(torch.arange(1.0, CLASSES + 1, dtype=torch.float64)),
    "summed": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "whole": lambda: DataParallelCriterion(nn.CrossEntropyLoss(), whole=True),
    "half": lambda: DataParallelCriterion(nn.CrossEntropyLoss(), precision="bf16"),
    "function": lambda: nn.functional.cross_entropy,
}
SETTINGS = {
    "lr": ({}, {"lr": 0.2}, "lr of param group 0: 0.1 on rank 0 and 0.2 on rank 1"),
    "optimizer": (
        {"kind": torch.optim.Adam},
        {"kind": ADAM},
        "optimizer: Adam on rank 0 and AdamW on rank 1",
    ),
    "balanced": (
        {},
        {"balanced": True},
        "optimizer: SGD on rank 0 and BalancedOptimizer of SGD on rank 1",
    ),
    "groups": ({}, {"groups": 2}, "number of param groups: 1 on rank 0 and 2 on rank 1"),
    "clip": (
        {"max_grad_norm": 1.0},
        {"max_grad_norm": 2.0},
        "max_grad_norm: 1.0 on rank 0 and 2.0 on rank 1",
    ),
    "precision": ({}, {"precision": "bf16"}, "precision: fp32 on rank 0 and bf16 on rank 1"),
    "auto": (
        {},
        {"micro_batch_size": "auto"},
        "micro_batch_size='auto': False on rank 0 and True on rank 1",
    ),
    "cost": (
        {},
        {"cut": ByCost(len, collate=tuple, limit=3)},
        "unit of the micro-batches: rows on rank 0 and cost on rank 1",
    ),
    "scheduler": ({}, {"schedule": 2}, "scheduler: none on rank 0 and StepLR on rank 1"),
    "loss": (
        {},
        {"loss": nn.MultiMarginLoss},
        "criterion: CrossEntropyLoss on rank 0 and MultiMarginLoss on rank 1",
    ),
    "smoothing": (
        {},
        {"loss": LOSSES["smoothed"]},
        "label_smoothing of the criterion: 0.0 on rank 0 and 0.1 on rank 1",
    ),
    "weights": (
        {},
        {"loss": LOSSES["weighted"]},
        r"weight of the criterion: None on rank 0 and \[1.0, 2.0, .* on rank 1",
    ),
    "reduction": ({}, {"loss": LOSSES["summed"]}, "reduction: mean on rank 0 and sum on rank 1"),
    "whole": ({}, {"loss": LOSSES["whole"]}, "whole: False on rank 0 and True on rank 1"),
    "half": (
        {},
        {"loss": LOSSES["half"]},
        "precision of the criterion: fp32 on rank 0 and bf16 on rank 1",
    ),
    "function": (
        {},
        {"loss": LOSSES["function"]},
        "criterion: CrossEntropyLoss on rank 0 and cross_entropy on rank 1",
    ),
    "strategy": ({}, {"strategy": "fsdp"}, "strategy: 'ddp' on rank 0 and 'fsdp' on rank 1"),
    "out_dims": ({}, {"out_dims": 1}, "out_dims: None on rank 0 and 1 on rank 1"),
    "reproducible": (
        {},
        {"reproducible": True},
        "reproducible: False on rank 0 and True on rank 1",
    ),
}


def assert_same_error(errors, message):
    assert errors[0] == errors[1]
    assert re.search(message, errors[0]), errors[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_different_settings_raise_one_error_on_all_ranks(name):
    assert_same_error(run_ranks(2, error_of_settings, name), SETTINGS[name][2])


def check_equal(rank, strategy):
    """Counts the exchanges of three updates with settings that change on all ranks alike."""
    gathered = []
    summed = []
    gather = collectives.gather_objects
    add = collectives.gather_numbers
    step = make_step(
        ADAM, strategy=strategy, micro_batch_size=2 + rank, max_grad_norm=1, schedule=1
    )
    with pytest.MonkeyPatch.context() as patch:

        def count(value, group=None):
            gathered.extend([value] if isinstance(value, str) else [])  # A digest of facts.
            return gather(value)

        patch.setattr(collectives, "gather_objects", count)
        patch.setattr(
            collectives,
            "gather_numbers",
            lambda *given, **group: summed.append(given) or add(*given, **group),
        )
        for number in range(3):
            train(step, rank, number)
            step.max_grad_norm *= 2
    return len(gathered), len(summed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_equal_settings_are_compared_in_one_exchange(strategy):
    assert run_ranks(2, check_equal, strategy) == [(1, 3)] * 2


def check_sampler(rank, other):
    settings = {"batch_size": 4, "seed": 0, **(other if rank else {})}
    step = make_step()
    next(iter(RankBatchSampler(range(16), **settings)))
    return error_of(lambda: train(step, rank))


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 8}, {"seed": 1}, {"micro_batch_size": 2}],
    ids=lambda other: next(iter(other)),
)
def test_samplers_that_differ_are_named(other):
    ((name, value),) = other.items()
    message = rf"the sampler's batches: RankBatchSampler\(.*rows=16.* on rank 0 and .*{name}={value}.* on rank 1"
    assert_same_error(run_ranks(2, check_sampler, other), message)


def check_failed_optimizer(rank, strategy):
    """Rank 1 fails in its optimizer, goes on, and has other parameters than rank 0 from there on."""
    step = make_step(strategy=strategy)
    train(step, rank)

    def fail(*arguments):
        raise ArithmeticError("no power")

    if rank:
        hook = step.optimizer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError, match="no power"):
            train(step, rank, 1)
        hook.remove()
    else:
        train(step, rank, 1)
    for number in range(2):  # again and again
        with pytest.raises(
            ValueError,
            match="the last step of the optimizer: was made on rank 0 and failed with ArithmeticError: no power on rank 1",
        ):
            train(step, rank, 2 + number)
    state = make_step(strategy=strategy).state_dict()
    step.load_state_dict(state)
    return train(step, rank, 4).item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_failure_in_the_optimizer_of_one_rank_is_told_to_the_others(strategy):
    losses = run_ranks(2, check_failed_optimizer, strategy)
    assert losses[0] == losses[1]


def fail_alike(rank):
    """All ranks fail alike, as at an out of memory that is undone on all, and go on."""
    step = make_step()
    hook = step.optimizer.register_step_pre_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(step, rank)
    hook.remove()
    return [train(step, rank, number).item() for number in range(2)]


def make_layers(strategy="ddp"):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, CLASSES)
    ).double()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy=strategy)
    return TrainStep(model, criterion, ADAM(model.parameters(), lr=0.1))


def load_state(step):
    full = {
        "step": torch.tensor(9.0),
        "exp_avg": torch.ones(6, dtype=torch.float64),
        "exp_avg_sq": torch.ones(6),
    }
    step.optimizer.load_state_dict({**step.optimizer.state_dict(), "state": {1: full}})


def swap_groups(step):
    first, *others = step.optimizer.param_groups[0]["params"]
    step.optimizer.param_groups[0]["params"] = others
    step.optimizer.add_param_group({"params": [first]})
    step.optimizer.param_groups.reverse()


def load_weights(step):
    step.model.module.load_state_dict(
        {name: value * 1 for name, value in step.model.module.state_dict().items()}
    )
    with torch.no_grad():
        step.model.module[0].weight[[0, 1]] = step.model.module[0].weight[
            [1, 0]
        ]  # the sum stays the same


# Each: what rank 1 does with a step and its state, and what the error says.
ALONE = {
    "lr": (
        lambda step, _: step.optimizer.param_groups[0].update(lr=0.3),
        "lr of param group 0: 0.1 on rank 0 and 0.3 on rank 1",
    ),
    "group": (
        lambda step, _: step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        "number of param groups: 1 on rank 0 and 2 on rank 1",
    ),
    "norm": (
        lambda step, _: setattr(step, "max_grad_norm", 5.0),
        "max_grad_norm: None on rank 0 and 5.0 on rank 1",
    ),
    "eps": (
        lambda step, _: step.optimizer.param_groups[0].update(eps=0.5),
        "eps of param group 0: 1e-08 on rank 0 and 0.5 on",
    ),
    "weights": (
        lambda step, _: load_weights(step),
        r"model.0.weight: checksum -?\d+ trained on rank 0 and checksum",
    ),
    "resumed": (
        lambda step, saved: step.load_state_dict(
            {**saved, "model": {name: 2 * one for name, one in saved["model"].items()}}
        ),
        "model.0.weight",
    ),
    "nan": (
        lambda step, _: nn.init.constant_(step.model.module[3].bias, torch.nan),
        "model.3.bias: checksum",
    ),
    "buffers": (
        lambda step, _: step.model.module[1].running_mean.add_(1),
        "model.1.running_mean: checksum 0 on",
    ),
    "state": (
        lambda step, _: load_state(step),
        "exp_avg of model.0.bias: nothing on rank 0 and checksum",
    ),
    "another state": (lambda step, _: load_state(step), "exp_avg of model.0"),
    "p": (
        lambda step, _: setattr(step.model.module[2], "p", 0.3),
        "p of model.2: 0.1 on rank 0 and 0.3 on",
    ),
    "momentum": (
        lambda step, _: setattr(step.model.module[1], "momentum", 0.2),
        "momentum of model.1: 0.1 on rank 0",
    ),
    "eval": (
        lambda step, _: step.model.module[2].eval(),
        "training of model.2: True on rank 0 and False",
    ),
    "eval of all": (
        lambda step, _: step.model.module.eval(),
        "training of model: True on rank 0",
    ),
    "frozen": (
        lambda step, _: step.model.module[0].bias.requires_grad_(False),
        r"model.0.bias: checksum -?\d+ trained on rank 0 and checksum -?\d+ on",
    ),
}


def check_alone(rank, name, updates, strategy):
    """Ranks differ behind some updates: rank 1 alone has changed something."""
    step = make_layers(strategy)
    for number in range(updates):
        train(step, rank, number)
    saved = step.state_dict()
    if rank:
        ALONE[name][0](step, saved)
    before = values_of(step.model)
    message = error_of(lambda: train(step, rank, updates))
    assert ("Nothing was updated" if updates else "expected the same settings") in message
    assert all(
        torch.equal(one, other) or other.isnan().any()
        for one, other in zip(before, step.model.parameters(), strict=True)
    )
    return message


FIRST = ("weights", "nan", "buffers", "state", "p", "momentum", "eval", "frozen")
LATER = ("lr", "group", "norm")
CASES = [
    *((name, 0, "ddp") for name in FIRST),
    *((name, 0, "fsdp") for name in ("buffers", "p", "eval")),
    *(
        (name, 2, "ddp")
        for name in (*LATER, "eps", "weights", "another state", "eval of all", "resumed")
    ),
    *((name, 2, "fsdp") for name in LATER),
]


@pytest.mark.parametrize(("name", "updates", "strategy"), CASES)
def test_what_one_rank_loads_or_sets_alone_is_refused_by_all_before_the_update(
    name, updates, strategy
):
    assert_same_error(run_ranks(2, check_alone, name, updates, strategy), ALONE[name][1])


@on_ranks(2)
def test_groups_of_equal_sizes_with_other_parameters_are_refused(rank):
    step = make_layers()
    swap_groups(step)
    if rank:
        bias = step.model.module[0].bias
        groups = step.optimizer.param_groups
        groups[0]["params"] = [bias]
        groups[1]["params"] = [
            parameter for parameter in step.model.parameters() if parameter is not bias
        ]
    with pytest.raises(ValueError, match="group of model.0.weight: 0 on rank 0 and 1 on"):
        train(step, rank)


def load_states_that_differ_and_then_one(rank):
    """Each rank loads a state of its own: both have loaded, so nothing else tells that they differ."""
    step = make_layers()
    train(step, rank)
    state = copy.deepcopy(step.state_dict())
    step.load_state_dict(
        {**state, "model": {name: value * (1 + rank) for name, value in state["model"].items()}}
    )
    with pytest.raises(ValueError, match="Nothing was updated.* model.0.weight"):
        train(step, rank, 1)
    step.load_state_dict(state)  # whose running statistics are those of this rank
    return train(step, rank, 2).item()


def have_statistics_and_load_equal_weights(rank):
    """Forwards by hand before the first update give each rank statistics of its own, and equal weights may be loaded."""
    torch.manual_seed(0)
    step = make_layers()
    step.model(torch.randn(3, 4, dtype=torch.float64) + rank)
    losses = [train(step, rank).item()]
    if rank:
        step.model.module.load_state_dict(step.model.module.state_dict())
    return [*losses, train(step, rank, 1).item()]


@pytest.mark.parametrize(
    "check",
    [fail_alike, load_states_that_differ_and_then_one, have_statistics_and_load_equal_weights],
)
def test_ranks_that_do_not_differ_go_on_with_one_loss(check):
    losses = run_ranks(2, check)
    assert losses[0] == losses[1]
