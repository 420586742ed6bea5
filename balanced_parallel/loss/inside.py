"""Losses that a model computes itself, in its forward, as models of transformers do.

::

    criterion = DataParallelCriterion(lambda output: output.loss)
    loss = criterion(model(tokens, labels=labels))

The sums of the loss are noted in the forward of each replica, where they are computed, and the
criterion goes on from there. The first forward by hand runs again for that, since nothing tells
before the criterion that its output has a loss. Once a loss has been one mean of torch's
cross-entropy, forwards run as they are, and the root of its graph tells the count. One with another
root runs again, and the sums are noted from then on.

The rows of such a loss may depend on each other too. So the sums of some rows together are compared
with those of halves of them.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch import containers
from ..batch.containers import Nested
from ..batch.marks import Arguments, map_marked
from ..batch.outputs import PerReplica
from ..batch.rows import Batch, ParallelModel, take
from ..replicas.batchnorm import meets_others
from ..runtime.collectives import gather_objects
from ..runtime.module_state import without_trace
from ..runtime.random_numbers import forward_by_row
from .notes import SumNotes

Drawing = Callable[[], AbstractContextManager[None]]  # Makes a block with other random numbers.


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

    With ``may_stop``, it stops if there are none in the first forward.
    """

    def __init__(self, *, may_stop: bool = True) -> None:
        self._may_stop = may_stop
        self._has_stopped = False
        # The loss whose mean is the only tensor of an output, "" for another output. None is a loss
        # that has become another one.
        self._mean: str | None = ""

    def go_on(self) -> None:
        """Notes all forwards from now on, also after one without sums."""
        self._may_stop = self._has_stopped = False

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
        # Random numbers that follow the rows are drawn once.
        if self._mean and torch.is_grad_enabled() and not forward_by_row.get():
            output = function(*inputs, **kwargs)
            tensors = containers.tensors_in(output)
            if notes.of_mean(self._mean, tensors):
                return NotedOutput(output, notes.sums(), _Notes(notes, output))
            self._mean = None
            devices = [tensor.device for tensor in tensors]
            with without_trace(module.modules(), devices):
                return self.call(module, function, *inputs, **kwargs)
        notes.of_model(module).of_constants([*module.buffers()])
        with notes:
            output = function(*inputs, **kwargs)
        self._has_stopped = self._may_stop = self._may_stop and not notes.statistics
        if self._mean is not None:
            self._mean = notes.name_of_mean(containers.tensors_in(output))
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
    """Runs the forward by hand of outputs again, with notes, if it had none, and if the output has a
    number on all ranks.

    Later forwards of the model are noted at once. All ranks call this.
    """
    if outputs.notes is not None:
        return
    model: ParallelModel | None = outputs.model_of()
    numbers = [
        number
        for number, forward in enumerate(model.latest if model else ())
        if forward.outputs() is outputs
    ]
    # One row with one feature is a number, too, and a forward of FSDP2 waits for all ranks.
    if not all(gather_objects(bool(numbers))) or model is None:
        return
    model.note(ForwardNotes())
    if model.noting is None:  # Another run of a compiled module would show nothing.
        return
    for number in numbers:
        with without_trace(model.module.modules(), model.devices):
            model.run_again(number, outputs)


class RowsOfForward(NamedTuple):
    """Arguments of a forward and targets, on the host: two halves of some rows, and all of them."""

    method: str | None
    parts: Sequence[tuple[Arguments, Arguments]]
    size: int  # The number of these rows.
    dim: int
    rows: int  # The number of rows in the forward.
    is_joined: bool  # Rows are one object, and cannot be repeated.
    places: Set[Hashable] = frozenset()  # Places of sums that are not zero for the first time.


def take_rows(outputs: PerReplica, most: int, numbers: Sequence[int] = ()) -> RowsOfForward | None:
    """Returns ``most`` of some rows of the batch of a step, or of the latest forward by hand, from
    the first one to the last. Without ``numbers``, all rows are meant.
    """
    model: ParallelModel | None = outputs.model_of()
    if model is None or meets_others(model):
        return None
    method = None
    batch = model.batch() if model.batch is not None else None
    if batch is None and model.latest:
        method, arguments, *_ = model.latest[-1]
        whole = containers.map_leaves(
            lambda leaf: leaf.on(model.devices[0]) if isinstance(leaf, PerReplica) else leaf,
            arguments,
        )
        batch = Batch(whole, dims=(model.dim, 0))
    if batch is None or not batch.rows:
        return None
    # A batch of samples has one of them as rows.
    numbers = [row for row in numbers if row < batch.rows] or range(batch.rows)
    count = max(2, min(len(numbers), most))
    places = [numbers[row * (len(numbers) - 1) // (count - 1)] for row in range(count)]
    parts = places[: count // 2], places[count // 2 :], places
    shards = [batch.shard(part, model.devices[0]) for part in parts]
    pairs = on_host([(shard.inputs, shard.targets) for shard in shards])
    rows = max(filter(None, outputs.sizes), default=0)
    return RowsOfForward(method, pairs, count, model.dim, rows, shards[0].is_joined)


def on_host(node: Nested) -> Nested:
    """Returns marked values without their history, on the host."""
    return map_marked(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, node)


class _LargestResult(TorchFunctionMode):
    """Measures the largest result of a function of torch in its block, in bytes."""

    size = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch."""
        result = func(*args, **kwargs or {})
        is_strided = isinstance(result, Tensor) and result.layout == torch.strided
        if is_strided and not torch.compiler.is_compiling():
            self.size = max(self.size, result.nbytes)
        return result


def run_rows(
    model: ParallelModel, sample: RowsOfForward, most: int, most_bytes: int
) -> Iterator[tuple[PerReplica, Arguments]]:
    """Yields the outputs of two halves of the rows, and of all of them, ``most`` with copies, with
    their targets.

    These are fewer if a tensor in the forward has more bytes, but as many as those of the forward.
    All ranks call this.
    """
    from ..reproducible.row_random import Forward, UpdateRandom

    device = model.devices[0]
    update = UpdateRandom(seed=0)  # Each row draws the same numbers alone and beside others.
    places = [*range(sample.size)]
    copies = 1

    def run(inputs: Arguments, count: int, drawing: Drawing) -> PerReplica:
        with without_trace(model.module.modules(), model.devices), drawing():
            return model.run_alone(sample.method, inputs, count)

    def run_repeated(count: int, drawing: Drawing) -> PerReplica:
        inputs, _ = take(sample.parts[-1], [row % sample.size for row in range(count)], sample.dim)
        return run(inputs, count, drawing)

    try:
        draws: Sequence[Any] = ()
        if not sample.is_joined:
            with _LargestResult() as largest:
                draws = _find_draws(run_repeated, update, device)
            if largest.size * most > most_bytes:
                most = min(most, max(sample.rows, 2))
            places = places[:: max(sample.size // most, 1)][:most]
            copies = most // len(places)
        half = len(places) // 2
        rows_of_parts = [places[:half], places[half:], places * copies]
        parts = sample.parts
        if not sample.is_joined:
            parts = [take(parts[-1], rows, sample.dim) for rows in rows_of_parts]
        for (inputs, targets), rows in zip(parts, rows_of_parts, strict=True):
            drawing: Drawing = nullcontext
            if draws:
                drawing = Forward(update, rows, device, draws, {}).drawing
            yield run(inputs, len(rows), drawing), targets
    finally:
        update.end()


def _find_draws(
    run_repeated: Callable[[int, Drawing], PerReplica], update: Any, device: torch.device
) -> Sequence[Any]:
    """Returns the draws of random numbers in a forward. There are none if they cannot follow rows."""
    from ..reproducible.row_random import Forward, find_draws

    first, second, third = (Forward(update, range(count), device, None, {}) for count in (1, 2, 3))
    try:
        run_repeated(1, first.drawing)
        if len(first.drawn) == 1:  # The last one is the end.
            return ()
        run_repeated(2, second.drawing)
        run_repeated(3, third.drawing)
        return find_draws(second, third)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - an operator may draw numbers that cannot follow the rows
        run_repeated(1, nullcontext)
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


# Parts of the names of classes, also of those of other libraries.
_LAYERS = "Drop", "BatchNorm"
