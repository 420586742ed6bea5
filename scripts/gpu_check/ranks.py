"""Steps of ranks: torch's ``DistributedDataParallel`` beside the model of ``parallelize``, in processes of their own."""

import copy
import functools
import os
import tempfile
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from machine import Machine, NotPossible, run_child
from steps import language_model, relative_error
from table import NOT_HERE, Row, at_most, attempt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from balanced_parallel import DataParallelCriterion, TrainStep, parallelize

SLOWER_LIMIT = 1.1
LOSS_LIMIT = 1e-4  # relative, of three updates in fp32


def steps_of_rank(machine: Machine, device: torch.device, *, only_plain: bool = False) -> dict[str, Any]:
    """Returns losses and times of this rank's steps, by plain DDP and by the model of ``parallelize``.

    A process group is running. In a group of one rank, ``parallelize`` would return replicas, so the class that it returns for
    several ranks is used directly.

    Args:
        machine: the device of this rank.
        device: the same.
        only_plain: runs plain DDP alone.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, batch = language_model(machine, machine.size(32, 2), seed=rank)
    inputs, targets = batch[0].to(device), batch[1].to(device)
    ddp = DistributedDataParallel(copy.deepcopy(net).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def plain() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    expected = [plain() for _ in range(3)]
    if only_plain:
        return {"rank": rank, "losses": torch.stack(expected).tolist()}
    model: Any
    if ranks > 1:
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), [device] * int(os.environ["LOCAL_WORLD_SIZE"]))
    else:
        model, criterion = _model_of_ranks()(net.to(device), device, None), DataParallelCriterion(nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    found = [step(inputs, targets) for _ in range(3)]
    total = torch.stack(expected)
    dist.all_reduce(total)  # rows are equal, so the mean over ranks is that of all rows
    times = machine.size(10, 1)
    return {
        "rank": rank,
        "kind": type(model).__name__,
        "backend": str(dist.get_backend_config()),
        "losses": (total / ranks).tolist(),
        "error": relative_error(torch.stack(found).cpu(), total.cpu() / ranks),
        "ddp": machine.median_seconds(plain, times),
        "own": machine.median_seconds(lambda: step(inputs, targets), times),
    }


def _model_of_ranks() -> Any:
    """Returns the class of the model that ``parallelize`` returns for several ranks. It is not a public name."""
    kinds = typing.get_args(typing.get_type_hints(parallelize)["return"])
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, DistributedDataParallel))


def rank_main(machine: Machine, backend: str, *, only_plain: bool = False) -> dict[str, Any]:
    """Starts the group of this rank, or a group of one outside of torchrun. Returns the result of :func:`steps_of_rank`.

    Args:
        machine: all devices of this machine.
        backend: for the devices' tensors, ``"nccl"`` or ``"gloo"``.
        only_plain: runs plain DDP alone.
    """
    device = machine.devices[int(os.environ.get("LOCAL_RANK", 0)) % len(machine.devices)]
    torch.accelerator.set_device_index(device.index)
    backends = "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group(backends)
        else:
            dist.init_process_group(backends, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return steps_of_rank(Machine([device], machine.cluster), device, only_plain=only_plain)
        finally:
            dist.destroy_process_group()


def check_group_of_one(machine: Machine) -> Iterator[Row]:
    """Runs the model of several ranks in an NCCL group of one, and two ranks on one GPU by gloo."""
    if machine.simulated:
        yield from _judge_run(machine, "gloo group of one", lambda: rank_main(machine, "gloo"))
        return
    yield from _judge_run(machine, "NCCL group of one", lambda: run_child(["rank"]))
    yield from _judge_run(machine, "NCCL group of one, DETAIL", lambda: run_detail(["rank"], 0), with_times=False)
    yield from _judge_run(machine, "two ranks on one GPU, gloo", lambda: run_child(["rank", "--gloo"], ranks=2), with_times=False)


def check_ranks(machine: Machine) -> Iterator[Row]:
    """Runs one rank per GPU, with and without ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    if machine.simulated:
        yield Row("one rank per GPU", "", f"{NOT_HERE}: tests of the package run ranks of simulated devices, with gloo")
        return
    for ranks in [number for number in (2, 4, 8) if number <= len(machine.devices)]:
        yield from _judge_run(machine, f"{ranks} ranks", functools.partial(run_child, ["rank"], {}, ranks))
    yield from _judge_run(machine, "2 ranks, DETAIL", lambda: run_detail(["rank"], 2), with_times=False)


def run_detail(flags: list[str], ranks: int) -> dict[str, Any]:
    """Runs ranks under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. Plain DDP may fail under it: two ranks of torch 2.13 with gloo crash.

    Raises:
        NotPossible: plain DDP fails too.
        RuntimeError: the model of ``parallelize`` fails alone.
    """
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    try:
        result: dict[str, Any] = run_child(flags, detail, ranks)
    except RuntimeError:
        try:
            run_child([*flags, "--plain"], detail, ranks)
        except RuntimeError as error:
            raise NotPossible(f"plain DDP fails too: {error}") from error
        raise
    return result


def _judge_run(machine: Machine, name: str, run: Callable[[], dict[str, Any]], *, with_times: bool = True) -> Iterator[Row]:
    """Yields a row about the losses of one run, and one about its times."""
    results: dict[str, Any] = {}

    def losses() -> Row:
        results.update(run())
        text = f"{results['kind']}, {results['backend']}: relative error of three losses, against DDP"
        return at_most(f"{name}: losses", text, results["error"], LOSS_LIMIT)

    def times() -> Row:
        own, ddp = results["own"], results["ddp"]
        return at_most(f"{name}: step", f"{own * 1e3:.1f} ms, DDP {ddp * 1e3:.1f} ms, ratio", own / ddp, SLOWER_LIMIT)

    yield attempt(f"{name}: losses", losses)
    if with_times and results:
        yield attempt(f"{name}: step", times, machine.without_speed)
