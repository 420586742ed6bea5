"""``PerReplica``: the outputs of the replicas of one forward, each on its own device, and
:func:`gather`, which joins them.

torch's ``gather`` supports no dataclasses, numbers or strings, and ``all_gather`` needs equal
sizes. Here the ranks first exchange the layouts of their outputs. So sizes may differ, and a
mismatch raises the same error on all ranks instead of a hang.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.collectives import (
    explain_unwatched,
    gather_objects,
    gather_rows,
    mark_loss,
    world_size,
)
from ..runtime.devices import NO_BLOCK, DeviceLike, move, pin, resolve_device, visible_devices
from ..runtime.torch_private import divides_by_counts, is_profiled, nodes_behind, profiled
from ..runtime.values import check_type, naming_arguments
from . import containers
from .containers import Dims, Nested, check_dim, check_dims, dims_at, leaf_dims, map_rows
from .plan import RowNumbers, consecutive


def _no_operator(outputs: "PerReplica", *others: object) -> NoReturn:
    _refuse("an operator", TypeError)


class PerReplica(list[Any], containers.Leaf):
    """A list of outputs, one per replica, as :class:`DataParallelModel` returns it.

    ``len``, ``for``, ``zip`` and indexing with a number work as for any list. A key or an attribute
    applies to each entry: ``outputs["logits"]`` and ``outputs.logits`` return a ``PerReplica`` of
    the logits. Operators and functions of tensors raise an error. A :class:`DataParallelCriterion`
    accepts it, and another :class:`DataParallelModel`, whose replicas use rows that are on the
    right device in place.

    Args:
        entries: one entry per replica that had rows.
        sizes: number of rows of each entry; None if the batch had no rows. Without this argument,
            as where another library applies a function to all tensors, they are those of the first
            tensor of each entry.
        dim: dimension of the rows in the entries, or one dimension per part of an entry.

    Example:
        >>> outputs = PerReplica([torch.zeros(3, 10), torch.zeros(2, 10)], [3, 2])
        >>> len(outputs), outputs[0].shape
        (2, torch.Size([3, 10]))
        >>> outputs.map(lambda output: output.argmax(1)).gather().shape
        torch.Size([5])
        >>> outputs = PerReplica([{"logits": torch.zeros(3, 10)}, {"logits": torch.zeros(2, 10)}], [3, 2])
        >>> outputs["logits"].gather().shape
        torch.Size([5, 10])
    """

    # A reference to the model whose forward made them, and the notes of each replica's forward.
    model_of: Callable[[], Any] = staticmethod(lambda: None)
    notes: Sequence[Any] | None = None

    def __init__(
        self, entries: Iterable[object], sizes: Sequence[int | None] | None = None, dim: Dims = 0
    ) -> None:
        # an output is made in every forward
        if not type(entries) is type(sizes) is list:
            check_type("entries", entries, Iterable, "one entry per replica")
            check_type("sizes", sizes, Iterable | None, "the number of rows of each entry")
        if type(dim) is not int:
            check_dims(dim, "dim")
        super().__init__(entries)
        self.has_sizes = sizes is not None
        self.sizes = self._sizes_of_first_tensors(dim) if sizes is None else tuple(sizes)
        if len(self.sizes) != len(self):
            raise ValueError(
                f"{len(self)} entries and {len(self.sizes)} sizes, expected the rows of each entry"
            )
        if self and not isinstance(dim, int):
            # a check
            list(leaf_dims(self[0], dim, "the entry, or the result of map(function, dim=...),"))
        self.dim = dim
        self.order: list[int] | None = None
        if dim != 0:
            self.__class__ = _PlacedOutputs

    @classmethod
    def of(cls, outputs: object, dim: Dims = None) -> "PerReplica":
        """Converts the outputs that a criterion is given: a list with one entry per replica, or a
        ``PerReplica`` per leading argument.
        """
        if isinstance(outputs, cls) and outputs:
            return outputs
        is_record = containers.is_named_tuple(outputs)
        if not isinstance(outputs, (list, tuple)) or is_record or not outputs:
            raise TypeError(
                f"the criterion was given {containers.describe(outputs)}, expected the list that DataParallelModel returns, with "
                "one output per replica; for the output of one replica write criterion([output], ...)"
            )
        if all(isinstance(part, cls) for part in outputs):
            first: PerReplica = outputs[0]
            return first.zip(*outputs[1:])
        replicas = cls(outputs, None, 0 if dim is None else dim)
        replicas._refuse_outputs_of_one(type(outputs).__name__)
        return replicas

    def check_rows(self, outputs: Sequence[Any], rows: int | None) -> None:
        """Raises ``ValueError`` if ``outputs`` are a plain list, whose rows are not those of the
        targets.
        """
        has_sizes = isinstance(outputs, PerReplica) and outputs.has_sizes
        if has_sizes or all(isinstance(part, PerReplica) for part in outputs):
            return
        sizes = [size for size in self.sizes if size is not None]
        if rows is not None and (sum(sizes) != rows if sizes else len(self) > 1):
            raise ValueError(
                f"the criterion was given {len(self)} outputs with {sum(sizes) or 'no'} rows, and targets with {rows}, {_ADVICE}"
            )

    def __repr__(self) -> str:
        """Returns rows and device of each entry, and what the first one is."""
        parts = []
        for size, entry in zip(self.sizes, self, strict=True):
            tensor = containers.first_tensor(entry)
            place = "" if tensor is None else f" on {tensor.device}"
            parts.append(f"{'no' if size is None else size} rows{place}")
        first = f"; {containers.describe(self[0])} first" if self else ""
        return f"PerReplica({', '.join(parts)}{first})"

    def _sizes_of_first_tensors(self, dim: Dims) -> tuple[int | None, ...]:
        if isinstance(self, _PlacedOutputs):
            raise TypeError(
                "a PerReplica was made of entries alone, as by another library that applies a function to all tensors, "
                "expected sizes, dimension and order: call gather() before, or leave precision and devices to this library"
            )
        tensors = map(containers.first_tensor, self)
        return tuple(
            tensor.size(dim)
            if tensor is not None and isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim()
            else None
            for tensor in tensors
        )

    def _refuse_outputs_of_one(self, kind: str) -> None:
        """Raises ``ValueError`` for a list that may have several outputs of one replica: equal
        rows, on one device.
        """
        tensors = map(containers.first_tensor, self)
        devices = {tensor.device for tensor in tensors if tensor is not None}
        if len(self) > 1 and None not in self.sizes and len({*self.sizes}) == len(devices) == 1:
            raise ValueError(
                f"the criterion was given a {kind} of {len(self)} outputs with {self.sizes[0]} rows each, all on "
                f"{devices.pop()}: they may be those of {len(self)} replicas, or {len(self)} outputs of one replica, {_ADVICE}"
            )

    def in_order(self, order: Sequence[int] | None) -> "PerReplica":
        """Sets the order of the rows: their positions in the batch.

        ``None`` is the order of the batch. Returns ``self``.
        """
        if order is not None:
            self.__class__ = _PlacedOutputs
        self.order = None if order is None else list(order)
        return self

    @naming_arguments
    def gather(self, device: DeviceLike | None = None, *, ranks: bool = True) -> Any:
        """Concatenates the entries of all ranks, or of this rank, as
        :func:`balanced_parallel.gather` does.
        """
        return gather(self, device, ranks=ranks)

    def map(self, function: Callable[[Any], object], dim: Dims = None) -> "PerReplica":
        """Returns a ``PerReplica`` of ``function(entry)`` for each entry, with the same rows in the
        same order.

        ``dim`` is the dimension of the rows in the results. ``None`` means that of the entries.
        """
        return self._of_same_rows(map(function, self), self.dim if dim is None else dim)

    def unzip(self) -> tuple["PerReplica", ...]:
        """Splits outputs that are tuples or lists into one ``PerReplica`` per part.

        Example:
            >>> outputs = PerReplica([(torch.zeros(3), torch.ones(3)), (torch.zeros(2), torch.ones(2))], [3, 2])
            >>> mean, variance = outputs.unzip()
            >>> variance.gather().shape
            torch.Size([5])
        """
        parts = list(zip(*self, strict=True))
        dims = [dims_at(self[0], self.dim, index) for index in range(len(parts))]
        return tuple(map(self._of_same_rows, parts, dims))

    def zip(self, *others: "PerReplica") -> "PerReplica":
        """Joins these outputs with those of other models for the same rows.

        Each entry is a tuple, which fills the leading arguments of a criterion.

        Raises:
            ValueError: the numbers of rows differ in a replica, or the orders of the rows.

        Example:
            >>> student, teacher = (PerReplica([torch.zeros(3, n), torch.zeros(2, n)]) for n in (10, 4))
            >>> [tuple(part.shape) for part in student.zip(teacher)[1]]
            [(2, 10), (2, 4)]
        """
        parts = [self, *others]
        for part in others:
            check_type("others", part, PerReplica, "the outputs of another model, one per replica")
            if part.sizes != self.sizes or part.order != self.order:
                rows = "in another order" if part.sizes == self.sizes else f"and {list(part.sizes)}"
                raise ValueError(
                    f"outputs have {list(self.sizes)} rows per replica {rows}, expected the same rows: give both models "
                    "the same inputs, devices and split"
                )
        dims = tuple(part.dim for part in parts)
        return PerReplica(zip(*parts, strict=True), self.sizes, dims).in_order(self.order)

    def narrow(self, start: int, rows: int) -> "PerReplica":
        """Returns views of ``rows`` rows from ``start`` on. They stay on their devices."""
        if self.order is not None:
            raise ValueError(
                "outputs of rows that were cut by cost have another order than the batch: call gather() first"
            )
        entries: list[object] = []
        sizes: list[int] = []
        for entry, part in zip(self, consecutive([size or 0 for size in self.sizes]), strict=True):
            common = range(max(start, part.start), min(start + rows, part.stop))
            if common or (rows == 0 and not entries):
                first = common.start - part.start if common else 0
                entries.append(
                    _narrow(entry, range(first, first + len(common)), self.dim, len(part))
                )
                sizes.append(len(common))
        return PerReplica(entries, sizes, self.dim).made_by(self.model_of())

    def on(self, device: torch.device) -> Any:
        """Concatenates the entries of this rank on ``device``, in the order of the batch."""
        if len(self) > 1 or self.order is not None:
            return self.gather(device, ranks=False)
        return containers.map_tensors(lambda tensor: move(tensor, device), self[0])

    def __getitem__(self, key: object) -> Any:
        if isinstance(key, slice):
            return PerReplica(list.__getitem__(self, key), self.sizes[key], self.dim)
        if hasattr(key, "__index__") and not isinstance(key, Tensor):
            return list.__getitem__(self, key)
        if any(isinstance(entry, Tensor) for entry in self):
            _refuse(f"[{key!r}]", TypeError)
        return self._select(key, lambda entry: entry[key])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("sizes", "dim", "order", "has_sizes"):
            raise AttributeError(name)  # copy and pickle ask for them before they are set
        entries = list(self)
        if any(isinstance(entry, Tensor) for entry in entries) or not all(
            hasattr(entry, name) for entry in entries
        ):
            has_entry = any(isinstance(entry, Mapping) and name in entry for entry in entries)
            advice = f"[{name!r}] for the entry, " if has_entry else ""
            _refuse(f".{name}", AttributeError, advice)
        values = self._select(name, lambda entry: getattr(entry, name))
        if any(callable(value) and not isinstance(value, Tensor) for value in values):
            _refuse(f".{name}()", AttributeError)
        return values

    def _select(self, key: object, select: Callable[[Any], object]) -> "PerReplica":
        return self._of_same_rows(map(select, self), dims_at(self[0], self.dim, key) if self else 0)

    def _of_same_rows(self, entries: Iterable[object], dim: Dims) -> "PerReplica":
        outputs = PerReplica(entries, self.sizes, dim).in_order(self.order)
        return outputs.made_by(self.model_of(), self.notes)

    def made_by(self, model: Any, notes: Sequence[Any] | None = None) -> "PerReplica":
        """Sets the model whose forward made the outputs, and its notes. Returns ``self``."""
        if model is not None:
            self.model_of = weakref.ref(model)
            self.notes = notes or self.notes
        return self

    def become(self, others: "PerReplica") -> None:
        """Takes the entries and the notes of another forward of the same rows."""
        self[:] = list(others)
        self.notes = others.notes

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy gets. The model stays here."""
        return {name: vars(self)[name] for name in ("has_sizes", "sizes", "dim", "order")}

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        return _refuse(f"{getattr(function, '__name__', function)}()", TypeError)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor):
            _refuse("==", TypeError)
        return list.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # A list has none.
    __add__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _no_operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __gt__ = __ge__ = __lt__ = __le__ = _no_operator


class _PlacedOutputs(PerReplica):
    """Outputs with their rows in another dimension or order than the batch, which a copy of the
    entries alone would lose.
    """


_ADVICE = (
    "expected a PerReplica, which knows the rows of each: use outputs.map(function) for a comprehension, outputs.unzip() for "
    "zip(*outputs) and for a model that returns a list, outputs.logits for one part"
)


def _refuse(operation: str, error: type[Exception], advice: str = "") -> NoReturn:
    raise error(
        f"{operation} is not defined for a PerReplica, which is the list of the outputs of the replicas and not a tensor: call "
        f"{advice}.gather() for one tensor, .map(function) for each output, or pass it to a DataParallelCriterion"
    )


def _narrow(entry: Nested, part: range, dims: Dims, size: int) -> Nested:
    if len(part) == size:
        return entry
    if part and (refusal := repeated_rows([entry], [size], dims)):
        raise ValueError(refusal)
    return map_rows(
        lambda leaf, dim: leaf if dim is None else take_rows(leaf, part, dim), entry, dims
    )


@naming_arguments
def gather(
    outputs: Sequence[object],
    device: DeviceLike | None = None,
    dim: int | None = None,
    *,
    ranks: bool = True,
) -> Any:
    """Concatenates the outputs of the replicas, in the order of the rows.

    Tensors are concatenated along ``dim``, and 0-dim tensors are stacked. Lists of plain values are
    concatenated, one plain value per replica becomes a list, and ``None`` stays ``None``.
    Containers keep their type. Gradients flow back to all replicas. Outputs of rows that were cut
    by cost come in the order of the batch, padded with zeros to the longest.

    In a process group, the outputs of all ranks are gathered on every rank, in the order of the
    ranks. All ranks must call this function. Sizes may differ. A rank without rows passes an empty
    list.

    Args:
        outputs: one output per replica, as :class:`DataParallelModel` returns them.
        device: device of the result; ``None`` is that of the first output. With ``"cpu"``, no
            accelerator holds all rows.
        dim: dimension of the rows. ``None`` is that of a :class:`PerReplica`, else 0.
        ranks: False leaves out the rows of other ranks, for a metric that sums over ranks itself,
            as those of torchmetrics do.

    Raises:
        TypeError: ``outputs`` is not a list or tuple, or contains an object that cannot be
            concatenated.
        ValueError: there are no outputs, their structures or shapes differ, or the order of their
            rows is unknown.

    Example:
        >>> gather([torch.zeros(3, 10), torch.zeros(2, 10)]).shape
        torch.Size([5, 10])
        >>> outputs = [{"loss": torch.tensor(1.0), "names": ["a", "b"]}, {"loss": torch.tensor(2.0), "names": ["c"]}]
        >>> gather(outputs)
        {'loss': tensor([1., 2.]), 'names': ['a', 'b', 'c']}
    """
    replicas = _as_per_replica(outputs)
    check_type("ranks", ranks, bool, "True or False")
    check_dim(dim)
    dims = replicas.dim if dim is None else dim
    order = replicas.order
    is_local = not ranks or world_size() == 1
    refusal = None
    if order is None and (len(outputs) > 1 or not is_local):
        refusal = repeated_rows(outputs, replicas.sizes, dims)
    if is_local and not outputs:
        refusal = "gather was given no outputs, expected at least one"
    if is_local and refusal:
        raise ValueError(refusal)
    local = [_join_in_order(replicas, device, dims)] if outputs else []
    if is_local:
        return local[0]
    if torch.is_grad_enabled():
        refusal = refusal or explain_unwatched(containers.tensors_in(local))
    on = visible_devices()[0] if device is None else resolve_device(device)
    return _gather_ranks(local, dims, on, refusal, pads=order is not None)


def _as_per_replica(outputs: object) -> PerReplica:
    if not isinstance(outputs, (list, tuple)) or containers.is_named_tuple(outputs):
        raise TypeError(
            f"gather was given {containers.describe(outputs)}, expected a list: gather([output]) for one replica"
        )
    if any(isinstance(output, containers.Leaf) for output in outputs):
        raise TypeError(
            f"gather was given a list of the outputs of {len(outputs)} calls of a model, expected those of one call: "
            "gather each, as in [outputs.gather() for outputs in calls], and join the results with torch.cat"
        )
    return (
        outputs if isinstance(outputs, PerReplica) else PerReplica(outputs, [None] * len(outputs))
    )


def _join_in_order(outputs: PerReplica, device: DeviceLike | None, dims: Dims) -> object:
    with profiled("gather") if is_profiled() else NO_BLOCK:
        if outputs.order is None:
            return join(outputs, device, dims)
        return reorder(join(outputs, device, dims, pads=True), outputs.order, dims, len(outputs))


def repeated_rows(
    outputs: Sequence[object], sizes: Sequence[int | None] | None, dims: Dims
) -> str | None:
    """Returns an error for outputs with several rows for each of the ``sizes`` rows of their
    replica, and None for others.

    Views a and b of rows 0, 1 and 2 on two replicas would be joined as ``a0 a1 b0 b1 a2 b2``, not
    ``a0 a1 a2 b0 b1 b2``.
    """
    if not sizes or not sizes[0]:
        return None
    columns = zip(*(containers.leaves(output, "output") for output in outputs), strict=False)
    for column, dim in zip(columns, leaf_dims(outputs[0], dims), strict=False):
        leaves = [leaf for _, leaf in column]
        if dim is None or not all(
            isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() for leaf in leaves
        ):
            continue
        rows = [leaf.size(dim) for leaf in leaves]
        count = rows[0] // sizes[0]
        if count > 1 and rows == [count * (size or 0) for size in sizes]:
            return (
                f"{column[0][0]} has {rows} rows for {[*sizes]} rows of the batch, {count} for each, in an unknown order: return "
                f"out.chunk({count}) in forward for views of each row, gather out.unflatten({dim}, (-1, {count})) for parts "
                f"of a row beside each other, or give their order, as outputs.in_order(range({sum(rows)}))"
            )
    return None


def join(
    outputs: Sequence[object], device: DeviceLike | None, dims: Dims, *, pads: bool = False
) -> Any:
    """Gathers the outputs of this process, as :func:`gather` does.

    ``pads`` fills up shorter tensors with zeros.
    """
    first = containers.first_tensor(list(outputs))
    target = torch.device("cpu") if first is None else first.device
    if device is not None:
        target = resolve_device(device)
    dims_of_leaves = leaf_dims(outputs[0], dims, "output")

    def join_leaves(place: str, values: list[Any]) -> object:
        dim = next(dims_of_leaves)
        return _join(place, padded(values, dim) if pads else values, target, dim)

    return containers.zip_leaves(join_leaves, list(outputs), "output")


def padded(values: Sequence[object], dim: int | None, value: float = 0.0) -> list[Any]:
    """Pads tensors with a value to the longest, in all dimensions but that of the rows.

    Returns other values as they are.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers_of_dims = {tensor.dim() for tensor in tensors}
    if (
        dim is None
        or len(tensors) < len(values)
        or len(numbers_of_dims) > 1
        or 0 in numbers_of_dims
    ):
        return [*values]
    longest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    return [_pad(tensor, longest, dim, value) for tensor in tensors]


def _pad(tensor: Tensor, sizes: Sequence[int], dim: int, value: float) -> Tensor:
    missing = [size - length for size, length in zip(sizes, tensor.shape, strict=True)]
    missing[dim] = 0
    return (
        F.pad(tensor, [each for size in reversed(missing) for each in (0, size)], value=value)
        if any(missing)
        else tensor
    )


def _join(place: str, values: list[Any], device: torch.device, dim: int | None) -> object:
    if all(isinstance(value, Tensor) for value in values):
        return move(values[0], device) if dim is None else join_tensors(place, values, device, dim)
    if all(value is None for value in values):
        return None
    if all(containers.is_row_list(value) for value in values):
        return type(values[0])(entry for value in values for entry in value)
    if all(containers.is_plain(value) for value in values):
        return values
    if len({*map(type, values)}) == 1 and isinstance(values[0], Iterable):
        # Entries are joined one by one, as in torch's gather. Caches rely on it
        # (huggingface/transformers#36373).
        kind: Any = type(values[0])
        join_leaves = functools.partial(_join, device=device, dim=dim)
        columns = zip(*values, strict=True)
        return kind([containers.zip_leaves(join_leaves, list(column), place) for column in columns])
    raise TypeError(
        f"{place} is {', '.join(dict.fromkeys(map(containers.describe, values)))}: expected tensors, plain values, lists of "
        "plain values, or containers of them, of the same type in every replica; select these before gathering, as in "
        "gather([output.logits for output in outputs])"
    )


def join_tensors(place: str, tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    """Concatenates tensors on ``device`` along ``dim``; 0-dim tensors are stacked."""
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack([move(tensor, device) for tensor in tensors])
    layouts = {layout_of(tensor, dim) for tensor in tensors}
    if len(layouts) > 1:
        shapes = " and ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors))
        raise ValueError(
            f"{place} has shapes {shapes}, expected shapes that differ in dimension {dim} only: select the outputs that have "
            "rows before, as in outputs.map(lambda output: output.logits)"
        )
    if not -tensors[0].dim() <= dim < tensors[0].dim():
        raise ValueError(
            f"{place} has shape {tuple(tensors[0].shape)}, expected rows in dimension {dim}: give the dimension of the rows as "
            "out_dims= to the model, or as dim= to gather"
        )
    return torch.cat([move(tensor, device) for tensor in tensors], dim)


def refuse_word_counts(outputs: object) -> None:
    """Raises ``ValueError`` if outputs come from an embedding with ``scale_grad_by_freq=True``."""
    whole = [*outputs] if isinstance(outputs, PerReplica) else outputs
    nodes = nodes_behind(containers.tensors_in(whole))
    if any(map(divides_by_counts, nodes)):
        raise ValueError(
            "an embedding has scale_grad_by_freq=True, so its gradient is divided by the counts of one forward, expected "
            "False: divide weight.grad by the counts of the whole batch before the update"
        )


def take_rows(leaf: object, part: RowNumbers, dim: int) -> object:
    """Returns some rows of a tensor, or of a list of plain values. A range of a tensor is a view."""
    if not isinstance(leaf, Tensor):
        return (
            type(leaf)(leaf[row] for row in part) if containers.is_row_list(leaf) and leaf else leaf
        )
    if leaf.layout != torch.strided or leaf.is_nested:
        layout = "nested" if leaf.is_nested else str(leaf.layout)
        raise TypeError(
            f"a {layout} tensor cannot be split by rows, expected a dense one: pass .to_dense() of a sparse tensor, the "
            "padded tensor and the lengths of a nested one, Whole(...) if every replica needs all of it, or a list of samples to "
            "TrainStep(cut=ByCost(..., collate=...)), which makes nested tensors on each device"
        )
    if not leaf.dim():
        return leaf
    if isinstance(part, range):
        return leaf.narrow(dim, part.start, len(part))
    index = torch.tensor(part, dtype=torch.long)
    return leaf.index_select(dim, move(index if leaf.is_cpu else pin(index), leaf.device))


def layout_of(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """Returns the shape with -1 in place of the number of rows."""
    return tuple(
        -1 if at in (dim, dim + tensor.dim()) else size for at, size in enumerate(tensor.shape)
    )


def _gather_ranks(
    local: list[object], dims: Dims, device: torch.device, refusal: str | None, *, pads: bool
) -> Any:
    """Gathers the rows of all ranks: one exchange of layouts and plain values, then one all-gather
    per tensor.

    ``local`` has the joined outputs of this rank, if it has any. All ranks raise the ``refusal`` of
    one.
    """
    layouts = containers.map_leaves(_layout_of_leaf, local)
    of_ranks, refusals, pads_of_ranks = zip(*gather_objects((layouts, refusal, pads)), strict=True)
    for message in filter(None, refusals):
        raise ValueError(message)
    first = next((layouts for layouts in of_ranks if layouts), None)
    if first is None:
        raise ValueError("gather was given no outputs on any rank, expected at least one")
    join_leaves = functools.partial(
        _join_ranks, dims=leaf_dims(first[0], dims), pads=any(pads_of_ranks)
    )
    without_rows = map_rows(functools.partial(_without_rows, device=device), first[0], dims)
    layout_without_rows = containers.map_leaves(_layout_of_leaf, without_rows)
    local_leaf = local[0] if local else without_rows
    leaves = [layouts[0] if layouts else layout_without_rows for layouts in of_ranks]
    return containers.zip_leaves(join_leaves, [*leaves, local_leaf], "output")


def _join_ranks(place: str, column: list[Any], dims: Iterator[int | None], *, pads: bool) -> object:
    """Joins a leaf of all ranks, from the layouts of all and that of this rank."""
    dim = next(dims)
    if dim is not None and isinstance(column[0], Tensor) and column[0].dim() < 2:
        dim = 0  # numbers of the replicas are stacked
    *layouts, local_leaf = padded(column, dim) if pads else column
    whole = _join(place, layouts, torch.device("meta"), dim)  # All ranks raise the same error.
    if not isinstance(whole, Tensor):
        return whole
    if dim is None:
        return local_leaf
    sizes = [layout.size(dim) for layout in layouts]
    # Each rank computes a loss of all rows.
    return mark_loss(gather_rows(local_leaf.to(whole.dtype), sizes, dim))


def _layout_of_leaf(leaf: object) -> object:
    """Returns what ranks exchange of a leaf before its rows: a tensor without memory, or a list of
    plain values.
    """
    if isinstance(leaf, Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    if leaf is None or containers.is_row_list(leaf):
        return leaf
    raise TypeError(
        f"{containers.describe(leaf)} cannot be gathered over ranks: select tensors first, as in outputs.logits.gather()"
    )


def _without_rows(leaf: object, dim: int | None, device: torch.device) -> object:
    """Returns a leaf of this layout without rows."""
    if not isinstance(leaf, Tensor):
        return None if leaf is None else type(leaf)()
    if dim is None:
        raise ValueError(
            f"{containers.describe(leaf)} is the same in all replicas, but a rank without outputs does not have it: leave it out"
        )
    return torch.empty_like(leaf, device=device).narrow(dim if leaf.dim() > 1 else 0, 0, 0)


def reorder(gathered: Nested, order: Sequence[int], dims: Dims, replicas: int) -> Nested:
    """Returns gathered outputs in the order of the batch.

    Values with one entry for each of the ``replicas`` stay.
    """
    positions = sorted(range(len(order)), key=order.__getitem__)

    def put(leaf: Any, dim: int | None) -> object:
        if leaf is None or dim is None:
            return leaf
        is_flat = not isinstance(leaf, Tensor) or leaf.dim() == 1
        rows = leaf.size(dim) if isinstance(leaf, Tensor) else len(leaf)
        if is_flat and rows == replicas != len(order):
            return leaf
        if rows != len(order):
            raise ValueError(
                f"an output has {rows} rows for {len(order)} rows of the batch, expected as many for a cut by cost"
            )
        return take_rows(leaf, positions, dim)

    return map_rows(put, gathered, dims)


def detach_outputs(outputs: PerReplica, order: Sequence[int] | None) -> PerReplica:
    """Returns the outputs of the replicas, detached from the autograd graph.

    ``order`` is that of their rows.
    """
    return outputs.map(functools.partial(containers.map_tensors, Tensor.detach)).in_order(order)


def join_outputs(micro_batches: Sequence[PerReplica], dims: Dims) -> PerReplica:
    """Joins the outputs of all micro-batches as the outputs of one batch, in the order of the rows."""
    entries = [output for outputs in micro_batches for output in outputs]
    joined = PerReplica(
        entries, [size for outputs in micro_batches for size in outputs.sizes], dims
    )
    orders = [outputs.order for outputs in micro_batches]
    return joined.in_order(
        None if None in orders else [row for order in orders for row in order or ()]
    )
