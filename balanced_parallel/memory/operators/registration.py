"""Registration of kernels for the duration of a trace."""

import contextlib
from collections.abc import Iterator

import torch

__all__: list[str] = []


@contextlib.contextmanager
def aten_kernels() -> Iterator[torch.library.Library]:
    """Yields a library for kernels of ATen's operators. They are removed at the end of the block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        yield library
    finally:
        library._destroy()
