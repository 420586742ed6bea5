"""Compilation of the C++ extension of the simulation, on first use, with a cache for each version
of torch and of the sources.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import CDLL, CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
TORCH = Path(torch.__file__).parent
# Arguments: device, kind, and a buffer of some size for the message of an error. An empty message
# allows the wait.
LISTENER = CFUNCTYPE(None, c_int, c_char_p, c_void_p, c_int)
# Types of the arguments that ctypes would not guess, and the functions that return a number of
# bytes or of calls.
ARGUMENTS: dict[str, list[type]] = {
    "simulation_start": [c_int, POINTER(c_int64), c_bool, c_uint64],
    "simulation_seed": [c_int, c_uint64],
    "simulation_tag": [c_void_p, c_int],
    "simulation_listen": [LISTENER],
    "simulation_in_optimizer": [c_bool],
    "simulation_categories": [c_int, POINTER(c_int64)],
    "simulation_copies": [c_int64, c_int64, POINTER(c_int)],
    "simulation_fail_allocation": [c_int64],
}
COUNTS = (
    "simulation_live",
    "simulation_peak",
    "simulation_moved",
    "simulation_copies",
    "simulation_allocations",
)
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def load_native() -> CDLL:
    """Loads the compiled library, and declares the types of its functions.

    Processes that start together compile it once.
    """
    path = cache_folder() / f"simulation-{fingerprint()}.so"
    if not is_private(path):
        import fcntl  # missing on Windows, which has none of the supported compilers either

        with (path.parent / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released if its process ends
            if not is_private(path):
                build(path)
    native = CDLL(str(path))
    for name, types in ARGUMENTS.items():
        getattr(native, name).argtypes = types
    for name in COUNTS:
        getattr(native, name).restype = c_int64
    return native


def fingerprint() -> str:
    """Returns a digest of what the library depends on: torch, the machine and the sources."""
    parts = [
        torch.__version__,
        platform.machine(),
        platform.system(),
        *(path.read_text() for path in sorted(SOURCES.iterdir())),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Returns ``~/.cache/balanced_parallel``, or a temporary folder if that is not this user's.

    Code is loaded from it, so nobody else may write there.
    """
    temporary = Path(tempfile.gettempdir()) / f"balanced_parallel-{os.getuid()}"
    for find in (lambda: Path.home() / ".cache" / "balanced_parallel", lambda: temporary):
        # There is no home, it is read-only, or a file has this name.
        with contextlib.suppress(OSError, RuntimeError):
            folder = find()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder) and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="balanced_parallel-"))


def is_private(path: Path) -> bool:
    """Returns True if a file or a folder exists that this user alone may write to.

    A link is neither: all may write to it, by its mode.
    """
    if not path.exists():
        return False
    status = path.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def find_compiler() -> str:
    """Returns the path of the first available compiler of ``COMPILERS``."""
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
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        f"-I{SOURCES}",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    # One translation unit: parsing torch's headers takes most of the time.
    source = "".join(f'#include "{path.name}"\n' for path in sorted(SOURCES.glob("*.cpp")))
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        library = f"{scratch}/simulation.so"
        run_compiler(
            [compiler, *flags, "-shared", "-x", "c++", "-", *libraries, "-o", library], source
        )
        os.chmod(library, 0o700)
        os.replace(library, path)


def run_compiler(command: list[str], source: str) -> None:
    """Runs a compiler. If it fails, ``RuntimeError`` has its errors."""
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.splitlines()
        first_errors = "\n".join([line for line in lines if "error" in line][:10] or lines[:10])
        raise RuntimeError(
            f"simulate() could not compile its C++ extension for torch {torch.__version__} (exit status {result.returncode}), "
            f"expected a compiler for C++20, such as g++ 11 or clang++ 14, and 1 GiB of memory:\n{first_errors}"
        )
