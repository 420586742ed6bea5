"""Batch samplers of a rank: its rows of each effective batch, from any batch on.

``BalancedBatchSampler`` yields the effective batches of ``RankBatchSampler``, with rows of equal
cost for each rank.
"""

import math
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, NoReturn

import torch
from torch.utils.data import DataLoader, Sampler

from ..batch.plan import equal_rows
from ..runtime import collectives, values
from .cuts import Combine, cut_by_cost, sorted_rows


class RankBatchSampler(values.SaysInstead, Sampler[list[int]]):
    """A batch sampler that yields this rank's rows of each effective batch, and can begin in the
    middle of an epoch.

    The order depends on seed and epoch alone, and no row is repeated or dropped. So any number of
    ranks trains on the same effective batches, also if it changes at a restart. A rank may get no
    rows. The position is counted in batches that were trained on: call :meth:`advance` after each.
    An iteration yields the rest of the present epoch.

    A sampler of rows, such as torch's ``WeightedRandomSampler``, may choose the rows of each epoch.
    All ranks draw the same ones: its ``generator``, or that of torch, has the state of seed and
    epoch while it draws, and its own state afterwards. A sampler with ``set_epoch`` is told the
    epoch, and may draw by a seed of its own.

    Args:
        rows: the data set; or a sampler of its rows with a ``generator`` or ``set_epoch``, which
            draws equally many in each epoch.
        batch_size: rows of an effective batch, over all ranks. The last batch of an epoch may be
            smaller.
        seed: shuffles each epoch anew; ``None`` keeps the order of the data set, and every
            iteration is the same. For a sampler, ``None`` is the seed of its generator.
        micro_batch_size: cuts an effective batch over the ranks at multiples of this number of
            rows, so that each rank has whole micro-batches of ``TrainStep(micro_batch_size=...)``,
            the same ones for any number of ranks. Ranks differ by one of them at most. The last one
            of a batch may be smaller. ``None`` gives ranks equal rows. It changes no effective
            batch, so a position does not depend on it.
        rank, ranks: this process and the number of processes; ``None`` asks the process group in
            each iteration, or is one process.

    Raises:
        TypeError: a loader, or a sampler that no seed reaches, that cuts by rank or that draws
            batches.
        ValueError: no rows, a batch size or a micro-batch size below 1, or a rank outside of the
            ranks. In an iteration: the sampler draws other rows from the same seed, or another
            number of rows.
        RuntimeError: a library cuts the batches over the ranks again, as
            ``accelerator.prepare(loader)`` does; or, in an iteration, the process group was made
            meanwhile.

    Example:
        >>> sampler = RankBatchSampler(range(10), batch_size=6, rank=1, ranks=4)
        >>> list(sampler)  # rows 0-5 and 6-9, cut over four ranks
        [[2, 3], [7]]
        >>> for rank in range(3):  # micro-batches 0-3, 4-7 and 8-9 are never cut
        ...     list(RankBatchSampler(range(10), 10, micro_batch_size=4, rank=rank, ranks=3))
        [[0, 1, 2, 3]]
        [[4, 5, 6, 7]]
        [[8, 9]]
        >>> sampler = RankBatchSampler(range(10), batch_size=6, seed=0)
        >>> sampler.load_state_dict({**sampler.state_dict(), "batches": 3})  # one epoch and a half
        >>> sampler.epoch, [len(batch) for batch in sampler]
        (1, [4])
        >>> weighted = torch.utils.data.WeightedRandomSampler([0.0, 1.0, 0.0], num_samples=3)
        >>> list(RankBatchSampler(weighted, batch_size=2, seed=0))  # all of them are row 1
        [[1, 1], [1]]
    """

    instead: ClassVar[Mapping[str, str]] = {
        "set_epoch": "leave it out, since advance() counts batches and epochs",
    }

    @values.naming_arguments
    def __init__(
        self,
        rows: Sized,
        batch_size: int,
        seed: int | None = None,
        *,
        micro_batch_size: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        values.check_type("rows", rows, Sized, "a data set or a sampler with a length")
        self.sampler: Any = rows if _is_sampler(rows) else None
        for name, value in (
            ("batch_size", batch_size),
            ("seed", seed),
            ("rank", rank),
            ("ranks", ranks),
        ):
            if value is not None or name == "batch_size":
                values.check_number(name, value, "an integer", whole=True)
        if micro_batch_size is not None:
            expected = "a positive integer, the micro_batch_size of TrainStep, or None"
            values.check_number(
                "micro_batch_size", micro_batch_size, expected, at_least=1, whole=True
            )
        self.rows = len(rows)
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed if self.sampler is None else _seed_of(self.sampler, seed)
        self._rank = rank
        self._ranks = ranks
        self.batches = 0  # trained on, in all epochs
        if self.rows < 1 or batch_size < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"{self.rows} rows, batch_size={batch_size}, rank {self.rank} of {self.ranks}: expected rows, a batch size of at "
                "least 1, and a rank below the number of ranks"
            )
        self._yielded_from = -1

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return collectives.rank() if self._rank is None else self._rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return collectives.world_size() if self._ranks is None else self._ranks

    @property
    def drop_last(self) -> NoReturn:
        """Raises ``RuntimeError``. A batch sampler that cuts the batches of another one reads it."""
        name = type(self).__name__
        raise RuntimeError(
            f"the batches of a {name} are cut again, as accelerator.prepare(loader) does, expected a new {name}, and "
            "DataLoader(batch_sampler=...) as it is"
        )

    @property
    def epoch(self) -> int:
        """The present epoch. The first is 0."""
        return self.batches // len(self)

    def __repr__(self) -> str:
        """Returns the settings and the position."""
        settings = {**self.state_dict(), "micro_batch_size": self.micro_batch_size}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.batches
        order = self._order()
        if self.sampler is not None:
            self._check_order(order)
        if self.seed is not None and self._yielded_from == begin:
            raise RuntimeError(
                "the rest of this epoch was yielded already, expected sampler.advance() after each batch"
            )
        ranks = self.ranks
        if self._rank is None and self._ranks is None and ranks > 1:
            text = repr(self)
            if self.sampler is not None:
                text += f" with order {zlib.crc32(repr(order).encode()):x}"
            collectives.facts_of_process["the sampler's batches"] = text
        for start in range(begin % len(self) * self.batch_size, self.rows, self.batch_size):
            if self.ranks != ranks:
                raise RuntimeError(
                    f"an iteration of the sampler began with {ranks} ranks and goes on with {self.ranks}, expected "
                    "parallelize(...) before it"
                )
            yield self.share(list(order[start : start + self.batch_size]))
        self._yielded_from = begin

    def share(self, batch: list[int]) -> list[int]:
        """Returns this rank's rows of an effective batch."""
        size = self.micro_batch_size or 1
        micro_batches = math.ceil(len(batch) / size)
        part = equal_rows(micro_batches, self.ranks)[0][self.rank]
        return batch[part[0] * size : (part[-1] + 1) * size] if part else []

    def advance(self) -> None:
        """Counts a batch that was trained on."""
        self.batches += 1

    def state_dict(self) -> dict[str, int | str | None]:
        """Returns the position. It is the same on all ranks."""
        return {"batches": self.batches, **self._data()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position, which any number of ranks may have saved."""
        saved = {name: value for name, value in state_dict.items() if name != "batches"}
        if saved != self._data():
            raise ValueError(
                f"the position was saved with {saved}, expected {self._data()}: make the sampler with what was saved"
            )
        self.batches = state_dict["batches"]
        self._yielded_from = -1

    def _data(self) -> dict[str, int | str | None]:
        data: dict[str, int | str | None] = {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if self.sampler is not None:
            data["sampler"] = type(self.sampler).__name__
        return data

    def _order(self) -> Sequence[int]:
        if self.seed is None:
            return range(self.rows)
        # the CPU's generator uses only the low 32 bits
        seed = (self.seed * 1_000_003 + self.epoch) % 2**32
        if self.sampler is not None:
            return _draw(self.sampler, seed, self.epoch)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.rows, generator=generator).tolist()

    def _check_order(self, order: Sequence[int]) -> None:
        """Raises an error if a sampler has not drawn the rows of its seed, as many as it said."""
        name = type(self.sampler).__name__
        if len(order) != self.rows or any(isinstance(row, list) for row in order):
            raise ValueError(
                f"the {name} drew {len(order)} entries in epoch {self.epoch}, such as {reprlib.repr(order[:1])}, expected "
                f"{self.rows} rows in each epoch, its length when RankBatchSampler was made"
            )
        if self._yielded_from < 0 and repr(order) != repr(self._order()):
            raise ValueError(
                f"the {name} drew other rows from the same seed, expected numbers of its generator alone, or ranks would differ"
            )


class BalancedBatchSampler(RankBatchSampler):
    """A :class:`RankBatchSampler` that gives each rank rows of equal cost, where rows have
    different lengths.

    Effective batches and state are those of :class:`RankBatchSampler`, so a run may change from one
    to the other. The rows of a batch are sorted by cost and cut over the ranks, so that the largest
    ``rows x highest cost`` is as small as possible: the tokens of a rank after padding. So a row
    has the same place in the effective batch for any number of ranks, except with ``combine=sum``.
    Cuts follow the costs, so there is no ``micro_batch_size`` to cut at.

    Args:
        costs: the cost of each row of the data set, such as its length. Not negative.
        batch_size, seed, rank, ranks: as for :class:`RankBatchSampler`.
        sampler: chooses the rows of each epoch, as for :class:`RankBatchSampler`.
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

    @values.naming_arguments
    def __init__(
        self,
        costs: Sequence[float],
        batch_size: int,
        seed: int | None = None,
        *,
        combine: Combine | None = None,
        sampler: Sampler[int] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if _is_sampler(costs):
            raise TypeError(
                f"costs is a {type(costs).__name__}, expected the cost of each row of the data set: give a sampler as sampler="
            )
        values.check_type("sampler", sampler, Sampler | None, "a sampler of rows")
        values.check_type("combine", combine, Callable | None, "a function")
        try:
            self.costs = [float(cost) for cost in costs]
            self.combine = combine
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"costs={reprlib.repr(costs)}, expected one number for each row: {error}"
            ) from error
        rows: Any = self.costs if sampler is None else sampler
        super().__init__(rows, batch_size, seed, rank=rank, ranks=ranks)
        sorted_rows(self.costs)  # raises an error for a cost that is not valid

    def _check_order(self, order: Sequence[int]) -> None:
        super()._check_order(order)
        if not 0 <= min(order) <= max(order) < len(self.costs):
            raise ValueError(
                f"the {type(self.sampler).__name__} drew rows from {min(order)} to {max(order)}, and there are "
                f"{len(self.costs)} costs, expected the cost of each row of the data set"
            )

    def share(self, batch: list[int]) -> list[int]:
        """Returns this rank's rows of an effective batch, the costliest first."""
        shards = cut_by_cost([self.costs[row] for row in batch], self.ranks, self.combine)
        # fewer rows than ranks
        return [batch[place] for place in shards[self.rank]] if self.rank < len(shards) else []


def _is_sampler(value: object) -> bool:
    has_rows = hasattr(value, "__getitem__")
    return isinstance(value, Sampler) or (isinstance(value, Iterable) and not has_rows)


def _seed_of(sampler: Any, seed: int | None) -> int:
    """Returns the seed that is given, or that of the sampler.

    Raises ``TypeError`` for a sampler whose rows the ranks cannot draw from one seed.
    """
    name = type(sampler).__name__
    generator = getattr(sampler, "generator", sampler)
    is_seeded = isinstance(generator, torch.Generator | None) or hasattr(sampler, "set_epoch")
    if not is_seeded or isinstance(sampler, DataLoader) or hasattr(sampler, "num_replicas"):
        raise TypeError(
            f"a {name} was given, expected the data set, or a sampler that draws its rows one by one, for all ranks, from a "
            "torch.Generator or None as its generator, or by set_epoch"
        )
    if seed is not None:
        return seed
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    raise TypeError(
        f"a {name} and seed=None were given, expected an integer, from which all ranks draw"
    )


def _draw(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Returns the rows of a sampler from a seed. Its generator, or that of torch, keeps its state."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None) or torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        return list(sampler)
    finally:
        generator.set_state(state)
