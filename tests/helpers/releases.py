"""Tests that read which memory is in use, on Python without the global lock."""

import sys

import pytest

# An object that a thread has made and another one drops last is freed when the first one runs the next time (or by gc.collect()).
released_at_once = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="memory of other threads is released late without the lock of Python (python/cpython#157838)",
)
