"""Precision of a training step: autocast in every replica, and one gradient scaler for all of them."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

__all__: list[str] = []

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision of a training step.

    ``"bf16"`` and ``"fp16"`` run forward and criterion under ``torch.autocast`` with that dtype, in every replica. ``"fp32"``
    casts nothing itself. An autocast block around the call still applies, and reaches every replica.

    Args:
        name: ``"fp32"``, ``"bf16"``, ``"fp16"``, or another ``Precision``.
        scaler: gradient scaler for ``"fp16"``. ``None`` creates one on first use. The gradients of all replicas and ranks are
            summed before the scaler checks them, so all replicas and ranks skip the same updates.

    Raises:
        ValueError: if ``name`` is unknown, or if a scaler is given with another precision than ``"fp16"``. bfloat16 has the
            range of float32 and needs no scaler.

    Example:
        >>> net = torch.nn.Linear(4, 2)
        >>> with Precision("bf16").autocast([torch.device("cpu")]):
        ...     net(torch.zeros(8, 4)).dtype
        torch.bfloat16
        >>> Precision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
        Precision('fp16')
    """

    name: str
    scaler: torch.amp.GradScaler | None

    def __init__(self, name: "str | Precision" = "fp32", scaler: torch.amp.GradScaler | None = None) -> None:
        if isinstance(name, Precision):
            scaler = scaler or name.scaler
            name = name.name
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(f"precision={name!r}, expected one of {', '.join(map(repr, _DTYPES))}")
        if scaler is not None and name != "fp16":
            raise ValueError(f"precision {name!r} was given a gradient scaler, expected none: only 'fp16' needs one")
        self.name = name
        self.scaler = scaler

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without autocast."""
        return _DTYPES[self.name]

    def autocast(self, devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that enables autocast for the types of ``devices``. Workers of replicas inherit it."""
        return contextlib.nullcontext() if self.dtype is None else _autocast(self.dtype, devices)

    def scaler_on(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Returns the gradient scaler of ``"fp16"``, created for ``device`` on first use; otherwise None."""
        if self.name == "fp16" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(device.type)
        return self.scaler


def scaled(loss: torch.Tensor, scaler: torch.amp.GradScaler | None) -> torch.Tensor:
    """Returns the loss times the scale, if there is a scaler.

    The first use makes two tensors, one after the other. An error between them leaves a scaler that fails in every
    ``update()``. So a failure puts the scaler back to where it has none.
    """
    if scaler is None:
        return loss
    try:
        return scaler.scale(loss)
    except BaseException:
        scaler.__setstate__(scaler.__getstate__())  # a pickled scaler makes them on its next use
        raise


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, devices: Iterable[torch.device]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, dtype))
        yield
