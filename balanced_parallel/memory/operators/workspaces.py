"""Scratch memory of operators on the CPU, measured by running them on random numbers.

Convolutions and half-precision products of oneDNN allocate it by an algorithm that depends on shapes, threads and the
processor. Other operators copy arguments that are not contiguous, or not of the dtype that they compute in.

Bytes that the CPU's allocator hands out, as it reports them to torch's profiler: scratch memory of operators included.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig  # the profiler of allocations has no public name
from torch.utils._python_dispatch import _disable_current_modes  # no public context leaves all modes

from ...runtime.torch_private import storage_id

__all__: list[str] = []


LARGEST = 2**28  # bytes of an operator's tensors: larger calls take long, and their scratch memory is small in comparison
LEAST = 64  # bytes of scratch memory that count: a number among the arguments takes 12
SMALL = 2**22  # bytes, enough to detect scratch memory; 16 times as much if the call cannot have fewer rows
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_LSTM = {_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default}
_known: dict[Any, bool] = {}  # operator and kinds of its arguments -> takes scratch memory


@dataclass(frozen=True)
class Like:
    """A tensor's shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that do not depend on sizes."""
        order = sorted(range(len(self.shape)), key=lambda dim: (self.stride[dim], self.shape[dim]))
        return self.dtype, tuple(order), tuple(stride == 0 for stride in self.stride)

    def made(self, generator: torch.Generator) -> Tensor:
        """Returns such a tensor of random numbers, or of zeros if its dtype is not a floating-point one."""
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        flat = torch.zeros(max(0, reach) if torch.Size(self.shape).numel() else 0, dtype=self.dtype, device="cpu")
        if self.dtype.is_floating_point:
            flat.uniform_(generator=generator)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """A call of an operator that may need scratch memory, with :class:`Like` for tensors and tuples for lists.

    Attributes:
        position: number of events before the call.
        results: bytes of new results.
    """

    position: int
    device: str
    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...] = ()
    results: int = 0

    def between(self, other: "Call", numerator: int, denominator: int) -> "Call":
        """Returns the call for other rows, from ``self`` and ``other``, with ``numerator / denominator`` of their distance."""

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
        """The bytes of all tensors among the arguments."""

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
    """Returns a description to repeat the call from, if it may need scratch memory."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    try:
        positional, named = _frozen(args), _frozen(tuple(kwargs.items()))
    except TypeError:
        return None
    tensors = _tensors((args, list(kwargs.values())))
    if not tensors or any(tensor.layout != torch.strided for tensor in _tensors(result)):
        return None  # a sparse tensor has no storage of its own
    before = {storage_id(tensor.untyped_storage()) for tensor in tensors}
    return Call(position, str(tensors[0].device), str(func), positional, named, sum(_new_bytes(result, before)))


def _new_bytes(result: Any, before: set[int]) -> list[int]:
    """Returns the bytes of each tensor in a result; 0 for storages that existed before."""
    storages = [tensor.untyped_storage() for tensor in _tensors(result)]
    return [0 if storage_id(storage) in before else storage.nbytes() for storage in storages]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return [value] if isinstance(value, Tensor) else []


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError("a sparse tensor cannot be repeated")
        return Like(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if value is None or isinstance(value, (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)):
        return value
    raise TypeError(f"{value} cannot be repeated")


def may_need_scratch(call: Call, shrunk: Callable[[], Call]) -> bool:
    """Returns True if the operator may take scratch memory.

    Convolutions, products and LSTM layers decide by sizes, so they may. Others are tried once, on the sizes of ``shrunk()``."""
    func = _function(call.operator)
    if func in _CONVOLUTIONS or func in _LSTM or (func in _PRODUCTS and call.args[0].dtype != torch.float32):
        return True
    if call.kind not in _known and (smaller := shrunk()).bytes <= 16 * SMALL:
        _known[call.kind] = scratch_of(smaller) >= LEAST
    return _known.get(call.kind, False)


def scratch_of(call: Call) -> int:
    """Returns the peak of a call in bytes, without its arguments and its results.

    Some results hold more memory than their shapes say: that of ``col2im`` has the size of its input."""
    try:
        return max(0, _measured(call.operator, call.args, call.kwargs, torch.get_num_threads())[0] - call.results)
    except (RuntimeError, IndexError, ValueError):  # the operator refuses random values: a matrix without an inverse
        return 0


def sizes_of(call: Call) -> tuple[int, ...]:
    """Returns the bytes of each result of a call."""
    with _disable_current_modes():
        return _measured(call.operator, call.args, call.kwargs, torch.get_num_threads())[1]


def _function(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch.ops)


@functools.lru_cache(maxsize=4096)
def _measured(operator: str, args: tuple[Any, ...], kwargs: tuple[Any, ...], threads: int) -> tuple[int, tuple[int, ...]]:
    function = _function(operator)
    learns = function is _aten.mkldnn_rnn_layer.default  # without requires_grad, oneDNN saves nothing for a backward
    generator = torch.Generator().manual_seed(0)

    def made(value: Any) -> Any:
        if isinstance(value, Like):
            return value.made(generator).requires_grad_(learns and value.dtype.is_floating_point)
        return [made(one) for one in value] if isinstance(value, tuple) else value

    given, named = made(args), {name: made(value) for name, value in kwargs}
    profile = AllocatorProfile()
    with torch.set_grad_enabled(learns), profile.recorded():
        result = function(*given, **named)
    before = {storage_id(tensor.untyped_storage()) for tensor in _tensors((given, list(named.values())))}
    return profile.peak, tuple(_new_bytes(result, before))


# No public name turns it on: the successor of this profiler writes to stderr at each start, and starts in milliseconds.
_autograd: Any = torch.autograd


class AllocatorProfile:
    """A count of the bytes in use on the CPU, over every block of :meth:`recorded`.

    Attributes:
        now: bytes allocated and not released. Negative if memory was released that was allocated before.
        peak: the maximum of ``now``, from 0 or from :meth:`reset_peak` on.

    Example:
        >>> profile = AllocatorProfile()
        >>> with profile.recorded():
        ...     ones = torch.ones(256)
        >>> profile.now, profile.peak
        (1024, 1024)
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def reset_peak(self) -> None:
        """Starts another peak from the bytes in use now."""
        self.peak = self.now

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Counts in this block. Backwards of CPU tensors run in the calling thread, so they are counted too.

        Enter and leave it outside of ``record_function``, so not in the hooks of an optimizer's step: torch's profiler keeps
        no state for a range that ends later, and can deadlock there.
        """
        config = _autograd.ProfilerConfig(_autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _autograd._enable_profiler_legacy(config)
        try:
            yield
        finally:
            records = [record for records in _autograd._disable_profiler_legacy() for record in records]
            start = records[0]
            # threads of gloo allocate too: each has records of its own
            for record in sorted(records, key=start.cpu_elapsed_us):
                self.now += record.cpu_memory_usage() if record.kind() == "memory_alloc" else 0
                self.peak = max(self.peak, self.now)
