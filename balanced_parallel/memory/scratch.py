"""What an operator allocates for itself on the CPU and frees before it returns: measured, by running it on zeros.

oneDNN's convolutions and products in half precision do so, by an algorithm that depends on shapes, threads and the processor.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes

__all__: list[str] = []

LARGEST = 2**28  # bytes of an operator's tensors: beside more than that, its scratch is little, and running it takes long
_aten = torch.ops.aten
_autograd: Any = torch.autograd  # does not say which of its names are for others
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_LSTM = {_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default}
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_SOFTMAX = {
    _aten._log_softmax.default,
    _aten._softmax.default,
    _aten._log_softmax_backward_data.default,
    _aten._softmax_backward_data.default,
}  # copy what is not contiguous


@dataclass(frozen=True)
class Like:
    """A tensor's shape, strides and type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def between(self, other: "Like", numerator: int, denominator: int) -> "Like":
        """That for other rows, where those of ``self`` and of ``other`` are known."""

        def move(ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(one + (two - one) * numerator // denominator for one, two in zip(ours, theirs, strict=True))

        return Like(move(self.shape, other.shape), move(self.stride, other.stride), self.dtype)

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).zero_()


@dataclass(frozen=True)
class Call:
    """A call of an operator that may need scratch, when ``position`` events had happened."""

    position: int
    device: str
    operator: str
    args: tuple[Any, ...]

    def between(self, other: "Call", numerator: int, denominator: int) -> "Call":
        """That for other rows."""
        args = tuple(
            one.between(two, numerator, denominator) if isinstance(one, Like) else one
            for one, two in zip(self.args, other.args, strict=True)
        )
        return Call(self.position, self.device, self.operator, args)

    @property
    def bytes(self) -> int:
        return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in self.args if isinstance(one, Like))


def note_call(func: Any, args: tuple[Any, ...], result: Any, position: int) -> Call | None:
    """The call as it can be made again, if it may need scratch."""
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if first is None:
        return None
    copies = func in _SOFTMAX and any(isinstance(arg, Tensor) and not arg.is_contiguous() for arg in args)
    if not (copies or func in _CONVOLUTIONS or func in _LSTM or (func in _PRODUCTS and first.dtype != torch.float32)):
        return None
    kept = [Like(tuple(a.shape), tuple(a.stride()), a.dtype) if isinstance(a, Tensor) else _frozen(a) for a in args]
    return Call(position, str(first.device), func._schema.name.removeprefix("aten::"), tuple(kept))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, torch.Size)) else value


def scratch_of(call: Call) -> int:
    """Bytes that a call has at most beside its arguments and its results."""
    return _measured(call.operator, call.args, torch.get_num_threads())[0]


def sizes_of(call: Call) -> tuple[int, ...]:
    """Bytes of each of its results."""
    with _disable_current_modes():
        return _measured(call.operator, call.args, torch.get_num_threads())[1]


@functools.lru_cache(maxsize=4096)
def _measured(operator: str, args: tuple[Any, ...], threads: int) -> tuple[int, tuple[int, ...]]:
    function = getattr(_aten, operator).default
    learns = function is _aten.mkldnn_rnn_layer.default  # oneDNN's keeps nothing for a backward if nothing is to learn
    tensors = [arg.zeros().requires_grad_(learns) if isinstance(arg, Like) else arg for arg in args]
    with torch.set_grad_enabled(learns):
        # the older of torch's two profilers: the newer writes lines to the error stream each time it starts
        config = _autograd.ProfilerConfig(_autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _autograd._enable_profiler_legacy(config)
        try:
            result = function(*tensors)
        finally:
            records = _autograd._disable_profiler_legacy()
    results = result if isinstance(result, tuple) else (result,)
    kept = tuple(tensor.untyped_storage().nbytes() for tensor in results if isinstance(tensor, Tensor))
    now = most = 0
    for record in (record for thread in records for record in thread if record.kind() == "memory_alloc"):
        now += record.cpu_memory_usage()
        most = max(most, now)
    return max(0, most - sum(kept)), kept
