"""The start and the end of a rank: torchrun's environment, the device, the process group, the
agreement of all ranks.

torchrun keeps one ``TCPStore`` for all restarts, although ``_create_c10d_store`` in
``torch/distributed/rendezvous.py`` relies on a new one. A restarted rank finds the addresses of
processes that have ended there, and waits for them. So the ranks agree on a prefix for each start.
"""

import atexit
import os
import sys
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # the stubs lack them

from .. import __version__
from ..runtime import collectives
from ..runtime.collectives import compare_ranks, digest
from ..runtime.devices import DeviceLike, is_accelerator, resolve_devices, visible_devices

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


class TorchrunEnvironment(NamedTuple):
    """Numbers of a process among all, and among those of its machine; and where the ranks meet, on
    rank 0's machine.

    ``shares_store`` is True if torchrun has a store there for all restarts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str = ""
    master_port: int = 0
    shares_store: bool = False

    @classmethod
    def detect(cls) -> "TorchrunEnvironment | None":
        """Reads the environment.

        Returns None outside of torchrun, if neither ``RANK`` nor ``WORLD_SIZE`` is set.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        values = {name: os.environ.get(name) for name in (*_NUMBERS, "MASTER_ADDR")}
        wrong = ValueError(
            f"torchrun's environment has {values}, expected an address, and integers: ranks below their world's size, a port "
            "from 1 to 65535. Start the script with torchrun, or unset RANK and WORLD_SIZE"
        )
        address = values.pop("MASTER_ADDR")
        try:
            rank, ranks, local_rank, local_ranks, port = (
                int(value or "") for value in values.values()
            )
        except ValueError:
            raise wrong from None
        is_possible = 0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks
        if not (address and is_possible and 0 < port < 2**16):
            raise wrong
        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, ranks, local_rank, local_ranks, address, port, shares_store)


def rank_device(
    environment: TorchrunEnvironment, device_ids: Sequence[DeviceLike] | None
) -> torch.device:
    """Returns the device of this rank: an accelerator for each rank, or the CPU, which ranks share.

    If a rank can see only one accelerator, it uses that one, as with ``torchrun
    --virtual-local-rank`` and under Slurm. ``device_ids`` has one device for each local rank, or a
    single CPU for all.
    """
    visible = visible_devices()
    devices = visible if device_ids is None else resolve_devices(device_ids)
    if len(devices) == 1 and (not is_accelerator(devices[0]) or len(visible) == 1):
        return devices[0]
    if environment.local_world_size > len(devices):
        raise ValueError(
            f"torchrun started {environment.local_world_size} processes on this machine for {len(devices)} devices "
            f"({', '.join(map(str, devices))}), and this is LOCAL_RANK={environment.local_rank}, expected at most one process "
            "per device, or one visible device for each process: lower --nproc-per-node"
        )
    return devices[environment.local_rank]


def join_process_group(
    environment: TorchrunEnvironment, device: torch.device, timeout: timedelta | None = None
) -> None:
    """Makes ``device`` current and starts the process group, which ends at exit.

    A group that is running already is used.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index)
    atexit.unregister(await_gloo)
    atexit.register(await_gloo)
    if dist.is_initialized():
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        if (rank, ranks) != (environment.rank, environment.world_size):
            raise ValueError(
                f"a process group is running with rank {rank} of {ranks}, but torchrun's environment says rank "
                f"{environment.rank} of {environment.world_size}: start only one of them, or unset RANK and WORLD_SIZE"
            )
        return
    backend = "gloo"
    device_id = None
    if is_accelerator(device):
        name = dist.get_default_backend_for_device(device)
        device_id = device
        # one backend by its name alone: of several, torch chooses no default beside NCCL if a
        # plugin is registered
        backend = "gloo" if name == "gloo" else f"cpu:gloo,{device.type}:{name}"
    try:
        store = store_of_this_start(environment, timeout) if environment.shares_store else None
        rank = environment.rank
        ranks = environment.world_size
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=ranks, device_id=device_id
        )
    except RuntimeError as error:  # torch's names neither the rank nor a remedy
        port = environment.master_port
        reason = str(error).partition("\n")[0].removesuffix(".")
        remedy = f"rank 0 must be running, and its host must accept connections to port {port}"
        if environment.rank == 0:
            remedy = f"MASTER_ADDR must be an address of this host, port {port} must be free, and all other ranks must be running"
        raise type(error)(
            f"rank {environment.rank} of {environment.world_size} could not join the process group at "
            f"MASTER_ADDR={environment.master_address}, MASTER_PORT={port}: {reason}; {remedy}, and on hosts with several "
            "network interfaces, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    atexit.register(end_process_group)


def end_process_group() -> None:
    """Ends the running process group.

    After an exception its collectives might never end: torchrun ends the other ranks then.
    """
    collectives.keep_backends()
    # set by an exception that nothing has caught
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def await_gloo() -> None:
    """Waits until gloo has released the tensors of its last collective.

    A thread of gloo that does so while the interpreter shuts down aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). On a busy machine it gets a core late.
    """
    time.sleep(RELEASE_SECONDS)


RELEASE_SECONDS = 0.2
_NAME = "balanced_parallel"


def store_of_this_start(environment: TorchrunEnvironment, timeout: timedelta | None) -> PrefixStore:
    """Returns torchrun's store behind a prefix that rank 0 has made up for this start.

    Each process counts its start in the store. Rank 0 answers to the newest start of each rank,
    until that confirms the prefix.
    """
    timeout = dist.default_pg_timeout if timeout is None else timeout
    rank = environment.rank
    ranks = environment.world_size
    store = TCPStore(
        environment.master_address, environment.master_port, ranks, is_master=False, timeout=timeout
    )
    start = store.add(f"{_NAME}/starts of {rank}", 1)
    if rank > 0:
        prefix = store.get(_answer(rank, start)).decode()
        store.set(f"{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix = f"{_NAME}/{uuid.uuid4().hex}"
    missing = list(range(1, ranks))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            store.set(_answer(other, store.add(f"{_NAME}/starts of {other}", 0)), prefix)
        missing = [other for other in missing if not store.check([f"{prefix}/{other}"])]
        if missing and time.monotonic() > end:
            raise dist.DistStoreError(
                f"ranks {', '.join(map(str, missing))} have not started within {timeout.total_seconds():.0f} s"
            )
        time.sleep(0.02 if missing else 0)
    return PrefixStore(prefix, store)


def _answer(rank: int, start: int) -> str:
    return f"{_NAME}/prefix for start {start} of {rank}"


def check_agreement(module: nn.Module, settings: Mapping[str, Hashable]) -> None:
    """Compares the versions, the script, the module and the settings of all ranks, in one small
    all-gather.

    Ranks that differ would hang, or train different models. Values of parameters are not compared:
    rank 0 sends them later.
    """
    tensors = {
        f"tensor {name}": f"{list(tensor.shape)} {tensor.dtype}{' trained' * tensor.requires_grad}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    # An interactive session has none.
    script = Path(getattr(sys.modules["__main__"], "__file__", ""))
    facts = {
        "torch": str(torch.__version__),
        "balanced_parallel": __version__,
        "the script": digest(script.read_bytes()) if script.is_file() else "none",
        **settings,
        "module": type(module).__qualname__,
        **tensors,
    }
    compare_ranks(facts, "the same code, versions and settings on all hosts")
