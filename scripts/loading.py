"""Batches of a task. Every rank loads its own rows of each effective batch, in an order that depends on the seed alone."""

import signal
from typing import Any

import torch
from tasks import Rows
from torch.utils.data import DataLoader

from balanced_parallel import RankBatchSampler


def make_loader(rows: Rows, batches: RankBatchSampler, workers: int = 0) -> DataLoader[Any]:
    """Returns a loader of this rank's rows.

    Args:
        rows: the data set.
        batches: the rows of each batch.
        workers: processes that load data.
    """
    return DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=tuple,
        num_workers=workers,
        pin_memory=torch.accelerator.is_available(),
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # the default one would advance that of dropout in each epoch
        worker_init_fn=ignore_signals,
    )


def ignore_signals(worker: int) -> None:
    """Leaves SIGTERM and Ctrl-C to the process that trains. A scheduler and a terminal send them to all."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
