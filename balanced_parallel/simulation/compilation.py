"""Builds the C++ half of the simulation on first use and keeps it in a cache, one file per version of torch and of the sources.

It is compiled against the headers that come with torch, with the machine's compiler, in about fifteen seconds.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

__all__: list[str] = []

SOURCES = Path(__file__).parent / "native"
TORCH = Path(torch.__file__).parent
# Most of the time goes into torch's headers, so they are read twice and no more: two compilers run side by side.
UNITS = (("streams", "ledger", "device", "storage", "composites", "operators"), ("autocast", "collectives"))
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def load_native() -> ctypes.CDLL:
    """The compiled library, with the types of its functions declared. Processes that start at once compile it once.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed; the message has what to install, or what it said.
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
    native.simulation_in_optimizer.argtypes = [ctypes.c_bool]
    native.simulation_categories.argtypes = [ctypes.c_int, ctypes.POINTER(integer)]
    for function in (native.simulation_live, native.simulation_peak, native.simulation_moved):
        function.restype = integer
    return native


def fingerprint() -> str:
    parts = [torch.__version__, platform.machine(), platform.system()]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """``~/.cache/balanced_parallel``, or where that can't be written a folder that this process alone uses."""
    try:
        folder = Path.home() / ".cache" / "balanced_parallel"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or a read-only one
        pass
    return Path(tempfile.mkdtemp(prefix="balanced_parallel-"))


class one_process_at_a_time:
    """A lock on a folder that ends with the process that holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"

    def __enter__(self) -> None:
        import fcntl  # not on Windows, where there is no compiler of this kind either

        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def find_compiler() -> str:
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise RuntimeError(
        f"simulate() compiles a small C++ extension on first use, and found no compiler (looked for {', '.join(COMPILERS)}): "
        "install one, with 'apt install g++', 'dnf install gcc-c++', 'conda install gxx' or, on macOS, 'xcode-select --install'"
    )


def build(path: Path) -> None:
    """Compiles and links to ``path``, which appears whole or not at all."""
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
        said = [
            process.communicate("".join(f'#include "{name}.cpp"\n' for name in unit))[1]
            for process, unit in zip(running, UNITS, strict=True)
        ]
        for process, text in zip(running, said, strict=True):
            refuse_failure(process.returncode, text)
        linked = f"{scratch}/simulation.so"
        libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run([compiler, "-shared", *objects, *libraries, "-o", linked], capture_output=True, text=True)
        refuse_failure(done.returncode, done.stderr)
        os.replace(linked, path)


def refuse_failure(status: int, said: str) -> None:
    if status:
        errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
        shown = "\n".join(errors[:10])
        raise RuntimeError(
            f"simulate() could not compile its C++ extension for torch {torch.__version__} (exit status {status}); a compiler "
            f"for C++20 is needed, such as g++ 11 or clang++ 14, and memory for it (1 GiB):\n{shown}"
        )
