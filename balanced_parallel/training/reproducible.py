"""``reproducible=True``: an update draws the random numbers of one device with the whole batch, in any layout.

The seed of an update is one number from the CPU's generator, of the first rank. Rows are numbered over the effective batch: those
of the ranks before come first, then those that ``add`` has brought, then the rows of a batch in their order.

A shape does not tell which dimension has the rows: ``(6, 3, 7)`` with 3 rows is 3 x 2 parts, or time-major. So the first batch
of each kind runs in two small forwards, of two and three rows: the dimension that grows is that of the rows.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..batch import containers
from ..batch.rows import Batch, ParallelModel, Shard
from ..runtime.collectives import gather_objects, rank, world_size
from ..runtime.row_random import Draw, DrawShapes, Forward, UpdateRandom, find_draws
from ..runtime.torch_private import draws_in_compiled_code
from .accumulation import UpdateSync
from .recovery import Snapshot


class RandomByRow:
    """The random numbers of a :class:`TrainStep` with ``reproducible=True``. ``before`` is for what the small forwards change."""

    def __init__(self, model: ParallelModel, before: Snapshot) -> None:
        if draws_in_compiled_code(model.module):
            raise ValueError(
                "reproducible=True with a compiled module, whose code draws numbers of its own, expected "
                "torch._inductor.config.fallback_random = True before torch.compile"
            )
        self._device, self._before = model.devices[0], before
        self._modules = list(model.modules())  # walked once: a thousand modules take almost a millisecond
        self._draws: dict[Hashable, list[Draw]] = {}  # by the kind of a batch
        self._update: UpdateRandom | None = None
        self._state_before: Tensor | None = None  # of the CPU's generator, before the seed of an update was drawn

    def begin(self, batch: Batch, run: Callable[[list[Shard]], Any], sync: UpdateSync) -> Callable[[Shard], Shard]:
        """Numbers the rows of a batch. Returns a function that gives its shards a context. ``run`` runs shards of one forward."""
        leaves = containers.leaves((batch.inputs, batch.targets))
        types = [(place, leaf.dtype, leaf.dim()) for place, leaf in leaves if isinstance(leaf, Tensor)]
        kind, rows = (tuple([module.training for module in self._modules]), *types), batch.rows or 0
        is_known = not rows or kind in self._draws
        if self._update is None:
            self._state_before = torch.get_rng_state()
            everyone = gather_objects((int(torch.empty((), dtype=torch.int64).random_()), rows, is_known))
            self._update = UpdateRandom(everyone[0][0], sum(count for _, count, _ in everyone[: rank()]))
            is_known = all(is_known for _, _, is_known in everyone)
        elif world_size() > 1:
            raise ValueError("reproducible=True with several add() calls on several ranks: pass the effective batch to step(...)")
        update, first, shapes = self._update, self._update.rows, DrawShapes()
        update.rows += rows

        def surround(shard: Shard, draws: list[Draw] | None) -> Shard:
            if shard.is_joined:
                raise ValueError("reproducible=True with samples that collate= joins, expected a collate= with one row of each")
            numbers = [first + row for row in shard.rows or ()]
            equal_shapes = {} if batch.pads else shapes  # shards may be padded to lengths of their own
            return shard._replace(context=Forward(update, numbers, shard.device, draws, equal_shapes).drawing)

        if not is_known:
            self._run_two_and_three(batch, lambda shard: run([surround(shard, None)]))
            sync.forget_forwards()
            if rows:
                self._draws[kind] = find_draws(*update.forwards[-2:])
        return functools.partial(surround, draws=self._draws.get(kind, []))

    def _run_two_and_three(self, batch: Batch, run: Callable[[Shard], Any]) -> None:
        """Runs two and three rows, and puts back what they change. A rank without rows runs none, twice."""
        self._before.take()
        try:
            with torch.no_grad():
                for count in (2, 3) if batch.rows else (0, 0):
                    distinct = 1 if batch.pads else batch.rows or 0  # of rows with one length
                    run(batch.shard([row % distinct for row in range(count)], self._device))
        except torch.OutOfMemoryError as error:
            error.add_note(
                "reproducible=True runs two and three rows of its first batch without gradients, expected memory for them on the "
                "first device, also with micro_batch_size='auto': pass smaller rows, or leave reproducible=True out"
            )
            raise
        finally:
            self._before.restore()

    def end(self, *, has_failed: bool = False) -> None:
        """Ends the update. After one that has failed, the CPU's generator is where it was before, for a repetition."""
        if self._update is not None:
            self._update.end()
            self._update = None
        if has_failed and self._state_before is not None:
            torch.set_rng_state(self._state_before)
        self._state_before = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_update": None, "_state_before": None}
