"""Steps of ranks: torch's ``DistributedDataParallel`` beside the model of ``parallelize``, in processes of their own."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from helpers.gpu import LOSS_LIMIT, Machine, language_model, on, relative_error
from helpers.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from balanced_parallel import DataParallelCriterion, TrainStep, parallelize, simulate
from balanced_parallel.strategies.ddp import DistributedModel

SLOWER_LIMIT = 1.1  # A step may take this much of the time of DDP.


def run_rank(rank, devices, backends, only_plain=False):
    """Starts the group of a rank. Returns the result of :func:`train`."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(simulate(2)) if devices[rank].startswith("sim") else None
        device = torch.device(devices[rank])
        torch.accelerator.set_device_index(device.index)
        dist.init_process_group(backends)
        stack.callback(dist.destroy_process_group)
        return train(Machine([device], cluster), rank, len(devices), only_plain)


def train(machine, rank, ranks, only_plain):
    """Returns the error of three losses and the times of steps, by plain DDP and by the model of ``parallelize``.

    In a group of one rank, ``parallelize`` would return replicas. The class that it returns for several ranks is used there.
    """
    net, (inputs, targets) = language_model(machine, machine.size(32, 2), seed=rank)
    inputs = inputs.to(machine.first)
    targets = targets.to(machine.first)
    ddp = DistributedDataParallel(
        copy.deepcopy(net).to(machine.first), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def plain():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    expected = torch.stack([plain() for _ in range(3)])
    if only_plain:
        return None
    if ranks > 1:
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), [machine.first] * ranks)
    else:
        model = DistributedModel(net.to(machine.first), machine.first, None)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    found = torch.stack([step(inputs, targets) for _ in range(3)])
    dist.all_reduce(expected)  # rows are equal, so the mean over ranks is that of all rows
    times = machine.size(10, 1)
    seconds = [
        machine.median_seconds(function, times)
        for function in (lambda: step(inputs, targets), plain)
    ]
    return relative_error(found, expected / ranks), *seconds


@on("one")
def test_two_ranks_on_one_device_have_the_losses_of_ddp(machine, at_most):
    for rank, result in enumerate(
        run_ranks(2, run_rank, [str(machine.first)] * 2, "gloo", fresh=True)
    ):
        at_most(f"rank {rank}: error of losses", result[0], LOSS_LIMIT["fp32"])


@on("one", "all")
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_a_rank_per_device_has_the_losses_and_the_speed_of_ddp(
    machine, debug, at_most, monkeypatch
):
    """A group of one rank, and one rank per GPU. Under DETAIL, plain DDP may fail: two ranks of torch 2.13 with gloo crash."""
    if machine.cluster and debug == "DETAIL":
        pytest.skip("needs NCCL")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    devices = list(map(str, machine.devices))
    arguments = len(devices), run_rank, devices, machine.size("cpu:gloo,cuda:nccl", "gloo")
    try:
        results = run_ranks(*arguments, fresh=True)
    except AssertionError:
        try:
            run_ranks(*arguments, True, fresh=True)
        except AssertionError as error:
            pytest.skip(f"plain DDP fails too: {error}")
        raise
    for rank, (error, own, ddp) in enumerate(results):
        at_most(f"rank {rank}: error of losses", error, LOSS_LIMIT["fp32"])
        if machine.cluster is None and debug == "OFF":
            at_most(f"rank {rank}: step of {own * 1e3:.1f} ms / DDP's", own / ddp, SLOWER_LIMIT)
