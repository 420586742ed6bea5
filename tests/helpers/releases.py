"""Tests that need something of newer versions of torch, or of Python with its global lock."""

import sys

import pytest
import torch

# An object that a thread has made and another one drops last is freed when the first one runs the next time (or by gc.collect()).
released_at_once = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="memory of other threads is released late without the lock of Python (python/cpython#157838)",
)
keeps_whole_gradients = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="FSDP2 of torch 2.11 cannot forget them after a failure, so each micro-batch reduces them",
)
