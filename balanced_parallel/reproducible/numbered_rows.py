"""``reproducible=True``: an update draws the random numbers of one device with the whole batch, in
any layout.

The seed of an update is one number from the CPU's generator, of the first rank. Rows are numbered
over the effective batch: those of the ranks before come first, then those that ``add`` has brought,
then the rows of a batch in their order.

A shape does not tell which dimension has the rows: ``(6, 3, 7)`` with 3 rows is 3 x 2 parts, or
time-major. So the first batch of each kind runs in two small forwards, of two and three rows: the
dimension that grows is that of the rows. If it has several parts of each row, two rows are compared
with each alone: parts may be in another order than the rows.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.rows import Batch, Shard
from ..loss import kinds as loss_kinds
from ..runtime import collectives, torch_private
from ..training.settings import Settings
from ..training.update import Arithmetic, BatchRun, Forwards, Limit, Reduced, Work
from .row_random import Draw, DrawShapes, Forward, UpdateRandom, find_draws

RunShard = Callable[..., object]  # Returns the output of a shard, with its draws if known.


class NumberedRows:
    """The rows of one update, which have numbers over all ranks and batches.

    ``open_work`` returns the work that runs them.
    """

    def __init__(
        self,
        arithmetic: "ArithmeticByRow",
        forwards: Forwards,
        kind: loss_kinds.Kind,
        open_work: Callable[[], Work],
        limit: Limit,
    ) -> None:
        self._arithmetic = arithmetic
        self._forwards = forwards
        self._device = forwards.model.devices[0]
        self._kind = kind
        self._open_work = open_work
        self._group = arithmetic.group(limit)
        self._work: Work | None = None
        self._update: UpdateRandom | None = None
        self._is_awaited = True  # Other ranks ask for what this one knows of the rows.
        # The state of the CPU's generator before the seed of the update.
        self._state_before = torch.get_rng_state()

    def add(self, run: BatchRun) -> None:
        """Numbers the rows of a batch, and runs it."""
        batch = run.batch
        rows = run.batch.rows or 0
        kind = self._arithmetic.batch_kind(batch)
        is_known = not rows or kind in self._arithmetic.draws
        if self._update is None:
            self._update = self._begin(rows, is_known=is_known)
        elif collectives.world_size() > 1:
            raise ValueError(
                "reproducible=True with several add() calls on several ranks: pass the effective batch to step(...)"
            )
        else:
            self._is_awaited = not is_known
            self._check_groups([self._update.rows, rows])
        update = self._update
        first = update.number(rows)
        shapes = DrawShapes()

        def surround(shard: Shard, draws: list[Draw] | None) -> Shard:
            if shard.is_joined:
                raise ValueError(
                    "reproducible=True with samples that collate= joins, expected a collate= with one row of each"
                )
            numbers = [first + row for row in shard.rows or ()]
            # shards may be padded to lengths of their own
            equal_shapes = {} if batch.pads else shapes
            return shard._replace(
                context=Forward(update, numbers, shard.device, draws, equal_shapes).drawing
            )

        if self._is_awaited:
            # The criterion may draw random numbers, too.
            loss = self._kind.of_batch(batch.counted_targets, is_whole=run.is_whole)

            def run_shard(shard: Shard, draws: list[Draw] | None = None) -> object:
                outputs: list[Any] = []
                compute = loss.sums
                # The state of the criterion differs between the two forwards.
                if loss.passes > 1:
                    of_all = loss.loss(self._forwards.copies, shard.device, is_split=False)
                    compute = of_all.collect
                self._forwards.run([surround(shard, draws)], compute, outputs)
                return outputs[0][0]

            self._find_draws(kind, batch, update, run_shard)
        draws = self._arithmetic.draws.get(kind, [])
        self._opened().add(run._replace(surround=functools.partial(surround, draws=draws)))

    def _begin(self, rows: int | None, *, is_known: bool) -> UpdateRandom:
        """Begins an update with the rows of the first batch of each rank. All ranks call this.

        Raises:
            ValueError: a rank has no batch, and others have.
        """
        seed = int(torch.empty((), dtype=torch.int64).random_())
        everyone = collectives.gather_objects((seed, rows, is_known))
        seeds, numbers, are_known = zip(*everyone, strict=True)
        counts = [count for count in numbers if count is not None]
        if 0 < len(counts) < len(numbers):
            raise ValueError(
                f"reproducible=True, and nothing was added on rank {numbers.index(None)}, expected a batch on each rank, which "
                "may have no rows: step.add(inputs[:0], targets[:0])"
            )
        self._check_groups(counts)
        self._is_awaited = not all(are_known)
        return UpdateRandom(seeds[0], sum(counts[: collectives.rank()]))

    def finish(self, settings: Callable[[], Settings]) -> Reduced:
        """Reduces all gradients."""
        if self._update is None and collectives.world_size() > 1:
            self._update = self._begin(None, is_known=True)
        reduced = self._opened().finish(settings)
        if self._update is not None:
            self._update.end()
        return reduced

    def discard(self, error: BaseException) -> bool:
        """Drops all gradients. Other ranks may wait for the number of rows.

        The CPU's generator is where it was before the update, for a repetition.
        """
        try:
            if self._is_awaited:
                collectives.tell_failure(error)
                error = collectives.ElsewhereFailure()
            if self._update is None:
                return False
            self._update.end()
            return self._opened().discard(error)  # It may run forwards, which draw.
        finally:
            torch.set_rng_state(self._state_before)

    def _find_draws(
        self, kind: Hashable, batch: Batch, update: UpdateRandom, run: RunShard
    ) -> None:
        """Runs two and three rows, and puts back what they change.

        A rank without rows runs none, as often.

        Raises:
            ValueError: parts of rows are in another order than the rows.
        """
        # One row is repeated where rows have lengths of their own.
        distinct = 1 if batch.pads else batch.rows or 0
        rows = [row % distinct for row in range(3)] if batch.rows else []
        before = self._forwards.snapshot()
        try:
            # A forward may differentiate by its inputs. Under DDP, graphs need a backward.
            with torch.set_grad_enabled(collectives.world_size() == 1):
                for count in (2, 3):
                    run(batch.shard(rows[:count], self._device))
                draws = find_draws(*update.forwards[-2:]) if batch.rows else []
                self._check_parts(batch, rows, draws, run)
        except torch.OutOfMemoryError as error:
            error.add_note(
                "reproducible=True runs two and three rows of its first batch, expected memory for them on the "
                "first device, also with micro_batch_size='auto': pass smaller rows, or leave reproducible=True out"
            )
            raise
        finally:
            before.restore()
        if batch.rows:
            self._arithmetic.draws[kind] = draws

    def _check_parts(self, batch: Batch, rows: list[int], draws: list[Draw], run: RunShard) -> None:
        """Compares two rows with each alone, if an operator draws for several parts of a row.

        All ranks call this.
        """
        has_parts = any(dim is not None and shape[dim] > 2 for _, shape, dim in draws)
        have_parts = collectives.gather_objects(has_parts)
        self._is_awaited = False
        if any(have_parts):
            parts = [rows[:2], rows[:1], rows[1:2]]
            outputs = [run(batch.shard(part, self._device), draws) for part in parts]
            # Outputs of batch norm depend on all rows.
            meets_rows = any(
                isinstance(module, torch_private.BatchNorm) and module.training
                for module in self._forwards.model.modules()
            )
            if has_parts and not meets_rows:
                _compare(*outputs)

    def _check_groups(self, counts: Sequence[int]) -> None:
        """Raises ``ValueError`` if rows of several ranks or batches would be in one group."""
        ends = [*itertools.accumulate(counts)]
        if self._group and any(end % self._group and end < ends[-1] for end in ends):
            raise ValueError(
                f"reproducible='bits' with {counts} rows of the ranks, or of add() calls, expected multiples of "
                f"micro_batch_size={self._group} up to the last rows: give RankBatchSampler micro_batch_size={self._group}, too"
            )

    def _opened(self) -> Work:
        if self._work is None:
            self._work = self._open_work()
        return self._work


class ArithmeticByRow(Arithmetic):
    """Floating point, with random numbers that follow the rows."""

    number_rows = NumberedRows

    def check(self, optimizers: Sequence[torch.optim.Optimizer], micro_batch_size: object) -> None:
        """Raises ``ValueError`` for a compiled module that draws random numbers itself."""
        if torch_private.draws_in_compiled_code(self.model.module):
            raise ValueError(
                "reproducible=True with a compiled module, whose code draws numbers of its own, expected "
                "torch._inductor.config.fallback_random = True before torch.compile"
            )

    @functools.cached_property
    def draws(self) -> dict[Hashable, list[Draw]]:
        """The draws of each kind of batch that has run."""
        return {}

    @functools.cached_property
    def _modules(self) -> list[nn.Module]:
        # walked once: a thousand modules take almost a millisecond
        return list(self.model.modules())

    def group(self, limit: Limit) -> int | None:
        """Returns the number of rows that run together in any layout, or None."""
        return None

    def batch_kind(self, batch: Batch) -> Hashable:
        """Returns a key that is equal for batches in which the same operators draw."""
        leaves = containers.leaves((batch.inputs, batch.targets))
        types = [
            (place, leaf.dtype, leaf.dim()) for place, leaf in leaves if isinstance(leaf, Tensor)
        ]
        return tuple([module.training for module in self._modules]), *types


def _compare(whole: object, *rows: object) -> None:
    """Raises ``ValueError`` if the outputs of two rows are others than those of each alone, in any
    order.
    """
    leaves = zip(*(containers.tensors_in(each) for each in (whole, *rows)), strict=True)
    for joined, *alone in leaves:
        values = torch.cat([each.flatten() for each in alone]).double().sort().values
        expected = joined.flatten().double().sort().values
        if len(values) == len(expected):
            limit = 0.01 * expected.abs().max()
            if (values - expected).abs().max() > limit:
                raise ValueError(
                    "an operator draws for several parts of each row, and their order is another than that of the rows, as in "
                    "torch.cat([h, h]), so reproducible=True does not know the rows, expected a draw for torch.stack([h, h]), or "
                    "for parts of a row beside each other"
                )
