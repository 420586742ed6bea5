"""Memory of ranks under ``DistributedDataParallel``: the estimate, compared with the CPU's allocator on real ranks."""

import gc

import pytest
import torch
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, memory, parallelize
from balanced_parallel.runtime.allocator_profile import AllocatorProfile

WIDTH, ROWS = 384, 12


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)], nn.Linear(WIDTH, 10))


def batch():
    return torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peaks_of_rank(rank, micro_batch_sizes):
    """Returns the peak of the third update on this rank. The reducer makes its final buckets in the first."""
    torch.set_num_threads(1)
    return [peak(size) for size in micro_batch_sizes]


def peak(micro_batch_size):
    inputs, targets = batch()
    model, criterion = parallelize(build(), nn.CrossEntropyLoss(), ["cpu"])
    step = TrainStep(model, criterion, sgd(model.parameters()), micro_batch_size=micro_batch_size)
    # Not recorded: a thread of gloo releases the tensors of the constructor's broadcast, and each thread has its own profile.
    profile = AllocatorProfile()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    profile.now = inputs.nbytes + targets.nbytes + 2 * parameters  # with the reducer's buckets
    with profile.recorded():
        for _ in range(2):
            step(inputs, targets)
        gc.collect()
    profile.reset_peak()
    with profile.recorded():
        step(inputs, targets)
    return profile.peak


def test_peak_of_ddp_equals_the_allocator_with_and_without_accumulation():
    sizes = [ROWS, 4]
    measured = [max(peaks) for peaks in zip(*run_ranks(2, peaks_of_rank, sizes, fresh=True), strict=True)]
    settings = {"layout": "ddp", "devices": 2, "device_kind": "cpu", "optimizer": sgd}
    reports = [memory.estimate(build(), nn.CrossEntropyLoss(), *batch(), micro_batch_size=size, **settings) for size in sizes]
    assert [report.peak[0] for report in reports] == pytest.approx(measured, rel=0.001)
    parameters = sum(parameter.nbytes for parameter in build().parameters())
    assert all(report.parts[0]["gradients"] == parameters for report in reports)
