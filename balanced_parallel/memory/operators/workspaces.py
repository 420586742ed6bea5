"""What an operator allocates for itself on the CPU and frees before it returns: measured, by running it on random numbers.

oneDNN's convolutions and products in half precision do so, by an algorithm that depends on shapes, threads and the processor;
others copy what is not contiguous, or not of the type that they compute in.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.allocator_profile import AllocatorProfile

__all__: list[str] = []

LARGEST = 2**28  # bytes of an operator's tensors: beside more than that, its scratch is little, and running it takes long
SMALL = 2**22  # enough to see whether there is any; where rows cannot be taken away, 16 times as much is tried
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_LSTM = {_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default}
_known: dict[Any, bool] = {}  # which operators take any, for arguments of which kinds


@dataclass(frozen=True)
class Like:
    """A tensor's shape, strides and type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        """What does not depend on the sizes."""
        order = sorted(range(len(self.shape)), key=lambda dim: (self.stride[dim], self.shape[dim]))
        return self.dtype, tuple(order), tuple(stride == 0 for stride in self.stride)

    def made(self, generator: torch.Generator) -> Tensor:
        """Random numbers, zeros where they are integers."""
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        flat = torch.zeros(max(0, reach) if torch.Size(self.shape).numel() else 0, dtype=self.dtype, device="cpu")
        if self.dtype.is_floating_point:
            flat.uniform_(generator=generator)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """A call of an operator that may need scratch, when ``position`` events had happened, and the bytes of its results. Its
    tensors are :class:`Like`, its lists tuples."""

    position: int
    device: str
    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...] = ()
    results: int = 0

    def between(self, other: "Call", numerator: int, denominator: int) -> "Call":
        """That for other rows, where those of ``self`` and of ``other`` are known."""

        def move(one: Any, two: Any) -> Any:
            if isinstance(one, Like):
                return Like(move(one.shape, two.shape), move(one.stride, two.stride), one.dtype)
            if isinstance(one, tuple):
                return tuple(map(move, one, two))
            if isinstance(one, int) and not isinstance(one, bool):
                return one + (two - one) * numerator // denominator
            return one

        moved = (move(one, two) for one, two in zip(self._sizes, other._sizes, strict=True))
        return replace(self, **dict(zip(("args", "kwargs", "results"), moved, strict=True)))

    @property
    def _sizes(self) -> tuple[Any, ...]:
        return self.args, self.kwargs, self.results

    @property
    def bytes(self) -> int:
        def count(value: Any) -> int:
            return value.bytes if isinstance(value, Like) else sum(map(count, value)) if isinstance(value, tuple) else 0

        return count((self.args, self.kwargs))

    @property
    def kind(self) -> tuple[Any, ...]:
        """The operator and the kinds of its tensors."""

        def kinds(value: Any) -> Any:
            if isinstance(value, Like):
                return value.kind
            return tuple(map(kinds, value)) if isinstance(value, tuple) else type(value)

        return self.operator, kinds((self.args, self.kwargs))


def note_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, position: int) -> Call | None:
    """The call as it can be made again, if it may need scratch."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    try:
        mine, named = _frozen(args), _frozen(tuple(kwargs.items()))
    except TypeError:
        return None
    given = _tensors((args, list(kwargs.values())))
    if not given:
        return None
    before = {tensor.untyped_storage()._cdata for tensor in given}
    return Call(position, str(given[0].device), str(func), mine, named, sum(_new_bytes(result, before)))


def _new_bytes(result: Any, before: set[int]) -> list[int]:
    """Of each tensor in a result, but for those that were there before."""
    storages = [tensor.untyped_storage() for tensor in _tensors(result)]
    return [0 if storage._cdata in before else storage.nbytes() for storage in storages]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return [value] if isinstance(value, Tensor) else []


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError("only dense tensors are made again")
        return Like(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if value is None or isinstance(value, (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)):
        return value
    raise TypeError(f"{value} is not made again")


def may_need_scratch(call: Call, shrunk: Callable[[], Call]) -> bool:
    """Whether the operator takes any: for those that decide by sizes it is not known otherwise, for the rest it is tried
    once, on ``shrunk()`` sizes."""
    func = _function(call.operator)
    if func in _CONVOLUTIONS or func in _LSTM or (func in _PRODUCTS and call.args[0].dtype != torch.float32):
        return True
    if call.kind not in _known and (smaller := shrunk()).bytes <= 16 * SMALL:
        _known[call.kind] = scratch_of(smaller) > 0
    return _known.get(call.kind, False)


def scratch_of(call: Call) -> int:
    """Bytes that a call has at most beside its arguments and its results. Some results keep more than they are said to: that
    of ``col2im`` lies where its input would fit."""
    try:
        return max(0, _measured(call.operator, call.args, call.kwargs, torch.get_num_threads())[0] - call.results)
    except (RuntimeError, IndexError, ValueError):  # values that the operator refuses: a matrix without an inverse
        return 0


def sizes_of(call: Call) -> tuple[int, ...]:
    """Bytes of each of its results."""
    with _disable_current_modes():
        return _measured(call.operator, call.args, call.kwargs, torch.get_num_threads())[1]


def _function(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch.ops)


@functools.lru_cache(maxsize=4096)
def _measured(operator: str, args: tuple[Any, ...], kwargs: tuple[Any, ...], threads: int) -> tuple[int, tuple[int, ...]]:
    function = _function(operator)
    learns = function is _aten.mkldnn_rnn_layer.default  # oneDNN's keeps nothing for a backward if nothing is to learn
    generator = torch.Generator().manual_seed(0)

    def made(value: Any) -> Any:
        if isinstance(value, Like):
            return value.made(generator).requires_grad_(learns and value.dtype.is_floating_point)
        return [made(one) for one in value] if isinstance(value, tuple) else value

    given, named = made(args), {name: made(value) for name, value in kwargs}
    profile = AllocatorProfile()
    with torch.set_grad_enabled(learns), profile.recorded():
        result = function(*given, **named)
    before = {tensor.untyped_storage()._cdata for tensor in _tensors((given, list(named.values())))}
    return profile.peak, tuple(_new_bytes(result, before))
