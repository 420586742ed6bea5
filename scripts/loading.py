"""Batches of a task. Every rank loads its own rows of each effective batch, in an order that depends on the seed alone."""

from collections.abc import Iterator
from typing import Any

import torch
from tasks import Rows
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler


def shares(rows: int, parts: int) -> list[int]:
    """Returns the rows of each part, which differ by at most one: ``shares(9, 4)`` is ``[3, 2, 2, 2]``."""
    return [len(part) for part in torch.arange(rows).tensor_split(parts)]


class RankBatches(Sampler[list[int]]):
    """A sampler of this rank's rows of each effective batch. No row is padded or repeated, and a rank may get none."""

    def __init__(self, batches: BatchSampler, rank: int, ranks: int) -> None:
        self.batches, self.rank, self.ranks = batches, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            sizes = shares(len(batch), self.ranks)
            start = sum(sizes[: self.rank])
            yield batch[start : start + sizes[self.rank]]

    def __len__(self) -> int:
        return len(self.batches)


def make_loader(
    rows: Rows, batch_size: int, seed: int | None = None, rank: int = 0, ranks: int = 1, workers: int = 0
) -> DataLoader[Any]:
    """Returns a loader of this rank's rows.

    Args:
        rows: the data set.
        batch_size: rows of an effective batch, over all ranks.
        seed: of the order of rows, a new one in each epoch. None keeps the order.
        rank: this process.
        ranks: number of processes.
        workers: processes that load data.
    """
    if seed is None:
        order: Sampler[int] = SequentialSampler(rows)
    else:
        order = RandomSampler(range(len(rows)), generator=torch.Generator().manual_seed(seed))
    batches = RankBatches(BatchSampler(order, batch_size, drop_last=False), rank, ranks)
    pinned = torch.accelerator.is_available()
    return DataLoader(rows, batch_sampler=batches, collate_fn=tuple, num_workers=workers, pin_memory=pinned)
