"""The order in which ranks run their sharded blocks, which must be the same on all.

A rank all-gathers a block when it runs it. Blocks of equal size that run in another order elsewhere would be mixed up without an
error of FSDP2: each rank would compute with parts of different blocks.
"""

import itertools
import zlib

import torch

from ..runtime.collectives import gather_objects, sum_over_ranks, world_size

__all__: list[str] = []


class BlockOrder:
    """The blocks that this rank has run since the ranks last compared them."""

    def __init__(self) -> None:
        self._ran: list[int] = []
        self._names: list[str] = []

    def add(self, name: str) -> None:
        """Adds a block, whose number is the count of those before."""
        self._names.append(name)

    def note(self, number: int) -> None:
        """Notes that a block begins to run."""
        self._ran.append(number)

    def compare(self) -> None:
        """Compares the blocks of all ranks, and begins anew.

        Raises:
            RuntimeError: a rank has run others.
        """
        ran, self._ran = self._ran, []
        if not self._names[1:]:
            return  # the root alone has no order
        digest = zlib.crc32(str(ran).encode()) % 2**20  # its square, summed over the ranks, fits into 64 bits
        total, squares = sum_over_ranks(torch.tensor([digest, digest * digest])).tolist()
        if world_size() * squares == total * total:  # no variance
            return
        orders = gather_objects([self._names[number] for number in ran])
        rank, expected, found = next(
            (rank, *blocks)
            for rank, order in enumerate(orders)
            for blocks in itertools.zip_longest(orders[0], order, fillvalue="none")
            if blocks[0] != blocks[1]
        )
        raise RuntimeError(
            f"rank {rank} ran the block {found} where rank 0 ran {expected}, expected the same blocks in the same order: FSDP2 "
            "has mixed up their parameters, and the loss is wrong. Run a block that only some rows need, such as an expert, on "
            "every rank, also without rows; or use strategy='ddp'"
        )
