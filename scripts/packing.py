"""Rows of each device where rows have different lengths: equal numbers of rows, or rows of equal cost."""

import argparse

import torch
from tasks import Rows, count_words
from torch import Tensor

from balanced_parallel import BalancedBatchSampler, ByCost, RankBatchSampler, shard_by_cost

MEASURED = 100  # batches


def make_batches(flags: argparse.Namespace, rows: Rows) -> RankBatchSampler:
    """Returns the rows of each batch for this rank."""
    if is_by_cost(flags, rows):
        return BalancedBatchSampler(rows.lengths or [], flags.batch_size, flags.seed)
    return RankBatchSampler(rows, flags.batch_size, flags.seed)


def make_cut(flags: argparse.Namespace, rows: Rows) -> ByCost | None:
    """Returns the cut of the step, which trims padded rows to the longest of each device; None for equal rows."""
    return ByCost(count_words, trim=1) if is_by_cost(flags, rows) else None


def is_by_cost(flags: argparse.Namespace, rows: Rows) -> bool:
    """Returns True if rows are cut by cost."""
    return flags.pack == "cost" and rows.lengths is not None


def describe_packing(flags: argparse.Namespace, rows: Rows, devices: int) -> list[str]:
    """Returns a line with the padding and the imbalance of the first batches over all devices, if rows have lengths."""
    lengths = rows.lengths
    if lengths is None:
        return []
    words = padded = hottest = 0
    batches = RankBatchSampler(rows, flags.batch_size, flags.seed, rank=0, ranks=1)
    for batch, _ in zip(batches, range(MEASURED), strict=False):
        some = [lengths[row] for row in batch]
        shares = padded_words(some, rows.inputs.size(1), devices, flags.pack == "cost")
        words, padded, hottest = words + sum(some), padded + sum(shares), hottest + max(shares)
    share, ratio = 1 - words / padded, hottest * devices / padded
    return [f"packed by {flags.pack}: {share:.0%} of a batch is padding, hottest device / mean {ratio:.2f}"]


def padded_words(lengths: list[int], longest: int, devices: int, by_cost: bool) -> list[int]:
    """Returns the words of each device, padding included, for a batch in one micro-batch."""
    if not by_cost:
        return [longest * (len(lengths) // devices + (index < len(lengths) % devices)) for index in range(devices)]
    if devices == 1:
        return [len(lengths) * max(lengths)]
    shards, _ = shard_by_cost(lengths, devices, cost=int, collate=as_tensors)
    return [len(shard) * int(shard.max()) for shard in shards]


def as_tensors(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns lengths as a batch."""
    return torch.tensor(lengths), torch.tensor(lengths)
