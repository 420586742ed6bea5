"""``reproducible=True``: an update draws the random numbers of one device with the whole batch, in any layout.

The seed of an update is one number from the CPU's generator, of the first rank. Rows are numbered over the effective batch: those
of the ranks before come first, then those that ``add`` has brought, then the rows of a batch in their order.

A shape does not tell which dimension has the rows: ``(6, 3, 7)`` with 3 rows is 3 x 2 parts, or time-major. So the first batch
of each kind runs in two small forwards, of its first two and three rows: the dimension that grows is that of the rows. Where rows
are cut by cost, they are the first one twice and three times, which has one length.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..batch import containers
from ..batch.rows import Batch, Shard
from ..runtime.collectives import gather_objects, rank, world_size
from ..runtime.row_random import BatchRandom, Draw, UpdateRandom, find_draws
from ..runtime.torch_private import draws_in_compiled_code
from .accumulation import GradientSync
from .recovery import Snapshot


class RandomByRow:
    """The random numbers of a :class:`TrainStep` with ``reproducible=True``. ``before`` is for what the small forwards change."""

    def __init__(self, model: Any, sync: GradientSync, before: Snapshot) -> None:
        if draws_in_compiled_code(model):
            raise ValueError(
                "reproducible=True with a compiled module, whose code draws numbers of its own, expected "
                "torch._inductor.config.fallback_random = True before torch.compile"
            )
        self._model, self._sync, self._before = model, sync, before
        self._modules = list(model.modules())  # walked once: a thousand modules take almost a millisecond
        self._draws: dict[Hashable, dict[str, list[Draw]]] = {}  # by the kind of a batch
        self._update: UpdateRandom | None = None
        self._rows = 0  # of this update, in this process and in the ranks before

    def begin(self, batch: Batch, run: Callable[[list[Shard]], Any]) -> BatchRandom:
        """Numbers the rows of a batch. All ranks call this. ``run`` runs model and criterion on the shards of one forward."""
        if batch.cut_already is not None:
            raise ValueError("reproducible=True with inputs that are cut already, expected the whole batch and cut=ByCost(...)")
        kind, rows = self._kind_of(batch), batch.rows or 0
        is_known = not rows or kind in self._draws
        shapes: dict[Any, tuple[int, ...]] = {}  # of draws without rows, which are the same in all forwards of a batch
        if self._update is None:
            everyone = gather_objects((int(torch.empty((), dtype=torch.int64).random_()), rows, is_known))
            self._update, self._rows = UpdateRandom(everyone[0][0]), sum(count for _, count, _ in everyone[: rank()])
            is_known = all(is_known for _, _, is_known in everyone)
        elif world_size() > 1:
            raise ValueError(
                "reproducible=True with several add() calls on several ranks, where the places of the rows would not be known: "
                "pass the effective batch to step(inputs, targets)"
            )
        if not is_known:
            self._find_draws(kind, batch, run)
            draws = [
                ((part, number), draw) for part, each in self._draws.get(kind, {}).items() for number, draw in enumerate(each)
            ]
            shapes = {place: draw.shape for place, draw in draws if draw.dim is None}
        self._rows += rows
        return BatchRandom(self._update, self._rows - rows, self._draws.get(kind, {}), None if batch.pads else shapes)

    def end(self) -> None:
        """Ends the update."""
        if self._update is not None:
            self._update.end()
            self._update = None

    def _find_draws(self, kind: Hashable, batch: Batch, run: Callable[[list[Shard]], Any]) -> None:
        """Finds the draws of the model and of the criterion in two small forwards. All ranks run them."""
        assert self._update is not None
        random, distinct = BatchRandom(self._update, 0, None), 1 if batch.pads else batch.rows or 0
        before = len(self._update.forwards)
        self._before.take()
        with torch.no_grad():
            for count in (2, 3) if batch.rows else (0, 0):
                rows = [row % distinct for row in range(count)]
                shard = batch.shard(rows, self._model.devices[0])
                if shard.is_joined:
                    raise ValueError(
                        "reproducible=True with samples that collate= joins, whose random numbers do not belong to a row, "
                        "expected a collate= that makes a row of each sample"
                    )
                run([shard._replace(random=random)])
        self._before.restore()
        self._sync.begin()
        if batch.rows:
            forwards = self._update.forwards[before:]
            parts = {forward.part: [other for other in forwards if other.part == forward.part] for forward in forwards}
            self._draws[kind] = {part: find_draws(two_and_three) for part, two_and_three in parts.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_update": None}

    def _kind_of(self, batch: Batch) -> Hashable:
        """Returns what the draws of a batch depend on: the types of its leaves and the modules in training."""
        leaves = containers.leaves((batch.inputs, batch.targets))
        types = [(place, leaf.dtype, leaf.dim()) for place, leaf in leaves if isinstance(leaf, Tensor)]
        return tuple([module.training for module in self._modules]), *types
