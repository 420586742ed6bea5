"""Runs the tests that need a GPU, and writes what they measured, with the hardware and the versions, to a page.

python scripts/gpu_page.py                 on the GPUs of this machine; other flags are pytest's, such as -k ranks
python scripts/gpu_page.py --simulate      the same tests on simulated devices

The exit code is pytest's. Keep the page together with the commit that was tested, and name it in benchmarks/README.md.
"""

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[1]


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


def rows_of(results: Path) -> Iterator[list[str]]:
    """Yields test, measured numbers, result and seconds of each test that ran."""
    for case in ElementTree.parse(results).iter("testcase"):
        measured = [str(entry.get("value")) for entry in case.iter("property")]
        outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        result = "passed" if outcome is None else f"{outcome.tag}: {(outcome.get('message') or '').splitlines()[0]}"
        cells = [str(case.get("name")).removeprefix("test_").replace("_", " "), "; ".join(measured), result]
        yield [*(cell.replace("|", "/") for cell in cells), f"{float(case.get('time') or 0):.1f}"]


def main() -> None:
    """Runs pytest, and writes the page."""
    parser = argparse.ArgumentParser("gpu_page.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="on simulated devices")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "gpu" / "README.md", metavar="FILE")
    flags, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        selected = [str(ROOT / "tests" / "gpu"), "-m", "not gpu" if flags.simulate else "gpu", f"--junitxml={results}"]
        code = pytest.main([*selected, "-c", str(ROOT / "pyproject.toml"), *others])
        rows = list(rows_of(results)) if results.exists() else []
    place = "simulated devices: no GPU was used" if flags.simulate else "the GPUs of one machine"
    header = "\n".join(f"- {line}" for line in (place, *describe()))
    table = tabulate(rows, ["test", "measured", "result", "seconds"], "github", disable_numparse=True)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(f"# Tests on GPUs\n\n{header}\n\n{table}\n", encoding="utf-8")
    print(f"wrote {flags.out}")
    sys.exit(code)


if __name__ == "__main__":
    main()
