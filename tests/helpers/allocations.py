"""Memory of a training step on the CPU, by torch's tracker of tensors and by the allocator: the oracles of estimates."""

import gc

import pytest
import torch
from helpers.benchmarks import load
from helpers.memory_problems import PROBLEMS
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory, parallelize
from balanced_parallel.savings import checkpoint_activations

with pytest.MonkeyPatch.context() as _patch:
    _allocator = load("estimate", _patch, "allocator")
AllocatorProfile = _allocator.AllocatorProfile
ReduceScatter = _allocator.ReduceScatter


def used(
    build,
    batch,
    optimizer,
    precision="fp32",
    checkpoint=False,
    micro_batch_size=None,
    criterion=F.cross_entropy,
):
    """Returns the peak of the second step of the plain program in bytes, by the CPU's allocator."""
    gc.collect()  # What other tests have left would be freed in these steps.
    profile = AllocatorProfile()
    with profile.recorded():
        net = build()
        inputs, targets = batch()
        if checkpoint:
            checkpoint_activations(net)
        updating = optimizer(net.parameters())
    for _ in range(2):
        profile.reset_peak()
        with profile.recorded():
            run_update(net, updating, inputs, targets, micro_batch_size, precision, criterion)
    return profile.peak


def assert_equals_the_allocator(
    build, batch, optimizer=torch.optim.AdamW, rel=0.001, criterion=F.cross_entropy, **settings
):
    """Compares the estimate of a plain program for the CPU with its allocator. Returns the report."""
    settings = {"precision": "fp32", "micro_batch_size": None, "checkpoint": False} | settings
    found = used(build, batch, optimizer, criterion=criterion, **settings)
    settings |= {
        "optimizer": optimizer,
        "device_kind": "cpu",
        "keeps_gradients": False,
        "savings": ["checkpoint_activations"] * settings.pop("checkpoint"),
    }
    report = memory.estimate(build(), criterion, *batch(), **settings)
    assert report.allocated[0] == pytest.approx(found, rel=rel)
    return report


def run_update(net, updating, inputs, targets, micro_batch_size, precision, criterion):
    """Runs an update of the plain program."""
    size = micro_batch_size or len(inputs)
    updating.zero_grad()
    for rows, labels in zip(inputs.split(size), targets.split(size), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = criterion(net(rows), labels)
        loss.backward()
        del loss
    updating.step()


def used_by_shards(rank, problem, rows, precision, accumulate):
    """Returns the peak of the second update of the plain loop under FSDP2, on this rank."""
    gc.collect()
    build, batch = PROBLEMS[problem]
    profile = AllocatorProfile()
    rises = []
    with profile.recorded():
        inputs, targets = (tensor.clone() for tensor in batch(rows))
        model, criterion = parallelize(
            build(), nn.CrossEntropyLoss(), strategy="fsdp", precision=precision
        )
        optimizer = torch.optim.AdamW(model.parameters())
    for unit in model.units:
        unit.set_custom_reduce_scatter(ReduceScatter())
    for _ in range(6):
        profile.reset_peak()
        before = profile.now
        with profile.recorded():
            optimizer.zero_grad()
            for _ in range(accumulate):
                loss = criterion(model(inputs), targets)
                loss.backward()
                del loss
            optimizer.step()
        if abs(profile.now - before) < 1024:
            rises.append(profile.peak - before)
    assert rises, "the profiler has not seen every release"
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [
        inputs,
        targets,
        *model.parameters(),
        *(one.grad for one in model.parameters()),
        *state,
    ]
    held = sum(
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors
    )
    return min(rises) + held
