"""Batch samplers of a rank: its rows of each effective batch, from any batch on.

``BalancedBatchSampler`` yields the effective batches of ``RankBatchSampler``, with rows of equal
cost for each rank.
"""

import reprlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from ..runtime import collectives
from ..runtime.values import check_number, check_type, naming_arguments
from .plan import Combine, consecutive, cut_by_cost, sorted_rows, split_sizes

# The process has one, since a step is given batches and not the sampler that made them. The ranks
# of a step compare it.
_begun = "no RankBatchSampler"


def begun_batches() -> str:
    """Describes the batches that a sampler over the ranks of the process group began last.

    Ranks compare them.
    """
    return _begun


class RankBatchSampler(Sampler[list[int]]):
    """A batch sampler that yields this rank's rows of each effective batch, and can begin in the
    middle of an epoch.

    The order depends on seed and epoch alone, and no row is repeated or dropped. So any number of
    ranks trains on the same effective batches, also if it changes at a restart. A rank may get no
    rows. The position is counted in batches that were trained on: call :meth:`advance` after each.
    An iteration yields the rest of the present epoch.

    Args:
        rows: the data set.
        batch_size: rows of an effective batch, over all ranks. The last batch of an epoch may be
            smaller.
        seed: shuffles each epoch anew; ``None`` keeps the order of the data set, and every
            iteration is the same.
        rank, ranks: this process and the number of processes; ``None`` asks the process group, or
            is one process.

    Raises:
        TypeError: a sampler or a loader in place of the data set.
        ValueError: no rows, a batch size below 1, or a rank outside of the ranks.

    Example:
        >>> sampler = RankBatchSampler(range(10), batch_size=6, rank=1, ranks=4)
        >>> list(sampler)  # rows 0-5 and 6-9, cut over four ranks
        [[2, 3], [7]]
        >>> sampler = RankBatchSampler(range(10), batch_size=6, seed=0)
        >>> sampler.load_state_dict({**sampler.state_dict(), "batches": 3})  # one epoch and a half
        >>> sampler.epoch, [len(batch) for batch in sampler]
        (1, [4])
    """

    @naming_arguments
    def __init__(
        self,
        rows: Sized,
        batch_size: int,
        seed: int | None = None,
        *,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        _refuse_samplers("rows", rows)
        check_type("rows", rows, Sized, "a data set with a length")
        for name, value in (
            ("batch_size", batch_size),
            ("seed", seed),
            ("rank", rank),
            ("ranks", ranks),
        ):
            if value is not None or name == "batch_size":
                check_number(name, value, "an integer", whole=True)
        self.rows = len(rows)
        self.batch_size = batch_size
        self.seed = seed
        self.rank = collectives.rank() if rank is None else rank
        self.ranks = collectives.world_size() if ranks is None else ranks
        self.batches = 0  # trained on, in all epochs
        if self.rows < 1 or batch_size < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"{self.rows} rows, batch_size={batch_size}, rank {self.rank} of {self.ranks}: expected rows, a batch size of at "
                "least 1, and a rank below the number of ranks"
            )
        self._yielded_from = -1
        self._follows_group = rank is None and ranks is None and self.ranks > 1

    @property
    def epoch(self) -> int:
        """The present epoch. The first is 0."""
        return self.batches // len(self)

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.batches
        order = self._order()
        if self.seed is not None and self._yielded_from == begin:
            raise RuntimeError(
                "the rest of this epoch was yielded already, expected sampler.advance() after each batch"
            )
        if self._follows_group:
            global _begun
            settings = f"{self.rows} rows, batch_size={self.batch_size}, seed={self.seed}, {begin} batches done"
            _begun = f"{type(self).__name__} of {settings}"
        for start in range(begin % len(self) * self.batch_size, self.rows, self.batch_size):
            yield self.share(list(order[start : start + self.batch_size]))
        self._yielded_from = begin

    def share(self, batch: list[int]) -> list[int]:
        """Returns this rank's rows of an effective batch."""
        part = consecutive(split_sizes(len(batch), self.ranks))[self.rank]
        return batch[part.start : part.stop]

    def advance(self) -> None:
        """Counts a batch that was trained on."""
        self.batches += 1

    def state_dict(self) -> dict[str, int | None]:
        """Returns the position. It is the same on all ranks."""
        return {"batches": self.batches, **self._data()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position, which any number of ranks may have saved."""
        saved = {name: state_dict[name] for name in self._data()}
        if saved != self._data():
            raise ValueError(
                f"the position was saved with {saved}, expected {self._data()}: the batches would be others"
            )
        self.batches = state_dict["batches"]
        self._yielded_from = -1

    def _data(self) -> dict[str, int | None]:
        return {"rows": self.rows, "batch_size": self.batch_size, "seed": self.seed}

    def _order(self) -> Sequence[int]:
        # the CPU's generator uses only the low 32 bits
        mixed = (self.seed or 0) * 1_000_003 + self.epoch
        generator = torch.Generator().manual_seed(mixed % 2**32)
        return (
            range(self.rows)
            if self.seed is None
            else torch.randperm(self.rows, generator=generator).tolist()
        )


class BalancedBatchSampler(RankBatchSampler):
    """A :class:`RankBatchSampler` that gives each rank rows of equal cost, where rows have
    different lengths.

    Effective batches and state are those of :class:`RankBatchSampler`, so a run may change from one
    to the other. The rows of a batch are sorted by cost and cut over the ranks, so that the largest
    ``rows x highest cost`` is as small as possible: the tokens of a rank after padding. So a row
    has the same place in the effective batch for any number of ranks, except with ``combine=sum``.

    Args:
        costs: the cost of each row of the data set, such as its length. Not negative.
        batch_size, seed, rank, ranks: as for :class:`RankBatchSampler`.
        combine: returns the cost of a rank from the costs of its rows. ``sum`` is for costs that
            add up, without padding.

    Raises:
        ValueError: a cost is negative or not finite; or as :class:`RankBatchSampler`.

    Example:
        >>> lengths = [10, 500, 12, 480, 11, 9, 520, 13]
        >>> for rank in range(3):
        ...     print(next(iter(BalancedBatchSampler(lengths, batch_size=8, rank=rank, ranks=3))))
        [6]
        [1, 3]
        [7, 2, 4, 0, 5]
    """

    @naming_arguments
    def __init__(
        self,
        costs: Sequence[float],
        batch_size: int,
        seed: int | None = None,
        *,
        combine: Combine | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        _refuse_samplers("costs", costs)
        check_type("combine", combine, Callable | None, "a function")
        try:
            self.costs = [float(cost) for cost in costs]
            self.combine = combine
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"costs={reprlib.repr(costs)}, expected one number for each row: {error}"
            ) from error
        super().__init__(self.costs, batch_size, seed, rank=rank, ranks=ranks)
        sorted_rows(self.costs)  # raises an error for a cost that is not valid

    def share(self, batch: list[int]) -> list[int]:
        """Returns this rank's rows of an effective batch, the costliest first."""
        shards = cut_by_cost([self.costs[row] for row in batch], self.ranks, self.combine)
        # fewer rows than ranks
        return [batch[place] for place in shards[self.rank]] if self.rank < len(shards) else []


def _refuse_samplers(name: str, value: object) -> None:
    if isinstance(value, (Sampler, DataLoader)):
        raise TypeError(
            f"{name} is a {type(value).__name__}, expected the data set, or costs of its rows: order, weights and "
            "batches of a sampler would be ignored. Rows are drawn here, by seed, and given to DataLoader(batch_sampler=...)"
        )
