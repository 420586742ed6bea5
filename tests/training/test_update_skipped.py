"""Updates that are left out above a gradient norm, with their schedulers, on all ranks alike."""

import copy

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import balanced_or_plain
from helpers.problems import build_net, class_targets
from helpers.ranks import on_ranks
from helpers.steps import make_step
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize

LIMIT = 0.9
SCALES = [1.0, 30.0, 1.0, float("inf"), 1.0]  # The inputs of each update have one.


def batches():
    torch.manual_seed(0)
    return [(scale * torch.randn(7, 4), class_targets(7, ignored=2)) for scale in SCALES]


def plain(max_grad_norm):
    net = build_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        norms.append(
            nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm or float("inf")).item()
        )
        if norms[-1] <= LIMIT:
            optimizer.step()
            scheduler.step()
    return net, norms, scheduler.last_epoch


def check(model, criterion, cut, max_grad_norm, *, is_balanced=False):
    expected, norms, epochs = plain(max_grad_norm)
    assert epochs == 3
    optimizer = balanced_or_plain(model, torch.optim.Adam, is_balanced)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    settings = {"max_grad_norm": max_grad_norm, "skip_above": LIMIT, "micro_batch_size": 2}
    step = TrainStep(model, criterion, optimizer, scheduler=scheduler, **settings)
    for (inputs, targets), norm in zip(batches(), norms, strict=True):
        before = copy.deepcopy(model.state_dict())
        step(inputs[cut], targets[cut])
        assert step.grad_norm.item() == pytest.approx(norm, nan_ok=True)
        is_same = all(
            torch.equal(value, before[name]) for name, value in model.state_dict().items()
        )
        assert is_same == (not norm <= LIMIT)
    assert scheduler.last_epoch == epochs
    found = [whole(parameter) for parameter in model.module.parameters()]
    torch.testing.assert_close(found, list(expected.parameters()))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("is_balanced", [False, True], ids=["plain", "balanced"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_large_gradients_make_no_update(max_grad_norm, is_balanced):
    model = DataParallelModel(build_net(), ["cpu"] * 3)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    check(model, criterion, slice(None), max_grad_norm, is_balanced=is_balanced)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_ranks_agree(rank, strategy):
    torch.set_default_dtype(torch.float64)
    model, criterion = parallelize(build_net(), nn.CrossEntropyLoss(), ["cpu"], strategy=strategy)
    check(model, criterion, slice(0, 2) if rank else slice(2, 7), None)


def test_the_scale_of_float16_goes_on():
    step = make_step(build_net(), precision="fp16", skip_above=1e-9)
    before = copy.deepcopy(step.model.state_dict())
    for inputs, targets in batches()[:1] * 3:
        step(inputs, targets)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    step.skip_above = 1e9
    step(*batches()[0])
    assert not torch.equal(step.model.module[0].weight, before["module.0.weight"])
