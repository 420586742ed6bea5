"""``PerReplica``: one value per replica of a batch, each on its own device, with the rows that each belongs to."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch

from ..runtime.devices import DeviceLike, move
from . import nested, provenance
from .dims import Dims, dims_at, leaf_dims
from .gathering import gather, join

__all__: list[str] = []


def _operator(symbol: str) -> Any:
    def refuse(self: Any, *others: Any) -> NoReturn:
        _refuse(symbol, TypeError)

    return refuse


class PerReplica(list[Any], nested.Leaf):
    """A list with one entry per replica, as :class:`DataParallelModel` returns it.

    It is an ordinary list to ``len``, ``for``, ``zip`` and indexing with a number. A key or an attribute reaches into every
    entry: ``outputs["logits"]`` and ``outputs.logits`` are a ``PerReplica`` of the replicas' logits. It is not a tensor: what a
    tensor would do raises an error that says so. :class:`DataParallelCriterion` takes it, and so does a
    :class:`DataParallelModel`, whose replicas then find their rows where they are.

    Args:
        entries: one per replica that had rows.
        sizes: how many rows each belongs to; None where the batch had no rows.
        dim: the dimension of the rows in the entries, or one for each part of them.

    Example:
        >>> outputs = PerReplica([torch.zeros(3, 10), torch.zeros(2, 10)], [3, 2])
        >>> outputs.map(lambda output: output.argmax(1)).gather().shape
        torch.Size([5])
    """

    def __init__(self, entries: Iterable[Any], sizes: Sequence[int | None], dim: Dims = 0) -> None:
        super().__init__(entries)
        self.sizes = tuple(sizes)
        self.dim = dim

    @classmethod
    def of_forward(cls, entries: Iterable[Any], sizes: Sequence[int | None], dim: Dims) -> "PerReplica":
        """The outputs of a forward, which lists that are made of them by hand are traced back to."""
        outputs = cls(entries, sizes, dim)
        provenance.note(outputs, outputs.sizes, dim)
        return outputs

    def gather(self, device: DeviceLike | None = None) -> Any:
        """All rows together, as :func:`balanced_parallel.gather` returns them."""
        return gather(self, device)

    def map(self, function: Callable[[Any], Any], dim: Dims = None) -> "PerReplica":
        """``function(entry)`` for each entry, as a ``PerReplica`` with the same rows.

        Args:
            function: leaves the rows in their order.
            dim: where the rows are in what it returns; ``None`` for where they were.

        Raises:
            ValueError: ``dim`` is to be said: that of the entries is not one number, and does not fit what ``function`` returns.
        """
        mapped = PerReplica(map(function, self), self.sizes, self.dim if dim is None else dim)
        if not isinstance(mapped.dim, int):
            for _ in leaf_dims(mapped[0], mapped.dim, 0, "what map(function, dim=...) makes of an output"):
                pass
        return mapped

    def unzip(self) -> tuple["PerReplica", ...]:
        """The parts of outputs that are tuples or lists, each as a ``PerReplica``.

        Example:
            >>> outputs = PerReplica([(torch.zeros(3), torch.ones(3)), (torch.zeros(2), torch.ones(2))], [3, 2])
            >>> mean, variance = outputs.unzip()
            >>> variance.gather().shape
            torch.Size([5])
        """
        parts = zip(*self, strict=True)
        return tuple(PerReplica(part, self.sizes, dims_at(self[0], self.dim, index)) for index, part in enumerate(parts))

    def narrow(self, start: int, rows: int) -> "PerReplica":
        """The rows from ``start`` on, on the devices where they are. Views: nothing is copied."""
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
        """All rows together on ``device``. Only rows that are elsewhere move."""
        if len(self) > 1:
            return join(self, device, self.dim)
        return nested.map_leaves(lambda leaf: move(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, self[0])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return PerReplica(list.__getitem__(self, key), self.sizes[key], self.dim)
        if isinstance(key, SupportsIndex) and not isinstance(key, torch.Tensor):
            return list.__getitem__(self, key)
        if any(isinstance(entry, torch.Tensor) for entry in self):
            _refuse(f"[{key!r}]", TypeError)
        return self._reach(key, lambda entry: entry[key])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("sizes", "dim"):  # asked by copy and pickle before they are there
            raise AttributeError(name)
        entries = list(self)
        if any(isinstance(entry, torch.Tensor) for entry in entries) or not all(hasattr(entry, name) for entry in entries):
            _refuse(f".{name}", AttributeError)
        found = self._reach(name, lambda entry: getattr(entry, name))
        if any(callable(value) and not isinstance(value, torch.Tensor) for value in found):
            _refuse(f".{name}()", AttributeError)
        return found

    def _reach(self, key: Any, pick: Callable[[Any], Any]) -> "PerReplica":
        return PerReplica(map(pick, self), self.sizes, dims_at(self[0], self.dim, key) if self else 0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.autograd.grad:  # takes a list of outputs
            outputs = [entry for output in args[0] for entry in (output if isinstance(output, cls) else [output])]
            return function(outputs, *args[1:], **kwargs or {})
        return _refuse(f"{getattr(function, '__name__', function)}()", TypeError)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.Tensor):
            _refuse("==", TypeError)
        return list.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as lists
    __add__ = _operator("+")
    __mul__ = __rmul__ = _operator("*")
    __sub__ = __rsub__ = _operator("-")
    __truediv__ = __rtruediv__ = _operator("/")
    __matmul__ = __rmatmul__ = _operator("@")
    __pow__ = _operator("**")
    __neg__ = _operator("-")


def _refuse(what: str, error: type[Exception]) -> NoReturn:
    raise error(
        f"{what} was asked of a PerReplica, which is the list of the replicas' outputs and not a tensor: call .gather() for one "
        "tensor, .map(function) for each output, or give it to a DataParallelCriterion"
    )


def _narrow(entry: Any, start: int, rows: int, dims: Dims, size: int) -> Any:
    if rows == size:
        return entry
    of_leaf = leaf_dims(entry, dims, 0, "output")

    def narrow(leaf: Any) -> Any:
        dim = next(of_leaf)
        if dim is None:
            return leaf
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.narrow(dim, start, rows)
        return leaf[start : start + rows] if nested.is_row_list(leaf) else leaf

    return nested.map_leaves(narrow, entry)
