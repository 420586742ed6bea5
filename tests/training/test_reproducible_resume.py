"""A run with dropout and ``reproducible=True`` that goes on in another layout ends with the weights of the undisturbed run."""

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.slow import slow
from helpers.updates import assert_equal, values_of
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    Checkpoints,
    RankBatchSampler,
    TrainStep,
    parallelize,
    simulate,
)

GENERATOR = torch.Generator().manual_seed(0)
DATA = torch.randn(17, 4, dtype=torch.float64, generator=GENERATOR), torch.arange(17) % 3
CPU, REPLICAS = ["cpu"], ["cpu"] * 3


def train(folder, until, devices=None, *, strategy="auto", reproducible=True, **settings):
    """Goes on from the newest checkpoint, saves one after update ``until``, and returns the losses of these updates and the
    weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.4), nn.ReLU(), nn.Linear(12, 3), nn.Dropout(0.2)).double()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), devices, strategy=strategy)
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    step = TrainStep(model, criterion, optimizer, scheduler=scheduler, reproducible=reproducible, **settings)
    batches = RankBatchSampler(DATA[0], 7, seed=1)
    checkpoints = Checkpoints(folder, step=step, batches=batches)
    checkpoints.load_latest()
    losses = []
    while batches.batches < until:
        for rows in batches:
            losses.append(step(*(part[rows] for part in DATA)).item())
            batches.advance()
            if batches.batches == until:
                break
    checkpoints.save(until)
    checkpoints.wait()
    return losses, [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in values_of(net)]


def train_on_rank(rank, folder, until, settings):
    return train(folder, until, CPU, **settings)


def train_in_layout(layout, folder, until):
    if layout == "simulated":
        with simulate(3):
            return train(folder, until, micro_batch_size=1)
    if layout in ("ddp", "fsdp"):
        first, second = run_ranks(2, train_on_rank, folder, until, {"strategy": layout, "micro_batch_size": 2})
        assert first[0] == second[0]
        assert_equal(*(rank[1] for rank in (first, second)))
        return first
    return train(folder, until, CPU if layout == "one" else REPLICAS)


@pytest.mark.parametrize(
    "layouts", [("one", "replicas", "ddp"), slow(("fsdp", "simulated", "one")), slow(("ddp", "fsdp", "one"))]
)
def test_a_run_with_dropout_goes_on_in_other_layouts(tmp_path, layouts):
    expected, weights = train(tmp_path / "undisturbed", 6, CPU)
    losses = []
    for until, layout in zip((2, 4, 6), layouts, strict=True):
        found, moved = train_in_layout(layout, tmp_path / "moved", until)
        losses += found
    assert losses == pytest.approx(expected, rel=1e-11)
    assert_equal(moved, weights)


def test_without_the_setting_a_run_with_dropout_goes_on_as_another_one(tmp_path):
    expected, _ = train(tmp_path / "undisturbed", 4, CPU, reproducible=False)
    first, _ = train(tmp_path / "moved", 2, CPU, reproducible=False)
    second, _ = train(tmp_path / "moved", 4, REPLICAS, reproducible=False)
    assert first == expected[:2]
    assert second != pytest.approx(expected[2:], rel=1e-3)
