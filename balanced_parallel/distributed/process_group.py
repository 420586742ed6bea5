"""Starts the process group that torchrun prepared, and ends it at exit."""

import atexit
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..runtime import gloo
from ..runtime.devices import DeviceLike, resolve_devices, visible_devices
from .restarts import store_of_this_start
from .torchrun import TorchrunEnvironment

__all__: list[str] = []


def rank_device(environment: TorchrunEnvironment, device_ids: Sequence[DeviceLike] | None) -> torch.device:
    """Returns the device of this rank: an accelerator for each rank, or the CPU, which ranks share.

    If a rank can see only one accelerator, it uses that one, as with ``torchrun --virtual-local-rank`` and under Slurm.

    Args:
        environment: ranks of this process.
        device_ids: one device for each local rank, or a single CPU for all; ``None`` is every visible accelerator, else the CPU.

    Raises:
        ValueError: fewer devices than local ranks.
    """
    visible = visible_devices()
    devices = visible if device_ids is None else resolve_devices(device_ids)
    if len(devices) == 1 and (devices[0].type == "cpu" or len(visible) == 1):
        return devices[0]
    if environment.local_world_size > len(devices):
        raise ValueError(
            f"torchrun started {environment.local_world_size} processes on this machine for {len(devices)} devices "
            f"({', '.join(map(str, devices))}), and this is LOCAL_RANK={environment.local_rank}, expected at most one process "
            "per device, or one visible device for each process: lower --nproc-per-node"
        )
    return devices[environment.local_rank]


def join_process_group(environment: TorchrunEnvironment, device: torch.device, timeout: timedelta | None = None) -> None:
    """Makes ``device`` current and starts the process group (NCCL for CUDA, gloo for CPUs), which ends at exit.

    A group that is already running is used, and is not ended here.

    Args:
        environment: ranks of this process, and the address where they meet.
        device: of this rank.
        timeout: of the group; ``None`` is torch's default.

    Raises:
        RuntimeError: the ranks do not meet within the timeout, or the port is in use. It has the type of torch's error.
        ValueError: the running group has another rank or size than torchrun's environment.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized():
        running = dist.get_rank(), dist.get_world_size()
        if running != (environment.rank, environment.world_size):
            raise ValueError(
                f"a process group is running with rank {running[0]} of {running[1]}, but torchrun's environment says rank "
                f"{environment.rank} of {environment.world_size}: start only one of them, or unset RANK and WORLD_SIZE"
            )
        return
    backend, device_id = "gloo", None
    if device.type != "cpu":
        own, device_id = dist.get_default_backend_for_device(device), device
        # one backend by its name alone: of several, torch chooses no default beside NCCL if a plugin is registered
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"
    try:
        if environment.shares_store:
            store, rank, ranks = store_of_this_start(environment, timeout), environment.rank, environment.world_size
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks, device_id=device_id)
        else:
            dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    except RuntimeError as error:  # torch's names neither the rank nor a remedy
        raise type(error)(_explain(environment, str(error).partition("\n")[0])) from error
    atexit.register(end_process_group)


def _explain(environment: TorchrunEnvironment, reason: str) -> str:
    port = environment.master_port
    remedy = f"Rank 0 must be running, and its host must accept connections to port {port}"
    if environment.rank == 0:
        remedy = f"MASTER_ADDR must be an address of this host, port {port} must be free, and all other ranks must be running"
    return (
        f"rank {environment.rank} of {environment.world_size} could not join the process group at "
        f"MASTER_ADDR={environment.master_address}, MASTER_PORT={port}: {reason.removesuffix('.')}. {remedy}. On hosts with "
        "several network interfaces, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def end_process_group() -> None:
    """Ends the running process group, if there is one and the exit is clean.

    This waits for its collectives, which may never come to their end after an exception. torchrun ends the other ranks then.
    """
    gloo.keep_backends()
    if dist.is_initialized() and not hasattr(sys, "last_value"):  # set by an exception that nothing has caught
        dist.destroy_process_group()
    gloo.wait_until_idle()
