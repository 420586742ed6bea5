"""Shards of FSDP2 on simulated devices, one for each rank: placement, streams, waits of the host, and memory."""

import itertools

import pytest
import torch
from helpers.memory_problems import PROBLEMS
from helpers.optimizers import sgd
from helpers.problems import assert_same_gradients, build_net, class_targets, plain_program
from helpers.ranks import on_ranks, run_ranks
from helpers.releases import keeps_whole_gradients, released_at_once
from helpers.slow import slow
from torch import nn

from balanced_parallel import BalancedOptimizer, TrainStep, memory, parallelize, simulate

TWO_DEVICES = {"layout": "fsdp", "devices": 2, "device_kind": "sim"}


@on_ranks(2)
def test_shards_on_simulated_devices_equal_the_plain_program(rank):
    inputs = torch.randn(9, 4, dtype=torch.float64)
    targets = class_targets(9, ignored=2)
    loss, expected = plain_program(build_net().double(), nn.CrossEntropyLoss(), inputs, targets)
    mine = slice(0, 4) if rank == 0 else slice(4, 9)
    with simulate(2) as cluster:
        model, criterion = parallelize(build_net().double(), nn.CrossEntropyLoss(), strategy="fsdp")
        optimizer = sgd(model, lr=0.0)
        found = TrainStep(model, criterion, optimizer, micro_batch_size=2)(
            inputs[mine], targets[mine]
        )
        torch.testing.assert_close(found.cpu(), loss)
        assert_same_gradients(
            [parameter.grad.full_tensor().cpu() for parameter in model.parameters()], expected
        )
        assert {str(parameter.device) for parameter in model.parameters()} == {f"sim:{rank}"}
        parts = cluster.categories(rank)
        assert min(parts["parameters"], parts["gradients"]) > 0


def peak_of(step, batch, cluster, rank):
    """Returns the peak of one of three updates. Gloo's threads may release a buffer late, so it is the smallest."""
    peaks = []
    for _ in range(6):
        cluster.reset_peak()
        step(*batch)
        peaks.append(cluster.peak[rank])
    return min(peaks[3:])


def peak_of_a_rank(rank, rows, precision, micro_batch_size, memory):
    build, batch = PROBLEMS["language model"]
    with simulate(2, memory=memory) as cluster:
        model, criterion = parallelize(
            build(), nn.CrossEntropyLoss(), strategy="fsdp", precision=precision
        )
        step = TrainStep(
            model,
            criterion,
            torch.optim.AdamW(model.parameters()),
            micro_batch_size=micro_batch_size,
        )
        return peak_of(step, batch(rows), cluster, rank)


ESTIMATES = [
    pytest.param(3, "fp32", None, False, None, marks=[pytest.mark.slow, released_at_once]),
    pytest.param(6, "bf16", 2, True, None, marks=keeps_whole_gradients),
    # whole gradients do not fit into half of what is free
    pytest.param(6, "bf16", 2, False, "880KiB", marks=[pytest.mark.slow, keeps_whole_gradients]),
]


@pytest.mark.usefixtures("trace_in_this_process")
@pytest.mark.parametrize(("rows", "precision", "micro_batch_size", "whole", "limit"), ESTIMATES)
def test_estimates_of_shards_equal_the_simulated_peak(
    rows, precision, micro_batch_size, whole, limit
):
    build, batch = PROBLEMS["language model"]
    found = max(run_ranks(2, peak_of_a_rank, rows, precision, micro_batch_size, limit))
    settings = {
        "precision": precision,
        "micro_batch_size": micro_batch_size,
        "whole_gradients": whole,
    }
    report = memory.estimate(
        build(), nn.CrossEntropyLoss(), *batch(rows), **TWO_DEVICES, **settings
    )
    assert report.allocated[0] == pytest.approx(found, abs=1024)


def matrices(sizes):
    return nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)])


def peak_of_whole_parameters(rank, sizes):
    with simulate(2) as cluster:
        model, criterion = parallelize(matrices(sizes), nn.MSELoss(), strategy="fsdp")
        step = TrainStep(model, criterion, BalancedOptimizer(model, torch.optim.Muon, lr=0.1))
        return peak_of(step, (torch.zeros(2, sizes[0]), torch.zeros(2, sizes[-1])), cluster, rank)


@pytest.mark.usefixtures("trace_in_this_process")
@pytest.mark.parametrize("sizes", [slow([256, 512, 256, 128, 1024]), [272, 256, 256, 256]])
def test_estimates_of_whole_parameters_equal_the_simulated_peak(sizes):
    batch = torch.zeros(2, sizes[0]), torch.zeros(2, sizes[-1])
    settings = {"optimizer": torch.optim.Muon, "balanced_optimizer": True}
    report = memory.estimate(matrices(sizes), nn.MSELoss(), *batch, **TWO_DEVICES, **settings)
    inputs = sum(
        tensor.nbytes for tensor in batch
    )  # which the simulated rank has released at its peak, the update
    assert report.allocated[0] - inputs == pytest.approx(
        max(run_ranks(2, peak_of_whole_parameters, sizes)), abs=1024
    )
