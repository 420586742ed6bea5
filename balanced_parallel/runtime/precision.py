"""Autocast inside every replica, and one gradient scaler over all of them."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

__all__: list[str] = []

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The arithmetic of a step: ``"fp32"`` (nothing is cast), ``"bf16"`` or ``"fp16"`` (``torch.autocast`` with that dtype).

    ``"fp32"`` leaves an autocast block around the call as it is, and that block reaches every replica.

    Args:
        name: ``"fp32"``, ``"bf16"`` or ``"fp16"``; a ``Precision`` is taken as it is.
        scaler: the gradient scaler of ``"fp16"``; ``None`` makes one where it is first asked for. Gradients meet on one device
            before they are checked, so one scaler takes one decision for all replicas, and, because ranks check the sum of
            all ranks' gradients, all ranks take the same.

    Raises:
        ValueError: an unknown name, or a scaler with a precision that needs none: bfloat16 has the range of float32.
    """

    name: str
    scaler: torch.amp.GradScaler | None

    def __init__(self, name: "str | Precision" = "fp32", scaler: torch.amp.GradScaler | None = None) -> None:
        if isinstance(name, Precision):
            scaler = scaler or name.scaler
            name = name.name
        if name not in _DTYPES:
            raise ValueError(f"precision={name!r}, expected one of {', '.join(map(repr, _DTYPES))}")
        if scaler is not None and name != "fp16":
            raise ValueError(f"precision {name!r} was given a gradient scaler, expected none: only 'fp16' can underflow")
        self.name = name
        self.scaler = scaler

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def autocast(self, devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
        """Autocast for every type of device among ``devices``, in this thread; workers carry it on."""
        dtype = _DTYPES[self.name]
        return contextlib.nullcontext() if dtype is None else _autocast(dtype, devices)

    def scaler_on(self, device: torch.device) -> torch.amp.GradScaler | None:
        """The gradient scaler where there is one, made for ``device`` on first use."""
        if self.name == "fp16" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(device.type)
        return self.scaler


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, devices: Iterable[torch.device]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, dtype))
        yield
