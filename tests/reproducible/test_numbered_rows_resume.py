"""A run that goes on in another layout ends with the state of the undisturbed run, with dropout if ``reproducible=True``."""

import pytest
import torch
from helpers.checkpoints import contents
from helpers.ranks import run_ranks
from helpers.slow import slow
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
CPU = ["cpu"]
REPLICAS = ["cpu"] * 3


def train(folder, until, devices=None, *, strategy="auto", reproducible=True, **settings):
    """Goes on from the newest checkpoint, saves one after update ``until``, and returns the losses of these updates and the
    state."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(4, 8),
        nn.BatchNorm1d(8).eval(),
        nn.Dropout(0.4),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    )
    net = nn.Sequential(*layers, nn.Dropout(0.2)).double()
    net[4].weight = net[3].weight
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), devices, strategy=strategy)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    settings = {
        "scheduler": scheduler,
        "max_grad_norm": 1.0,
        "reproducible": reproducible,
        **settings,
    }
    step = TrainStep(model, criterion, optimizer, **settings)
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
    return losses, contents(step)


def train_on_rank(rank, folder, until, settings):
    losses, _ = train(folder, until, CPU, **settings)
    return losses


def train_in_layout(layout, folder, until):
    if layout == "simulated":
        with simulate(3):
            return train(folder, until, micro_batch_size=1)
    if layout in ("ddp", "fsdp"):
        first, second = run_ranks(
            2, train_on_rank, folder, until, {"strategy": layout, "micro_batch_size": 2}
        )
        assert first == second
        return first, None
    return train(folder, until, CPU if layout == "one" else REPLICAS)


@pytest.mark.parametrize(
    "layouts",
    [("ddp", "fsdp", "replicas"), slow(("one", "ddp", "simulated")), slow(("fsdp", "ddp", "one"))],
)
def test_a_run_with_dropout_goes_on_in_other_layouts(tmp_path, layouts):
    expected, (tensors, *others) = train(tmp_path / "undisturbed", 6, CPU)
    losses = []
    for until, layout in zip((2, 4, 6), layouts, strict=True):
        found, state = train_in_layout(layout, tmp_path / "moved", until)
        losses += found
    moved, *rest = state
    assert losses == pytest.approx(expected, rel=1e-10)
    assert moved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(moved[name].cpu(), tensor, rtol=1e-10, atol=1e-10, msg=name)
    assert rest == others
