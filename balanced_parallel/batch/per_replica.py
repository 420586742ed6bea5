"""``PerReplica``: one value per replica, each on its own device, with the number of rows of each."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

import torch

from ..runtime.argument_checks import check_type
from ..runtime.devices import DeviceLike, move
from . import nested, provenance
from .dims import Dims, check_dims, dims_at, leaf_dims
from .gathering import gather, join, repeated_rows

__all__: list[str] = []


def _operator(symbol: str) -> Any:
    """Returns a method for an operator that a list does not have, with an error that explains it."""

    def refuse(self: Any, *others: Any) -> NoReturn:
        _refuse(symbol, TypeError)

    return refuse


class PerReplica(list[Any], nested.Leaf):
    """A list of outputs, one per replica, as :class:`DataParallelModel` returns it.

    ``len``, ``for``, ``zip`` and indexing with a number work as for any list. A key or an attribute applies to each entry:
    ``outputs["logits"]`` and ``outputs.logits`` return a ``PerReplica`` of the logits. Operators and functions of tensors raise
    an error. :class:`DataParallelCriterion` accepts a ``PerReplica``. So does another :class:`DataParallelModel`, without moving
    rows that are on the right device already.

    Args:
        entries: one entry per replica that had rows.
        sizes: number of rows of each entry; None if the batch had no rows.
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

    def __init__(self, entries: Iterable[Any], sizes: Sequence[int | None], dim: Dims = 0) -> None:
        check_type("entries", entries, Iterable, "one entry per replica")
        check_type("sizes", sizes, Iterable, "the number of rows of each entry")
        check_dims(dim, "dim")
        super().__init__(entries)
        self.sizes = tuple(sizes)
        if len(self.sizes) != len(self):
            raise ValueError(f"{len(self)} entries and {len(self.sizes)} sizes, expected the rows of each entry")
        self.dim = dim
        self.order: list[int] | None = None

    @classmethod
    def of_forward(cls, entries: Iterable[Any], sizes: Sequence[int | None], dim: Dims) -> "PerReplica":
        """Creates the outputs of a forward, and records their origin. Lists that a user makes of them can then be recognized."""
        outputs = cls(entries, sizes, dim)
        provenance.record(outputs, outputs.sizes, dim)
        return outputs

    def in_order(self, order: Sequence[int] | None) -> Self:
        """Sets the order of the rows: their positions in the batch. ``None`` is the order of the batch. Returns ``self``."""
        self.order = None if order is None else list(order)
        return self

    def gather(self, device: DeviceLike | None = None) -> Any:
        """Concatenates the entries of all ranks, as :func:`balanced_parallel.gather` does."""
        return gather(self, device)

    def map(self, function: Callable[[Any], Any], dim: Dims = None) -> "PerReplica":
        """Returns a ``PerReplica`` of ``function(entry)`` for each entry, with the same rows.

        Args:
            function: must keep the order of the rows.
            dim: dimension of the rows in the results; ``None`` means that of the entries.

        Raises:
            ValueError: if ``dim`` is needed: entries have several dimensions, and the results another structure.
        """
        mapped = PerReplica(map(function, self), self.sizes, self.dim if dim is None else dim).in_order(self.order)
        if not isinstance(mapped.dim, int):
            for _ in leaf_dims(mapped[0], mapped.dim, 0, "the result of map(function, dim=...) for an output"):
                pass
        return mapped

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
        entries: list[Any] = []
        sizes: list[int] = []
        ends = list(itertools.accumulate(size or 0 for size in self.sizes))
        for entry, size, end in zip(self, self.sizes, ends, strict=True):
            first, last = max(start, end - (size or 0)), min(start + rows, end)
            if first < last or (rows == 0 and not entries):
                offset = min(max(first - end + (size or 0), 0), size or 0)
                entries.append(_narrow(entry, offset, max(last - first, 0), self.dim, size or 0))
                sizes.append(max(last - first, 0))
        return PerReplica(entries, sizes, self.dim)

    def on(self, device: torch.device) -> Any:
        """Concatenates the entries of this rank on ``device``, in their order: not that of the batch if it was cut by cost."""
        if len(self) > 1:
            if self.order is None and (refusal := repeated_rows(self, self.sizes, self.dim)):
                raise ValueError(refusal)
            return join(self, device, self.dim)
        return nested.map_leaves(lambda leaf: move(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, self[0])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return PerReplica(list.__getitem__(self, key), self.sizes[key], self.dim)
        if hasattr(key, "__index__") and not isinstance(key, torch.Tensor):
            return list.__getitem__(self, key)
        if any(isinstance(entry, torch.Tensor) for entry in self):
            _refuse(f"[{key!r}]", TypeError)
        return self._select(key, lambda entry: entry[key])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("sizes", "dim", "order"):  # copy and pickle ask for them before they are set
            raise AttributeError(name)
        entries = list(self)
        if any(isinstance(entry, torch.Tensor) for entry in entries) or not all(hasattr(entry, name) for entry in entries):
            _refuse(f".{name}", AttributeError)
        values = self._select(name, lambda entry: getattr(entry, name))
        if any(callable(value) and not isinstance(value, torch.Tensor) for value in values):
            _refuse(f".{name}()", AttributeError)
        return values

    def _select(self, key: Any, select: Callable[[Any], Any]) -> "PerReplica":
        return PerReplica(map(select, self), self.sizes, dims_at(self[0], self.dim, key) if self else 0).in_order(self.order)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.autograd.grad:  # accepts a list of outputs
            outputs = [entry for output in args[0] for entry in (output if isinstance(output, cls) else [output])]
            return function(outputs, *args[1:], **kwargs or {})
        return _refuse(f"{getattr(function, '__name__', function)}()", TypeError)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.Tensor):
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


def _refuse(operation: str, error: type[Exception]) -> NoReturn:
    raise error(
        f"{operation} is not defined for a PerReplica, which is the list of the outputs of the replicas and not a tensor: call "
        ".gather() for one tensor, .map(function) for each output, or pass it to a DataParallelCriterion"
    )


def _narrow(entry: Any, start: int, rows: int, dims: Dims, size: int) -> Any:
    if rows == size:
        return entry
    if rows and (refusal := repeated_rows([entry], [size], dims)):
        raise ValueError(refusal)
    dims_of_leaves = leaf_dims(entry, dims, 0, "output")

    def narrow(leaf: Any) -> Any:
        dim = next(dims_of_leaves)
        if dim is None:
            return leaf
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.narrow(dim, start, rows)
        return leaf[start : start + rows] if nested.is_row_list(leaf) else leaf

    return nested.map_leaves(narrow, entry)
