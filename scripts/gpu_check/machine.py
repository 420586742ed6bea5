"""The machine that is checked: GPUs, or simulated devices in their place. And Python processes that a check starts on it."""

import contextlib
import datetime
import gc
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import balanced_parallel

SCRIPT = Path(__file__).parent  # Python runs its __main__.py
GRACE = 15.0  # seconds for torchrun to end its processes
SYNCHRONIZES = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp


class NotPossible(Exception):
    """A reason why this machine cannot run a check."""


@dataclass(frozen=True)
class Machine:
    """The devices of one part.

    Attributes:
        devices: all of one kind.
        cluster: the simulated devices; None for GPUs.
    """

    devices: list[torch.device]
    cluster: Any = None

    @property
    def simulated(self) -> bool:
        """True for simulated devices."""
        return self.cluster is not None

    @property
    def without_speed(self) -> str | None:
        """The reason why times are not judged, or None if they are."""
        return "simulated devices have no speed" if self.simulated else None

    def size(self, on_gpus: int, simulated: int) -> int:
        """Returns the size of a problem. Simulated devices compute on the CPU."""
        return simulated if self.simulated else on_gpus

    def synchronize(self) -> None:
        """Waits for all devices."""
        for device in self.devices:
            torch.accelerator.synchronize(device)

    def release(self) -> None:
        """Frees the memory of earlier checks."""
        gc.collect()
        self.synchronize()
        torch.get_device_module(self.devices[0]).empty_cache()

    def median_seconds(self, function: Callable[[], Any], times: int = 10) -> float:
        """Returns the median time of some calls, after two more. Each ends with a wait for all devices."""
        measured = []
        for _ in range(times + 2):
            self.synchronize()
            started = time.perf_counter()
            function()
            self.synchronize()
            measured.append(time.perf_counter() - started)
        return statistics.median(measured[2:])


def names(devices: Sequence[torch.device]) -> str:
    """Returns devices as one writes them: ``[cuda:0, cpu]``."""
    return f"[{', '.join(map(str, devices))}]"


def sleep(device: torch.device, milliseconds: float = 20.0) -> None:
    """Puts a sleep on the current stream of a GPU. Simulated devices find races without one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(milliseconds * 1.5e6))  # clock cycles; no public kernel takes a given time


def describe(machine: Machine) -> str:
    """Returns hardware, versions and date, as a list in Markdown."""
    module = torch.get_device_module(machine.devices[0])
    lines = [f"{device}: {module.get_device_name(device)}, {_memory_of(device)}" for device in machine.devices]
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if not machine.simulated else ""
    now = datetime.datetime.now(datetime.UTC)
    lines += [
        f"driver {_driver()}" if not machine.simulated else "simulated devices: no GPU was used",
        f"torch {torch.__version__}{cuda}, Python {platform.python_version()}, {platform.platform()}",
        f"balanced_parallel {balanced_parallel.__version__}, commit {_commit()}",
        f"{now:%Y-%m-%d %H:%M} UTC",
    ]
    return "\n".join(f"- {line}" for line in lines)


@contextlib.contextmanager
def forbidding_waits(machine: Machine) -> Iterator[None]:
    """Raises an error where the host waits for a device."""
    if machine.simulated:
        with machine.cluster.forbidding_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_waits(machine: Machine, function: Callable[[], Any]) -> int:
    """Returns how often the host waited for a device during a call."""
    if machine.simulated:
        before = machine.cluster.wait_count
        function()
        waits: int = machine.cluster.wait_count - before
        return waits
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONIZES in str(warning.message) for warning in record)


def resident_bytes() -> int:
    """Returns the host memory that this process uses now.

    Raises:
        NotPossible: not on Linux.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise NotPossible("only Linux has /proc/self/statm") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def _memory_of(device: torch.device) -> str:
    return f"{torch.accelerator.get_memory_info(device)[1] / 2**30:.1f} GiB"


def _driver() -> str:
    """Returns the version of the GPU's driver, as nvidia-smi prints it."""
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _commit() -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def run_child(flags: Sequence[str], environment: Mapping[str, str] | None = None, ranks: int = 0, timeout: float = 100.0) -> Any:
    """Runs gpu_check.py in a new process, and returns the last line of its output that is JSON.

    Args:
        flags: of the command line.
        environment: variables beside those of this process.
        ranks: processes that torchrun starts; 0 starts one without torchrun.
        timeout: seconds.

    Raises:
        RuntimeError: the process failed, or did not end in time. The message has the end of its errors.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, str(SCRIPT), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its processes; killed at once, it would leave them running
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise RuntimeError(f"gpu_check.py {' '.join(flags)} did not end in {timeout:.0f} s") from None
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not answers:
        raise RuntimeError(f"gpu_check.py {' '.join(flags)} ended with code {process.returncode}: {_cause(errors)[:250]}")
    return json.loads(answers[-1])


def _cause(errors: str) -> str:
    """Returns the line of the first exception or signal, else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no output"]
    causes = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception): \S|.*Signal \d", line)]
    return (causes or lines[-1:])[0]
