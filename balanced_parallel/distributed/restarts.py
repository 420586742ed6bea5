"""A store for each start of the ranks.

torchrun keeps one ``TCPStore`` for all restarts, although ``_create_c10d_store`` in ``torch/distributed/rendezvous.py`` relies on
a new one. A restarted rank finds the addresses of processes that have ended there, and waits for them. So the ranks agree on a
prefix of their own.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # the stubs lack them

from .torchrun import TorchrunEnvironment

__all__: list[str] = []

_NAME = "balanced_parallel"


def store_of_this_start(environment: TorchrunEnvironment, timeout: timedelta | None) -> Any:
    """Returns torchrun's store behind a prefix that rank 0 has made up for this start.

    Each process counts its start in the store. Rank 0 answers to the newest start of each rank, until that confirms the prefix.

    Raises:
        RuntimeError: a rank does not come within the timeout.
    """
    timeout = dist.default_pg_timeout if timeout is None else timeout
    rank, ranks = environment.rank, environment.world_size
    store = TCPStore(environment.master_address, environment.master_port, ranks, is_master=False, timeout=timeout)
    start = store.add(f"{_NAME}/starts of {rank}", 1)
    if rank > 0:
        prefix = store.get(_answer(rank, start)).decode()
        store.set(f"{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix, missing = f"{_NAME}/{uuid.uuid4().hex}", list(range(1, ranks))
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
