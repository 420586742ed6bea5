"""Runs the tests that need a GPU, and writes what they measured, with the hardware and the versions, to a page.

python scripts/gpu_page.py                 on the GPUs of this machine; other flags are pytest's, such as -k ranks
python scripts/gpu_page.py --minutes 8     what counts most first, in processes of their own, which end in this time
python scripts/gpu_page.py --simulate      the same tests on simulated devices

It needs torch, pytest, hypothesis and tabulate, and no network. The page is written after each part, and has each test that has
ended. The exit code is 0 if all tests passed, and at least one of each part. Keep the page with the commit that was tested, and
name it in benchmarks/README.md.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[1]


class Part(NamedTuple):
    """Tests of one process. ``share`` is that of the minutes, ``advice`` what to look at first if a number is off."""

    name: str
    share: float
    tests: Sequence[str]
    advice: str


ALL = Part("all tests", 1.0, [""], "the test of that row, alone, with -k")
PARTS = [
    Part(
        "correctness",
        0.4,
        ["test_gpu_layouts.py", "test_gpu_streams.py"],
        "the first row that failed: with `CUDA_LAUNCH_BLOCKING=1`, a row that passes then is a race of streams "
        "(runtime/streams.py), and one that fails still is arithmetic: compare with `precision='fp32'`, and without TF32",
    ),
    Part(
        "memory",
        0.25,
        ["test_gpu_estimates.py"],
        "workspaces of cuBLAS and cuDNN: `CUBLAS_WORKSPACE_CONFIG=:0:0` for linear layers, `cudnn.enabled = False` for "
        "convolutions; then the kernel of attention, and the blocks of `torch.cuda.memory_snapshot()` above 1 MiB",
    ),
    Part(
        "time",
        0.25,
        ["test_gpu_speed.py"],
        "the host time beside the whole: if both are near, Python is the limit, and a larger micro-batch hides it; if not, a "
        "trace of `torch.profiler` for `cudaStreamSynchronize` and copies from pageable memory",
    ),
    Part(
        "two processes",
        0.1,
        ["test_gpu_ranks.py"],
        "`NCCL_DEBUG=INFO`: NCCL refuses two ranks on one GPU, where gloo copies through the host; then the number of buckets",
    ),
]


class Recorder:
    """A plugin of pytest that writes a line for each test as it ends."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes the call of a test, or what kept it from being called."""
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if report.skipped else crash.message if crash else report.longreprtext
        first = (reason or "").strip().partition("\n")[0].removeprefix("Skipped: ")
        result = "passed" if report.passed else f"{report.outcome}: {first}"
        measured = "; ".join(str(value) for _, value in report.user_properties)
        name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([name, measured, result, f"{report.duration:.1f}"]) + "\n")


def describe() -> Iterator[str]:
    """Yields hardware, versions, commit and date."""
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        yield f"cuda:{index}: {torch.cuda.get_device_name(index)}, {memory:.1f} GiB"
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if torch.cuda.is_available() else ""
    yield f"torch {torch.__version__}{cuda}, Python {platform.python_version()}, {platform.platform()}"
    if cuda:
        yield f"driver {first_line('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}"
    commit = first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    yield f"commit {commit}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def first_line(*command: str) -> str:
    """Returns the first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def run_part(part: Part, seconds: float | None, arguments: Sequence[str], *, is_broken: bool) -> tuple[str, list[list[str]]]:
    """Runs the tests of a part in a process of its own. Returns how it ended, and a row for each test."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        tests = [str(ROOT / "tests" / "gpu" / name) for name in part.tests]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # The package may not be installed.
        environment = os.environ | {"PYTHONPATH": paths} | ({"GPU_PAGE_BREAKS": "1"} if is_broken else {})
        command = [sys.executable, __file__, "--record", str(file), *tests, *arguments]
        try:
            done = subprocess.run(command, timeout=seconds, env=environment, check=False)
            end = f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {seconds:.0f} s"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return end, [[cell.replace("|", "/").replace("\n", " ") for cell in json.loads(line)] for line in lines]


def record(file: str, arguments: Sequence[str]) -> None:
    """Runs pytest in this process. Each test that ends is a line of a file."""
    if "GPU_PAGE_BREAKS" in os.environ:
        os._exit(3)
    sys.exit(pytest.main(["-c", str(ROOT / "pyproject.toml"), *arguments], plugins=[Recorder(Path(file))]))


def main() -> None:
    """Runs the parts, and writes the page after each."""
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser("gpu_page.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="on simulated devices")
    parser.add_argument("--minutes", type=float, help="the time of all parts together")
    breaks = "a rehearsal: the process of this part ends at once"
    parser.add_argument("--break-part", metavar="NAME", action="append", default=[], help=breaks)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "gpu" / "README.md", metavar="FILE")
    flags, others = parser.parse_known_args()
    selected = "gpu" if not flags.simulate else "not gpu and not slow" if flags.minutes else "not gpu"
    place = "simulated devices: no GPU was used" if flags.simulate else "the GPUs of one machine"
    text = "# Tests on GPUs\n\n" + "\n".join(f"- {line}" for line in (place, *describe())) + "\n"
    started, parts, has_failed = time.monotonic(), PARTS if flags.minutes else [ALL], False
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        seconds = None
        if flags.minutes:
            of_later = sum(later.share for later in parts[number + 1 :])
            seconds = max(0.0, 60 * flags.minutes * (1 - of_later) - (time.monotonic() - started))
        begun = time.monotonic()
        end, rows = run_part(part, seconds, ["-m", selected, *others], is_broken=part.name in flags.break_part)
        has_failed |= end != "ended with code 0" or not any(row[2] == "passed" for row in rows)
        table = tabulate(rows, ["test", "measured", "result", "seconds"], "github", disable_numparse=True)
        text += f"\n## {part.name.capitalize()}\n\nThe process {end} after {time.monotonic() - begun:.0f} s. "
        text += f"If a number is off, look first at {part.advice}.\n\n{table}\n"
        flags.out.write_text(text, encoding="utf-8")
    print(f"wrote {flags.out}")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
