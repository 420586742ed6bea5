"""Compilation of the C++ extension of the simulation, on first use, with a cache for each version of torch and of the sources.

The compiler of the machine builds it against the headers that come with torch, in about fifteen seconds.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .waits import LISTENER

__all__: list[str] = []


SOURCES = Path(__file__).parent / "native"
TORCH = Path(torch.__file__).parent
# Parsing torch's headers takes most of the time. Two translation units, compiled in parallel, parse them twice only.
UNITS = (("waits", "streams", "ledger", "device", "storage", "composites", "operators"), ("autocast", "collectives"))
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def load_native() -> ctypes.CDLL:
    """Loads the compiled library, and declares the types of its functions. Several processes that start together compile it once.

    Raises:
        RuntimeError: if there is no C++ compiler, or it fails. The message has the packages to install, or its errors.
    """
    path = cache_folder() / f"simulation-{fingerprint()}.so"
    if not path.exists():
        with one_process_at_a_time(path.parent):
            if not path.exists():
                build(path)
    native = ctypes.CDLL(str(path))
    integer = ctypes.c_int64
    native.simulation_start.argtypes = [ctypes.c_int, ctypes.POINTER(integer), ctypes.c_bool, ctypes.c_uint64]
    native.simulation_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    native.simulation_tag.argtypes = [ctypes.c_void_p, ctypes.c_int]
    native.simulation_listen.argtypes = [LISTENER]
    native.simulation_in_optimizer.argtypes = [ctypes.c_bool]
    native.simulation_categories.argtypes = [ctypes.c_int, ctypes.POINTER(integer)]
    native.simulation_copies.argtypes = [integer, integer, ctypes.POINTER(ctypes.c_int)]
    native.simulation_fail_allocation.argtypes = [integer]
    for name in ("live", "peak", "moved", "copies", "allocations"):
        getattr(native, f"simulation_{name}").restype = integer
    return native


def fingerprint() -> str:
    """Returns a hash of the versions of torch, of the platform and of the sources."""
    parts = [torch.__version__, platform.machine(), platform.system()]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Returns ``~/.cache/balanced_parallel``, or a temporary folder if that is not writable."""
    try:
        folder = Path.home() / ".cache" / "balanced_parallel"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or a read-only one
        pass
    return Path(tempfile.mkdtemp(prefix="balanced_parallel-"))


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Locks a folder. The lock is released if its process ends."""
    import fcntl  # missing on Windows, which has none of the supported compilers either

    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_compiler() -> str:
    """Returns the path of the first available compiler of ``COMPILERS``.

    Raises:
        RuntimeError: if there is none.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise RuntimeError(
        f"simulate() compiles a small C++ extension on first use, and found no compiler (looked for {', '.join(COMPILERS)}): "
        "install one, with 'apt install g++', 'dnf install gcc-c++', 'conda install gxx' or, on macOS, 'xcode-select --install'"
    )


def build(path: Path) -> None:
    """Compiles the sources to the library ``path``, which is created atomically."""
    compiler = find_compiler()
    include = TORCH / "include"
    flags = ["-std=c++20", "-O1", "-fPIC", f"-I{SOURCES}", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [f"{scratch}/{index}.o" for index in range(len(UNITS))]
        running = [
            subprocess.Popen(
                [compiler, *flags, "-x", "c++", "-c", "-", "-o", output],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for output in objects
        ]
        messages = [
            process.communicate("".join(f'#include "{name}.cpp"\n' for name in unit))[1]
            for process, unit in zip(running, UNITS, strict=True)
        ]
        for process, message in zip(running, messages, strict=True):
            check_status(process.returncode, message)
        linked = f"{scratch}/simulation.so"
        libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
        linker = subprocess.run([compiler, "-shared", *objects, *libraries, "-o", linked], capture_output=True, text=True)
        check_status(linker.returncode, linker.stderr)
        os.replace(linked, path)


def check_status(status: int, message: str) -> None:
    """Raises ``RuntimeError`` with the errors in ``message`` if the exit status of a compiler is not zero."""
    if status:
        errors = [line for line in message.splitlines() if "error" in line] or message.splitlines()
        first_errors = "\n".join(errors[:10])
        raise RuntimeError(
            f"simulate() could not compile its C++ extension for torch {torch.__version__} (exit status {status}); it needs a "
            f"compiler for C++20, such as g++ 11 or clang++ 14, and 1 GiB of memory:\n{first_errors}"
        )
