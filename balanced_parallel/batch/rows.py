"""Rows of the arguments of a call: their number, and shards of them.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3). Here sizes differ by at most
one row.

The effective batch is a table of shards, micro-batches x devices. A :class:`Batch` is taken apart
once, a plan gives the rows of each shard, and a :class:`Shard` has views of them. 14 rows of at
most 3 per device, on two devices::

                 time ->
                 micro-batch 0   micro-batch 1   micro-batch 2
    device 0     rows 0-2        rows 5-7        rows 10-11
    device 1     rows 3-4        rows 8-9        rows 12-13
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ..runtime.devices import DeviceLike, Devices, move, resolve_devices
from ..runtime.module_state import copy_state, embeddings_of
from ..runtime.torch_private import CHILDREN, base_of, is_compiled
from ..runtime.values import naming_arguments
from . import containers
from .containers import Dims, Nested, check_dim
from .marks import MARKS, Along, Arguments, Rows, count_marked_rows, holds_tensors, without_mark
from .outputs import PerReplica, refuse_word_counts, take_rows
from .plan import RowNumbers, check_split, equal_rows, scaled


def count_rows(
    node: object, dim: int = 0, expected: int | None = None, name: str = "inputs"
) -> int | None:
    """Returns the number of rows, that of all parts with rows, or None.

    ``expected`` is that of the inputs of ``node``.
    """
    only = (
        node.inputs[0]
        if type(node) is Arguments and len(node.inputs) == 1 and not node.kwargs
        else node
    )
    only = only[0] if type(only) is tuple and len(only) == 1 else only
    # This is a shortcut for the most frequent input.
    if type(only) is Tensor and 0 <= dim < only.dim():
        return only.size(dim)
    return count_marked_rows(node, dim, expected, name)


def cut(node: Nested, parts: Sequence[RowNumbers], dim: int = 0) -> list[Nested]:
    """Returns the rows of each part of ``node``. See :func:`take`."""
    return [take(node, part, dim) for part in parts]


def take(node: Nested, part: RowNumbers, dim: int = 0) -> Nested:
    """Returns some rows of ``node``.

    Tensors are views for a range of rows, and copies for a list of them. Marks stay.
    """
    if (
        isinstance(node, Arguments)
        and len(node.inputs) == 1
        and not node.kwargs
        and type(node.inputs[0]) is Tensor
    ):
        # This is a shortcut for the most frequent arguments.
        return cast(Nested, Arguments((take_rows(node.inputs[0], part, dim),), {}))

    def take_leaf(leaf: object) -> object:
        if isinstance(leaf, Along):
            return Along(take_rows(leaf.leaf, part, leaf.dim), leaf.dim)
        if isinstance(leaf, Rows):
            return Rows([leaf.entries[row] for row in part])
        if not isinstance(leaf, PerReplica):
            return take_rows(leaf, part, dim)
        if None in leaf.sizes:
            return leaf
        if not isinstance(part, range):
            raise TypeError(
                "the inputs are outputs of another model (PerReplica) and are cut by cost, which needs tensors on the CPU: "
                "pass outputs.gather(device='cpu')"
            )
        return leaf.narrow(part.start, len(part))

    return containers.map_leaves(take_leaf, node)


def move_leaves(node: object, device: torch.device | None) -> Any:
    """Returns ``node`` with all tensors on ``device``, or where they are if that is None, and
    without marks.
    """

    def move_leaf(leaf: Any) -> object:
        if isinstance(leaf, Tensor):
            return leaf if device is None else move(leaf, device)
        if isinstance(leaf, MARKS):
            return move_leaves(without_mark(leaf), device)
        if isinstance(leaf, PerReplica) and device is not None:
            return leaf.on(device)
        has_to = device is not None and hasattr(leaf, "to") and holds_tensors(leaf, 3)
        # a copy: torch_geometric's method changes the object
        return copy.copy(leaf).to(device) if has_to else leaf

    return containers.map_leaves(move_leaf, node)


def move_arguments(arguments: Arguments, device: torch.device) -> Arguments:
    """Returns arguments on a device, without marks."""
    inputs, kwargs = arguments
    # shortcut for the most frequent arguments
    if len(inputs) == 1 and not kwargs and type(inputs[0]) is Tensor:
        return Arguments((move(inputs[0], device),), kwargs)
    return Arguments(move_leaves(inputs, device), move_leaves(kwargs, device))


def copy_views(arguments: Arguments, device: torch.device) -> Arguments:
    """Returns arguments with copies of those tensors that are views, if they would not be moved to
    ``device`` anyway.
    """

    def copied(tensor: Tensor) -> Tensor:
        is_view = tensor.device == device and base_of(tensor) is not tensor
        return tensor.clone() if is_view else tensor

    return containers.map_tensors(copied, arguments)


class Shard(NamedTuple):
    """Rows of one device in one forward. Its tensors are views of the batch, marked and not moved."""

    inputs: Arguments
    targets: Arguments  # The criterion's arguments after the outputs.
    # Places in the effective batch of this process; None if the batch has no rows.
    rows: RowNumbers | None
    target_rows: int  # a multiple of the rows if the targets are flattened
    device: torch.device
    # Surrounds model and criterion.
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    is_joined: bool = False  # the inputs are one object, of the samples ``rows``

    def plain_targets(self) -> tuple[Any, ...]:
        """Returns the targets without marks."""
        plain: tuple[Any, ...] = move_leaves(self.targets.inputs, None)
        return plain


class MicroBatch(NamedTuple):
    """The shards of one forward.

    A model takes it in place of arguments, so that its hooks run as in any forward.
    """

    shards: Sequence[Shard]


class Noting(Protocol):
    """Notes what happens in the forwards of a model."""

    def call(
        self,
        module: nn.Module,
        function: Callable[..., object],
        /,
        *inputs: object,
        **kwargs: object,
    ) -> object:
        """Calls a function of a module. Returns its output with the notes."""

    def open(self, output: object) -> tuple[object, object]:
        """Returns the output of :meth:`call`, and the notes. They are None for another output."""


class ByHand(NamedTuple):
    """A forward by hand, whose outputs may have a loss."""

    method: str | None
    arguments: Arguments
    outputs: Callable[[], PerReplica | None]  # a weak reference
    noting: Noting | None
    put_state: Callable[[], None] | None = None  # Puts back the state before it.


class ParallelModel(nn.Module):
    """The model of a :class:`TrainStep`.

    Subclasses run it on the devices of a process, or on that of a rank.
    """

    module: nn.Module
    devices: list[torch.device]
    split: Sequence[float] | None  # the weight of each device; None for equal parts
    dim: int
    out_dims: Dims
    # Methods that have run over devices or ranks, and the mode of the module, with True for those
    # that communicate with other ranks.
    runs: dict[tuple[str | None, bool], bool]
    noting: Noting | None = None
    # The latest forwards whose outputs have a number.
    latest: Sequence[ByHand] = ()
    batch: "Callable[[], Batch | None] | None" = None  # A weak reference, if a step runs the model.
    _has_graph = False  # The graph of a forward was looked at.
    # Kinds of forwards by hand whose outputs had no number.
    _without_number: frozenset[tuple[object, ...]] = frozenset()

    if TYPE_CHECKING:  # nn.Module has Any

        def __call__(self, *inputs: object, **kwargs: object) -> PerReplica: ...

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on the rows of the arguments, and returns a :class:`PerReplica` of its
        outputs.
        """
        if inputs and type(inputs[0]) is MicroBatch:
            outputs = self._run_shards(inputs[0].shards)
        else:
            outputs = self._by_hand(None, Arguments(inputs, kwargs))
        # The setting may be assigned later.
        present = self._embeddings
        counts = present and any(each.scale_grad_by_freq for each in present.values())
        if torch.is_grad_enabled() and (counts or not self._has_graph):
            self._has_graph = True
            refuse_word_counts(outputs)
        return outputs

    @functools.cached_property
    def _embeddings(self) -> dict[str, Any]:
        return embeddings_of(self.module)

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Calls a method of the module other than ``forward``, with arguments split and outputs
        returned as in a forward.

        Example:
            >>> features = model.call("encode_image", images)  # doctest: +SKIP
        """
        return self._by_hand(method, Arguments(inputs, kwargs))

    def _by_hand(self, method: str | None, arguments: Arguments) -> Any:
        kind = method, len(arguments.inputs), *arguments.kwargs
        may_have_loss = self.noting is None and kind not in self._without_number
        # A compiled function cannot call the model, and is told so later.
        may_have_loss = may_have_loss and not torch.compiler.is_compiling()
        put_state = copy_state(self.module) if may_have_loss and torch.is_grad_enabled() else None
        outputs = self._run_by_hand(method, arguments)
        is_split = isinstance(outputs, PerReplica) and bool(outputs)
        if is_split and has_number(outputs[0]):
            outputs.made_by(self)
            new = ByHand(method, arguments, weakref.ref(outputs), self.noting, put_state)
            # Two losses may be computed after two forwards.
            self.latest = *self.latest[-1:], new
            return outputs
        self._without_number |= {kind}
        if self.latest:
            self.latest = ()
        return outputs

    def run_again(self, number: int, outputs: PerReplica) -> None:
        """Runs one of the latest forwards by hand again, and replaces its outputs. All ranks call
        this.
        """
        latest = [*self.latest]
        method, arguments, _, _, put_state = latest[number]
        if put_state is not None:
            put_state()
        outputs.become(self._run_by_hand(method, arguments))
        latest[number] = latest[number]._replace(noting=self.noting)
        self.latest = latest

    def _open(self, noting: Noting, entries: Sequence[object], sizes: Sequence[Any]) -> PerReplica:
        """Returns the outputs of a forward, with what was noted in it."""
        entries, notes = zip(*map(noting.open, entries), strict=True)
        return PerReplica(entries, sizes, self.out_dims).made_by(self, notes)

    def begin_step(self, batch: "Batch", noting: Noting) -> None:
        """Begins a batch of a step, whose loss the model may compute."""
        self.batch = weakref.ref(batch)
        self.note(noting)

    def note(self, noting: Noting, *, anew: bool = False) -> None:
        """Sets what notes the forwards from now on, if nothing does.

        Compiled modules have none: their operations are not seen. With ``anew`` it replaces what
        notes them, also around compiled parts.
        """
        if anew or (self.noting is None and not any(map(is_compiled, self.modules()))):
            self.noting = noting

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy gets: no forwards of this model."""
        state: dict[str, Any] = {**super().__getstate__()}
        for name in ("latest", "batch"):
            state.pop(name, None)
        return state

    def run_alone(self, method: str | None, arguments: Arguments, rows: int) -> PerReplica:
        """Runs rows on the first device of this process. All ranks call this."""
        shard = Shard(arguments, NOTHING, range(rows), rows, self.devices[0])
        return self._run_shards([shard], method)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module, as ``model.module.compile(...)``.

        Arguments are those of ``torch.compile``.

        In one process, compiled replicas run one after the other in the calling thread. On several
        devices they are trained by :class:`TrainStep`, whose backwards run in that thread, too.
        There, a forward by hand raises ``RuntimeError``, unless gradients are off.
        """
        self.module.compile(*args, **kwargs)

    def _run_shards(self, shards: Sequence[Shard], method: str | None = None) -> PerReplica:
        """Runs a method of the module on the shards of a micro-batch of :class:`TrainStep`."""
        raise NotImplementedError

    def _run_by_hand(self, method: str | None, arguments: Arguments) -> Any:
        """Runs a method of the module on arguments, None for its ``forward``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute. The error for one that only the module has says how to reach it."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if hasattr(vars(self).get(CHILDREN, {}).get("module"), name):
                raise AttributeError(
                    f"{error}, which its module has: write model.call({name!r}, ...) for a method that takes rows, and "
                    f"model.module.{name} for anything else"
                ) from None
            raise


def has_number(output: object) -> bool:
    """Returns True if an output has a number, which may be a loss that the model computes."""
    tensors = containers.tensors_in(output)
    return any(tensor.numel() == 1 and tensor.is_floating_point() for tensor in tensors)


NOTHING = Arguments((), {})


class Batch:
    """Inputs and targets of one call, marked, and taken apart once.

    ``dims`` are the dimensions of the rows in unmarked inputs and in unmarked targets.
    """

    pads = False  # True if each shard is padded to a length of its own.
    has_example = True  # A shard without rows can be made.

    def __init__(
        self, inputs: Arguments, targets: Arguments = NOTHING, dims: tuple[int, int] = (0, 0)
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self.dims = dims
        self.rows = count_rows(inputs, dims[0])  # None if no input has rows
        self.target_rows = (
            None if targets is NOTHING else count_rows(targets, dims[1], self.rows, "targets")
        )
        if self.rows == 0 and self.target_rows:
            raise ValueError(
                f"the targets have {self.target_rows} rows, but the inputs have none: expected the same number"
            )
        is_plain = len(targets.inputs) == 1 and type(targets.inputs[0]) is Tensor
        # targets of the whole batch, in any number of parts
        self.counted_targets = [targets.inputs if is_plain else move_leaves(targets.inputs, None)]

    def plan(
        self,
        devices: Devices,
        weights: Sequence[float] | None,
        limit: float | None,
        agree: Callable[[int], int],
    ) -> Iterator[list[Shard]]:
        """Yields the shards of each micro-batch of at most ``limit`` rows per device.

        ``agree`` returns the number of micro-batches to run, if this process needs the given one.
        Inputs that have no rows, such as settings alone, are one micro-batch.
        """
        if self.rows is None:
            yield [Shard(self.inputs, self.targets, None, self.target_rows or 1, devices[0])]
            return
        for parts in equal_rows(self.rows, weights or len(devices), limit, agree):
            pairs = zip(parts, devices, strict=True)
            shards = [self.shard(part, device) for part, device in pairs if part]
            yield shards or [self.shard(range(0), devices[0])]

    def split(self, devices: Devices, weights: Sequence[float] | None) -> list[Shard]:
        """Returns the shards of one forward.

        Devices without rows are left out; without any rows, the first one is used.
        """
        return next(self.plan(devices, weights, None, lambda count: max(count, 1)))

    def take_example(self, earlier: Sequence[object]) -> Sequence[object]:
        """Returns a sample, from which a later batch without samples makes a shard.

        ``earlier`` is that of an earlier batch.
        """
        return earlier

    def largest(self, shares: int | Sequence[float], limit: float | None) -> tuple[float, float]:
        """Returns the most rows of a device in one forward, and a limit that halves them, 0 if
        nothing does.
        """
        plan = equal_rows(self.rows or 0, shares, limit)
        rows = max((len(part) for parts in plan for part in parts), default=0)
        return rows, -(-rows // 2) if rows > 1 else 0

    def shard(self, part: RowNumbers, device: torch.device) -> Shard:
        """Returns some rows."""
        rows = self.rows or 0
        target_rows = self.target_rows
        if len(part) == rows:
            return Shard(
                self.inputs,
                self.targets,
                part,
                rows if target_rows is None else target_rows,
                device,
            )
        inputs = take(self.inputs, part, self.dims[0])
        if target_rows is None:
            return Shard(inputs, self.targets, part, len(part), device)
        of_targets = part if target_rows == rows else scaled(part, rows, target_rows)
        return Shard(
            inputs, take(self.targets, of_targets, self.dims[1]), part, len(of_targets), device
        )


Mark = Callable[[object, object], tuple[Arguments, Arguments, tuple[int, int]]]


class Cut:
    """A way to cut batches, for ``TrainStep(cut=...)``.

    ``limit`` is that of a device in one forward.
    """

    limit: float | None = None

    def open(
        self,
        inputs: object,
        targets: object,
        mark: Mark,
        *,
        unit: str,
        is_strict: bool,
    ) -> Batch:
        """Takes a batch apart.

        ``mark`` returns inputs and targets with marks, and the dimensions of the rows in what has
        none.

        ``unit`` is that of a limit, ``"rows"`` or ``"cost"``. A row over the limit is an error if
        strict; otherwise it runs alone.
        """
        raise NotImplementedError


@naming_arguments
def scatter(
    inputs: object,
    device_ids: Sequence[DeviceLike] | None = None,
    dim: int = 0,
    *,
    split: Sequence[float] | None = None,
) -> list[Any]:
    """Splits ``inputs`` by rows over devices, and moves the shards there. Gradients flow back.

    Lists of strings or numbers have one entry per row. 0-dim tensors, plain values and other
    objects go to every replica. Containers keep their type.

    Args:
        inputs: a tensor, or tuples, named tuples, lists, mappings and dataclasses of tensors.
        device_ids: devices, as in :class:`DataParallelModel`.
        dim: dimension of the rows.
        split: one weight per device. ``None`` means sizes that differ by at most one row.

    Returns:
        A list with one structure like ``inputs`` per device that gets rows. Without rows, a list
        with one structure.

    Raises:
        ValueError: inputs have different numbers of rows, or the entries of a list or a tuple may be
            rows.

    Example:
        >>> shards = scatter({"x": torch.zeros(9, 5), "scale": 2.0}, ["cpu"] * 4)
        >>> [shard["x"].shape[0] for shard in shards]
        [3, 2, 2, 2]
        >>> [shard.shape for shard in scatter(torch.zeros(8, 5), ["cpu", "cpu"], split=[3, 1])]
        [torch.Size([6, 5]), torch.Size([2, 5])]
    """
    devices = resolve_devices(device_ids)
    check_dim(dim)
    weights = check_split(split, len(devices))
    arguments = spread(inputs)
    shards = Batch(Arguments(arguments, {}), dims=(dim, 0)).split(devices, weights)
    moved = [move_leaves(shard.inputs.inputs, shard.device) for shard in shards]
    return moved if arguments is inputs else [piece for (piece,) in moved]


def as_arguments(inputs: object) -> Arguments:
    """Converts ``inputs`` to the arguments of a call: a mapping to keyword arguments, a tuple to
    positional arguments.
    """
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    if isinstance(inputs, torch.utils.data.DataLoader):
        raise TypeError(
            "the inputs are a DataLoader, expected one of its batches: for inputs, targets in loader"
        )
    return Arguments(spread(inputs), {})


def spread(value: object) -> tuple[Any, ...]:
    """Converts ``value`` to positional arguments: one per entry of a tuple, else a single one, also
    for a named tuple.
    """
    return value if isinstance(value, tuple) and not containers.is_named_tuple(value) else (value,)
