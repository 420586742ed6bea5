"""TF32: CUDA's products of float32 tensors with 10 bits of mantissa, which cuDNN uses by default."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__: list[str] = []


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Computes products of float32 tensors with all bits of float32 in this block, in all threads.

    torch has an old and a new way to set this. A program may read either, and the old one raises an error if it differs from
    the new one. So both are set, and put back.
    """
    backends: Any = torch.backends
    # on the CPU, torch.set_float32_matmul_precision("medium") rounds to bfloat16
    switches = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [switch.fp32_precision for switch in switches]
    try:
        old_way: tuple[str, bool] | None = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # set in the new way, by a program that then does not read the old one
        old_way = None
    try:
        if old_way is not None:
            _set_old_way("highest", False)
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        if old_way is not None:
            _set_old_way(*old_way)
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _set_old_way(matmul: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
