"""``PerReplica``: the outputs of the replicas of one forward, each on its own device, and :func:`gather`, which joins them.

torch's ``gather`` supports no dataclasses, numbers or strings, and ``all_gather`` needs equal sizes. Here the ranks first
exchange the layouts of their outputs. So sizes may differ, and a mismatch raises the same error on all ranks instead of a hang.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.collectives import by_value, explain_unwatched, gather_objects, gather_rows, world_size
from ..runtime.devices import DeviceLike, move, resolve_device, visible_devices
from ..runtime.values import check_type
from . import containers
from .containers import Dims, Nested, check_dim, check_dims, dims_at, leaf_dims
from .plan import consecutive


def _operator(symbol: str) -> Callable[..., NoReturn]:
    """Returns a method for an operator that a list does not have, with an error that explains it."""
    return lambda self, *others: _refuse(symbol, TypeError)


class PerReplica(list[Any], containers.Leaf):
    """A list of outputs, one per replica, as :class:`DataParallelModel` returns it.

    ``len``, ``for``, ``zip`` and indexing with a number work as for any list. A key or an attribute applies to each entry:
    ``outputs["logits"]`` and ``outputs.logits`` return a ``PerReplica`` of the logits. Operators and functions of tensors raise
    an error. A :class:`DataParallelCriterion` accepts it, and another :class:`DataParallelModel`, whose replicas use rows that
    are on the right device in place.

    Args:
        entries: one entry per replica that had rows.
        sizes: number of rows of each entry; None if the batch had no rows. Without this argument, as where another library
            applies a function to all tensors, they are those of the first tensor of each entry.
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

    def __init__(self, entries: Iterable[object], sizes: Sequence[int | None] | None = None, dim: Dims = 0) -> None:
        if not (isinstance(entries, Iterable) and isinstance(sizes, Iterable)):  # an output is made in every forward
            check_type("entries", entries, Iterable, "one entry per replica")
            check_type("sizes", [] if sizes is None else sizes, Iterable, "the number of rows of each entry")
        if type(dim) is not int:
            check_dims(dim, "dim")
        super().__init__(entries)
        self.has_sizes = sizes is not None
        if sizes is None:
            if isinstance(self, _PlacedOutputs):
                raise TypeError(
                    "a PerReplica was made of entries alone, perhaps by another library that applies a function to "
                    "all tensors. These outputs have their rows in another dimension or order than the batch, which would be "
                    "lost: call gather() before, or leave precision and devices to this library"
                )
            tensors = [containers.first_tensor(entry) for entry in self]
            sizes = [None if tensor is None or not tensor.dim() else tensor.size(0) for tensor in tensors]
        self.sizes = tuple(sizes)
        if len(self.sizes) != len(self):
            raise ValueError(f"{len(self)} entries and {len(self.sizes)} sizes, expected the rows of each entry")
        if self and not isinstance(dim, int):
            list(leaf_dims(list.__getitem__(self, 0), dim, 0, "the entry, or the result of map(function, dim=...),"))  # a check
        self.dim = dim
        self.order: list[int] | None = None
        if dim != 0:
            self.__class__ = _PlacedOutputs

    def in_order(self, order: Sequence[int] | None) -> "PerReplica":
        """Sets the order of the rows: their positions in the batch. ``None`` is the order of the batch. Returns ``self``."""
        if order is not None:
            self.__class__ = _PlacedOutputs
        self.order = None if order is None else list(order)
        return self

    def gather(self, device: DeviceLike | None = None, *, ranks: bool = True) -> Any:
        """Concatenates the entries of all ranks, or of this rank, as :func:`balanced_parallel.gather` does."""
        return gather(self, device, ranks=ranks)

    def map(self, function: Callable[[Any], object], dim: Dims = None) -> "PerReplica":
        """Returns a ``PerReplica`` of ``function(entry)`` for each entry, with the same rows in the same order.

        ``dim`` is the dimension of the rows in the results. ``None`` means that of the entries.
        """
        return PerReplica(map(function, self), self.sizes, self.dim if dim is None else dim).in_order(self.order)

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
        return tuple(PerReplica(part, self.sizes, dim).in_order(self.order) for part, dim in zip(parts, dims, strict=True))

    def narrow(self, start: int, rows: int) -> "PerReplica":
        """Returns views of ``rows`` rows from ``start`` on. They stay on their devices."""
        if self.order is not None:
            raise ValueError("outputs of rows that were cut by cost have another order than the batch: call gather() first")
        entries: list[object] = []
        sizes: list[int] = []
        for entry, part in zip(self, consecutive([size or 0 for size in self.sizes]), strict=True):
            first, count = max(start, part.start), max(min(start + rows, part.stop) - max(start, part.start), 0)
            if count or (rows == 0 and not entries):
                entries.append(_narrow(entry, first - part.start if count else 0, count, self.dim, len(part)))
                sizes.append(count)
        return PerReplica(entries, sizes, self.dim)

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
        if any(isinstance(entry, Tensor) for entry in entries) or not all(hasattr(entry, name) for entry in entries):
            _refuse(f".{name}", AttributeError)
        values = self._select(name, lambda entry: getattr(entry, name))
        if any(callable(value) and not isinstance(value, Tensor) for value in values):
            _refuse(f".{name}()", AttributeError)
        return values

    def _select(self, key: object, select: Callable[[Any], object]) -> "PerReplica":
        return PerReplica(map(select, self), self.sizes, dims_at(self[0], self.dim, key) if self else 0).in_order(self.order)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if function is torch.autograd.grad:  # accepts a list of outputs
            outputs = [entry for output in args[0] for entry in (output if isinstance(output, cls) else [output])]
            return function(outputs, *args[1:], **kwargs or {})
        return _refuse(f"{getattr(function, '__name__', function)}()", TypeError)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor):
            _refuse("==", TypeError)
        return list.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # like list
    __add__ = _operator("+")
    __mul__ = __rmul__ = _operator("*")
    __sub__ = __rsub__ = _operator("-")
    __truediv__ = __rtruediv__ = _operator("/")
    __matmul__ = __rmatmul__ = _operator("@")
    __pow__ = _operator("**")
    __neg__ = _operator("-")
    __gt__, __ge__, __lt__, __le__ = _operator(">"), _operator(">="), _operator("<"), _operator("<=")


class _PlacedOutputs(PerReplica):
    """Outputs with their rows in another dimension or order than the batch, which a copy of the entries alone would lose."""


def _refuse(operation: str, error: type[Exception]) -> NoReturn:
    raise error(
        f"{operation} is not defined for a PerReplica, which is the list of the outputs of the replicas and not a tensor: call "
        ".gather() for one tensor, .map(function) for each output, or pass it to a DataParallelCriterion"
    )


def _narrow(entry: Nested, start: int, rows: int, dims: Dims, size: int) -> Nested:
    if rows == size:
        return entry
    if rows and (refusal := repeated_rows([entry], [size], dims)):
        raise ValueError(refusal)
    dims_of_leaves = leaf_dims(entry, dims, 0, "output")

    def narrow(leaf: object) -> object:
        dim = next(dims_of_leaves)
        if dim is None:
            return leaf
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.narrow(dim, start, rows)
        return leaf[start : start + rows] if containers.is_row_list(leaf) else leaf

    return containers.map_leaves(narrow, entry)


def gather(outputs: Sequence[object], device: DeviceLike | None = None, dim: int | None = None, *, ranks: bool = True) -> Any:
    """Concatenates the outputs of the replicas, in the order of the rows.

    Tensors are concatenated along ``dim``, and 0-dim tensors are stacked. Lists of plain values are concatenated, one plain value
    per replica becomes a list, and ``None`` stays ``None``. Containers keep their type. Gradients flow back to all replicas.
    Outputs of rows that were cut by cost come in the order of the batch, padded with zeros to the longest.

    In a process group, the outputs of all ranks are gathered on every rank, in the order of the ranks. All ranks must call this
    function. Sizes may differ. A rank without rows passes an empty list.

    Args:
        outputs: one output per replica, as :class:`DataParallelModel` returns them.
        device: device of the result; ``None`` is that of the first output. With ``"cpu"``, no accelerator holds all rows.
        dim: dimension of the rows. ``None`` is that of a :class:`PerReplica`, else 0.
        ranks: False leaves out the rows of other ranks, for a metric that sums over ranks itself, as those of torchmetrics do.

    Raises:
        TypeError: ``outputs`` is not a list or tuple, or contains an object that cannot be concatenated.
        ValueError: there are no outputs, their structures or shapes differ, or the order of their rows is unknown.

    Example:
        >>> gather([torch.zeros(3, 10), torch.zeros(2, 10)]).shape
        torch.Size([5, 10])
        >>> outputs = [{"loss": torch.tensor(1.0), "names": ["a", "b"]}, {"loss": torch.tensor(2.0), "names": ["c"]}]
        >>> gather(outputs)
        {'loss': tensor([1., 2.]), 'names': ['a', 'b', 'c']}
    """
    if not isinstance(outputs, (list, tuple)) or containers.is_named_tuple(outputs):
        raise TypeError(f"gather was given {containers.describe(outputs)}, expected a list: gather([output]) for one replica")
    if any(isinstance(output, containers.Leaf) for output in outputs):
        raise TypeError(
            f"gather was given a list of the outputs of {len(outputs)} calls of a model, expected those of one call: gather "
            "each, as in [outputs.gather() for outputs in calls], and join the results with torch.cat"
        )
    check_type("ranks", ranks, bool, "True or False")
    is_local = not ranks or world_size() == 1
    if not outputs and is_local:
        raise ValueError("gather was given no outputs, expected at least one")
    check_dim(dim)
    dims = getattr(outputs, "dim", 0) if dim is None else dim
    order: list[int] | None = getattr(outputs, "order", None)
    sizes = getattr(outputs, "sizes", None)
    refusal = repeated_rows(outputs, sizes, dims) if order is None and (len(outputs) > 1 or not is_local) else None
    if refusal and is_local:
        raise ValueError(refusal)
    local = [join(outputs, device, dims, pads=order is not None)] if outputs else []
    if order is not None:
        local = [reorder(output, order, dims, len(outputs)) for output in local]
    if is_local:
        return local[0]
    if torch.is_grad_enabled():
        refusal = refusal or explain_unwatched(containers.tensors_in(local))
    on = visible_devices()[0] if device is None else resolve_device(device)
    return _gather_ranks(local, dims, on, refusal, pads=order is not None)


def repeated_rows(outputs: Sequence[object], sizes: Sequence[int | None] | None, dims: Dims) -> str | None:
    """Returns an error for outputs with several rows for each of the ``sizes`` rows of their replica, and None for others.

    Views a and b of rows 0, 1 and 2 on two replicas would be joined as ``a0 a1 b0 b1 a2 b2``, not ``a0 a1 a2 b0 b1 b2``.
    """
    if not sizes or not sizes[0]:
        return None
    columns = zip(*(containers.leaves(output, "output") for output in outputs), strict=False)
    for column, dim in zip(columns, leaf_dims(outputs[0], dims, 0), strict=False):
        leaves = [leaf for _, leaf in column]
        if dim is None or not all(isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() for leaf in leaves):
            continue
        rows = [leaf.size(dim) for leaf in leaves]
        count = rows[0] // sizes[0]
        if count > 1 and rows == [count * (size or 0) for size in sizes]:
            return (
                f"{column[0][0]} has {rows} rows for {[*sizes]} rows of the batch, {count} for each, in an unknown order. For "
                f"{count} views of each row, return out.chunk({count}) in forward, a tuple with one output each. For {count} "
                f"parts of a row beside each other, gather out.unflatten({dim}, (-1, {count})), or give their order: "
                f"outputs.in_order(range({sum(rows)}))"
            )
    return None


def join(outputs: Sequence[object], device: DeviceLike | None, dims: Dims, *, pads: bool = False) -> Any:
    """Gathers the outputs of this process only, as :func:`gather` does. With ``pads``, shorter tensors are padded with zeros."""
    first = containers.first_tensor(list(outputs))
    target = resolve_device(device) if device is not None else first.device if first is not None else torch.device("cpu")
    dims_of_leaves = leaf_dims(outputs[0], dims, 0, "output")

    def join_leaves(place: str, values: list[Any]) -> object:
        dim = next(dims_of_leaves)
        shapes = [value.shape for value in values if pads and isinstance(value, Tensor)]
        if dim is not None and len(shapes) == len(values) and len(set(map(len, shapes))) == 1:
            longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
            values = [pad_to(value, longest, dim) for value in values]
        return _join(place, values, target, dim)

    return containers.zip_leaves(join_leaves, list(outputs), "output")


def _join(place: str, values: list[Any], device: torch.device, dim: int | None) -> object:
    if all(isinstance(value, Tensor) for value in values):
        return move(values[0], device) if dim is None else join_tensors(place, values, device, dim)
    if all(value is None for value in values):
        return None
    if all(containers.is_row_list(value) for value in values):
        return type(values[0])(entry for value in values for entry in value)
    if all(containers.is_plain(value) for value in values):
        return values
    if len({type(value) for value in values}) == 1 and isinstance(values[0], Iterable):
        # Entries are joined one by one, as in torch's gather. Caches rely on it (huggingface/transformers#36373).
        kind, columns = cast(Any, type(values[0])), zip(*values, strict=True)
        join_leaves = functools.partial(containers.zip_leaves, lambda at, leaves: _join(at, leaves, device, dim), place=place)
        return kind([join_leaves(list(column)) for column in columns])
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


def layout_of(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """Returns the shape with -1 in place of the number of rows."""
    return tuple(-1 if at in (dim, dim + tensor.dim()) else size for at, size in enumerate(tensor.shape))


@dataclasses.dataclass
class _Header(containers.Leaf):
    """Description of a leaf of one rank's outputs, which the ranks exchange before the rows."""

    kind: str | torch.dtype  # A tensor's kind is its dtype.
    dim: int | None  # The dimension of the rows is None if the leaf is the same in all replicas.
    layout: tuple[int, ...]  # The shape has -1 in place of the number of rows.
    rows: Any  # The number of rows of a tensor, or the list itself. Ranks may differ in it.

    @classmethod
    def of(cls, leaf: object, dim: int | None) -> "_Header":
        """Describes a leaf."""
        if isinstance(leaf, Tensor):
            dim = dim if leaf.dim() > 1 or dim is None else 0
            rows = 0 if dim is None else leaf.size(dim)
            return cls(leaf.dtype, dim, layout_of(leaf, leaf.dim() if dim is None else dim), rows)
        if leaf is None or containers.is_row_list(leaf):
            return cls(type(leaf).__name__, dim, (), leaf)
        raise TypeError(
            f"{containers.describe(leaf)} cannot be gathered over ranks: select tensors first, as in outputs.logits.gather()"
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.layout}"

    def make_empty(self, device: torch.device) -> object:
        """Returns a leaf of this layout without rows."""
        if not isinstance(self.kind, torch.dtype):
            return None if self.rows is None else type(self.rows)()
        if self.dim is None:
            raise ValueError(f"{self} is the same in all replicas, but a rank without outputs does not have it: leave it out")
        return torch.empty([max(size, 0) for size in self.layout], dtype=self.kind, device=device)


def _gather_ranks(local: list[object], dims: Dims, device: torch.device, refusal: str | None, *, pads: bool) -> Any:
    """Gathers the rows of all ranks: one exchange of layouts and plain values, then one all-gather per tensor.

    ``local`` has the joined outputs of this rank, if it has any. All ranks raise the ``refusal`` of one.
    """

    def make_headers(output: object) -> object:
        dims_of_leaves = leaf_dims(output, dims, 0)
        return containers.map_leaves(lambda leaf: _Header.of(leaf, next(dims_of_leaves)), output)

    all_headers, refusals, all_pads = zip(*gather_objects(([*map(make_headers, local)], refusal, pads)), strict=True)
    for message in filter(None, refusals):
        raise ValueError(message)
    first = next((headers[0] for headers in all_headers if headers), None)
    if first is None:
        raise ValueError("gather was given no outputs on any rank, expected at least one")
    columns: list[list[_Header]] = []  # Each leaf has the headers of all ranks.

    def compare(place: str, column: list[_Header]) -> None:
        if any(all_pads) and len({len(header.layout) for header in column}) == 1:
            longest = tuple(map(max, zip(*(header.layout for header in column), strict=True)))
            column = [dataclasses.replace(header, layout=longest) for header in column]
        if len({*map(str, column)}) > 1:
            layouts = by_value([*map(str, column)])
            raise ValueError(f"the outputs of the ranks differ: {place} is {layouts}; expected the same layout")
        columns.append(column)

    without_rows = functools.partial(containers.map_leaves, lambda header: header.make_empty(device), first)
    headers = [headers[0] if headers else make_headers(without_rows()) for headers in all_headers]
    containers.zip_leaves(compare, headers, "output")
    in_order = iter(columns)

    def join_ranks(leaf: object) -> object:
        column = next(in_order)
        if isinstance(leaf, Tensor) and (dim := column[0].dim) is not None:
            return gather_rows(pad_to(leaf, column[0].layout, dim), [header.rows for header in column], dim)
        kind: Any = type(leaf)
        return kind(entry for header in column for entry in header.rows) if containers.is_row_list(leaf) else leaf

    return containers.map_leaves(join_ranks, local[0] if local else without_rows())


def pad_to(tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """Returns a tensor padded with zeros to ``sizes``, in all dimensions but that of the rows."""
    rows = dim % max(tensor.dim(), 1)
    missing = [0 if at == rows else size - length for at, (size, length) in enumerate(zip(sizes, tensor.shape, strict=True))]
    return F.pad(tensor, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else tensor


def reorder(gathered: Nested, order: Sequence[int], dims: Dims, replicas: int) -> Nested:
    """Returns gathered outputs in the order of the batch. Values with one entry for each of the ``replicas`` stay."""
    positions = sorted(range(len(order)), key=order.__getitem__)
    dims_of_leaves = leaf_dims(gathered, dims, 0, "output")

    def put(leaf: object) -> object:
        dim = next(dims_of_leaves)
        if leaf is None or dim is None:
            return leaf
        if containers.is_row_list(leaf):
            kind: Any = type(leaf)
            return kind(leaf[position] for position in positions) if len(leaf) == len(order) else leaf
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{containers.describe(leaf)} cannot be put in order: select tensors, as in outputs.logits.gather()")
        if leaf.dim() == 1 and len(leaf) == replicas != len(order):
            return leaf
        if leaf.size(dim) != len(order):
            raise ValueError(
                f"an output has {leaf.size(dim)} rows for {len(order)} rows of the batch, expected as many: they are not in the "
                "order of the batch, since rows were cut by cost"
            )
        index = torch.tensor(positions, dtype=torch.long)
        return leaf.index_select(dim, move(index if leaf.is_cpu else index.pin_memory(), leaf.device))

    return containers.map_leaves(put, gathered)


def detach_outputs(outputs: PerReplica, order: Sequence[int] | None) -> PerReplica:
    """Returns the outputs of the replicas, detached from the autograd graph. ``order`` is that of their rows."""
    return outputs.map(functools.partial(containers.map_tensors, Tensor.detach)).in_order(order)


def join_outputs(micro_batches: Sequence[PerReplica], dims: Dims) -> PerReplica:
    """Joins the outputs of all micro-batches as the outputs of one batch, in the order of the rows."""
    entries = [output for outputs in micro_batches for output in outputs]
    joined = PerReplica(entries, [size for outputs in micro_batches for size in outputs.sizes], dims)
    orders = [outputs.order for outputs in micro_batches]
    return joined.in_order(None if None in orders else [row for order in orders for row in order or ()])
