"""Losses that a model computes itself, in its forward, as models of transformers do.

::

    criterion = DataParallelCriterion(lambda output: output.loss)
    loss = criterion(model(tokens, labels=labels))

The sums of the loss are noted in the forward of each replica, where they are computed, and the
criterion goes on from there. The first forward by hand runs again for that, since nothing tells
before the criterion that its output has a loss.

The rows of such a loss may depend on each other too. So the sums of some rows together are compared
with those of each row alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.marks import Arguments, map_marked
from ..batch.outputs import PerReplica
from ..batch.rows import NOTHING, ParallelModel, count_rows, has_number, take
from ..replicas.batchnorm import meets_others
from ..replicas.module_tree import keep_numbers
from ..replicas.replicas import without_trace
from .notes import SumNotes


class NotedOutput(NamedTuple):
    """The output of a model, with the sums that it has computed, which a strategy watches too."""

    output: Any
    sums: Sequence[Tensor]
    notes: "_Notes"


class _Notes(containers.Leaf):
    def __init__(self, notes: SumNotes, output: object) -> None:
        self.notes = notes
        self.output = output  # It is not watched.


class ForwardNotes:
    """Notes the sums in the forwards of a model.

    It stops if there are none in the first forward: of a step, or one that returns a number, such
    as a temperature.
    """

    def __init__(self, *, is_of_step: bool = False) -> None:
        self._is_of_step = is_of_step
        self._has_sums = False
        self._has_stopped = False

    def call(
        self,
        module: nn.Module,
        function: Callable[..., object],
        /,
        *inputs: object,
        **kwargs: object,
    ) -> object:
        """Calls a function of a module. Returns its output with the notes."""
        if self._has_stopped:
            return function(*inputs, **kwargs)
        notes = SumNotes().of_batch((inputs, kwargs), None)
        notes.of_model(module.parameters()).of_constants([*module.buffers()])
        with notes:
            output = function(*inputs, **kwargs)
        self._has_sums = self._has_sums or bool(notes.statistics)
        may_stop = self._is_of_step or has_number(output)
        self._has_stopped = may_stop and not self._has_sums
        return NotedOutput(output, notes.sums(), _Notes(notes, output))

    def open(self, output: object) -> tuple[object, SumNotes | None]:
        """Returns the output of :meth:`call`, and the notes. They are None if there is no sum."""
        if not isinstance(output, NotedOutput):
            return output, None
        notes = output.notes.notes
        before = containers.tensors_in(output.notes.output)
        notes.replace(output.sums, before, containers.tensors_in(output.output))
        return output.output, notes if notes.statistics else None


def note_again(outputs: PerReplica) -> None:
    """Runs the forward by hand of outputs again, with notes, if it had none.

    Later forwards of the model are noted at once. All ranks call this.
    """
    model: ParallelModel | None = outputs.model_of()
    for number, forward in enumerate(model.latest if model else ()):
        if model and forward.outputs() is outputs and forward.noting is None:
            model.note(ForwardNotes())
            if model.noting is None:  # Another run of a compiled module would show nothing.
                return
            with without_trace(model.module, model.devices), keep_numbers(model.module):
                model.run_again(number, outputs)


class RowsOfForward(NamedTuple):
    """Arguments of a forward and targets, on the host: the first row, the last one, and both."""

    method: str | None
    parts: Sequence[tuple[Arguments, Arguments]]
    dim: int
    rows: int  # The number of rows in the forward.
    is_joined: bool  # Rows are one object, and cannot be repeated.


def take_rows(outputs: PerReplica) -> RowsOfForward | None:
    """Returns rows of the batch of a step, or of the latest forward by hand."""
    model: ParallelModel | None = outputs.model_of()
    if model is None or meets_others(model):
        return None
    most = max(filter(None, outputs.sizes), default=0)
    batch = model.batch() if model.batch is not None else None
    if batch is not None and batch.rows:
        last = batch.rows - 1
        shards = [batch.shard(rows, model.devices[0]) for rows in ([0], [last], [0, last])]
        parts = [(shard.inputs, shard.targets) for shard in shards]
        return _on_host(RowsOfForward(None, parts, model.dim, most, shards[0].is_joined))
    if batch is not None or not model.latest:
        return None
    method, arguments, *_ = model.latest[-1]
    arguments = containers.map_leaves(functools.partial(_whole, model.devices[0]), arguments)
    count = count_rows(arguments, model.dim)
    if not count:
        return None
    taken = (take(arguments, rows, model.dim) for rows in ([0], [count - 1], [0, count - 1]))
    parts = [(part, NOTHING) for part in taken]
    return _on_host(RowsOfForward(method, parts, model.dim, most, is_joined=False))


@torch.no_grad()
def run_rows(
    model: ParallelModel, sample: RowsOfForward, most: int, most_bytes: int
) -> Iterator[tuple[PerReplica, Arguments]]:
    """Yields the outputs of the first row, of the last, and of ``most`` of them, half and half, with
    their targets.

    These are fewer if they have more bytes, but as many as those of the forward. All ranks call
    this.
    """
    from ..reproducible.row_random import Forward, UpdateRandom

    device = model.devices[0]
    update = UpdateRandom(seed=0)  # Each row draws the same numbers alone and beside others.
    parts = [*sample.parts]
    rows_of_parts = [[0], [1], [0, 1]]

    def run(
        inputs: Arguments, count: int, drawing: Callable[[], AbstractContextManager[None]]
    ) -> PerReplica:
        with (
            without_trace(model.module, model.devices),
            keep_numbers(model.module),
            drawing(),
        ):
            return model.run_alone(sample.method, inputs, count)

    def run_repeated(count: int, drawing: Callable[[], AbstractContextManager[None]]) -> PerReplica:
        inputs, _ = take(sample.parts[-1], [row % 2 for row in range(count)], sample.dim)
        return run(inputs, count, drawing)

    try:
        draws: Sequence[Any] = ()
        first: PerReplica | None = None
        if not sample.is_joined:
            first, has_drawn = _run_first(run_repeated, update, device)
            size = sum(tensor.nbytes for tensor in containers.tensors_in(first[0]))
            if size * most > most_bytes:
                most = min(most, max(sample.rows, 2))
            rows_of_parts[-1] = [0, 1] * (most // 2)
            parts[-1] = take(parts[-1], rows_of_parts[-1], sample.dim)
            draws = _find_draws(run_repeated, update, device) if has_drawn else ()
        for (inputs, targets), rows in zip(parts, rows_of_parts, strict=True):
            drawing: Callable[[], AbstractContextManager[None]] = nullcontext
            if draws:
                drawing = Forward(update, rows, device, draws, {}).drawing
            outputs = first if rows == [0] and not draws else None
            yield outputs or run(inputs, len(rows), drawing), targets
    finally:
        update.end()


def _run_first(
    run_repeated: Callable[..., PerReplica], update: Any, device: torch.device
) -> tuple[PerReplica, bool]:
    """Returns the output of the first row, and True if its forward has drawn random numbers."""
    from ..reproducible.row_random import Forward

    try:
        forward = Forward(update, range(1), device, None, {})
        output = run_repeated(1, forward.drawing)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - an operator may draw numbers that cannot follow the rows
        return run_repeated(1, nullcontext), False
    return output, len(forward.drawn) > 1  # The last one is the end.


def _find_draws(
    run_repeated: Callable[..., object], update: Any, device: torch.device
) -> Sequence[Any]:
    """Returns the draws of random numbers in a forward. There are none if they cannot follow rows."""
    from ..reproducible.row_random import Forward, find_draws

    try:
        two, three = (Forward(update, range(count), device, None, {}) for count in (2, 3))
        run_repeated(2, two.drawing)
        run_repeated(3, three.drawing)
        return find_draws(two, three)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - an operator may draw numbers that cannot follow the rows
        return ()


@contextlib.contextmanager
def evaluating(module: nn.Module, *, layers: bool) -> Iterator[None]:
    """Sets a module to evaluation mode in the block, or its dropout and batch norm alone."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        if not layers or any(name in type(part).__name__ for name in _LAYERS):
            nn.Module.train(part, False)
    try:
        yield
    finally:
        for part, mode in modes:  # The parts of each follow it.
            nn.Module.train(part, mode)


def _whole(device: torch.device, leaf: object) -> object:
    return leaf.on(device) if isinstance(leaf, PerReplica) else leaf


def _on_host(sample: RowsOfForward) -> RowsOfForward:
    def copied(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    return sample._replace(parts=map_marked(copied, [*sample.parts]))


# Parts of the names of classes, also of those of other libraries.
_LAYERS = "Drop", "BatchNorm"
