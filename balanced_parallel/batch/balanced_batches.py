"""``BalancedBatchSampler``: the effective batches of ``RankBatchSampler``, with rows of equal cost for each rank."""

import reprlib
from collections.abc import Callable, Sequence

from ..runtime.argument_checks import check_type
from .cost_cuts import cut_by_cost, sorted_rows
from .rank_batches import RankBatchSampler

__all__: list[str] = []


class BalancedBatchSampler(RankBatchSampler):
    """A :class:`RankBatchSampler` that gives each rank rows of equal cost, where rows have different lengths.

    Each effective batch has the same rows as that of :class:`RankBatchSampler`, for any number of ranks. Its rows are sorted by
    cost and cut over the ranks, so that the largest ``rows x highest cost`` is as small as possible: the tokens of a rank after
    padding. Ranks have different numbers of rows, and :class:`TrainStep` is exact for any. The state is that of
    :class:`RankBatchSampler`, so a run may change from one to the other.

    Args:
        costs: the cost of each row of the data set, such as its length. Not negative.
        batch_size, seed, rank, ranks: as for :class:`RankBatchSampler`.
        combine: returns the cost of a rank from the costs of its rows. ``sum`` is for costs that add up, without padding.

    Raises:
        ValueError: a cost is negative or not finite; no rows, a batch size below 1, or a rank outside of the ranks.

    Example:
        >>> lengths = [10, 500, 12, 480, 11, 9, 520, 13]
        >>> for rank in range(3):
        ...     print(next(iter(BalancedBatchSampler(lengths, batch_size=8, rank=rank, ranks=3))))
        [6]
        [1, 3]
        [0, 2, 4, 5, 7]
    """

    def __init__(
        self,
        costs: Sequence[float],
        batch_size: int,
        seed: int | None = None,
        *,
        combine: Callable[[Sequence[float]], float] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        check_type("combine", combine, Callable | None, "a function")
        try:
            self.costs, self.combine = [float(cost) for cost in costs], combine
        except (TypeError, ValueError) as error:
            raise TypeError(f"costs={reprlib.repr(costs)}, expected one number for each row: {error}") from error
        super().__init__(self.costs, batch_size, seed, rank=rank, ranks=ranks)
        sorted_rows(self.costs)  # raises an error for a cost that is not valid

    def share(self, batch: list[int]) -> list[int]:
        """Returns this rank's rows of an effective batch, in the order of the batch."""
        shards = cut_by_cost([self.costs[row] for row in batch], self.ranks, self.combine)
        mine = shards[self.rank] if self.rank < len(shards) else []  # fewer rows than ranks
        return [batch[place] for place in sorted(mine)]
