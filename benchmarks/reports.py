"""Parts of the pages of all benchmarks: an introduction, tables, the environment, and ratios of times."""

import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tabulate
import torch


def introduction(docstring: str | None) -> str:
    """Returns the title and the text of a program's docstring, without what it says about running it."""
    title, text = (docstring or "").split("\n\n", 1)
    return f"# {title}\n\n{text.split(' Run without')[0].strip()}"


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Returns a table in Markdown. Texts of numbers stay as they are."""
    return str(tabulate.tabulate(rows, headers, "github", disable_numparse=True))


def environment(*packages: str) -> str:
    """Returns the processor and the versions of Python, torch and other packages."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([platform.machine(), f"Python {platform.python_version()}", f"torch {torch.__version__}", *versions])


def write_page(folder: Path, text: str, environment: str, install: str = "") -> None:
    """Writes the README of a benchmark, which ends with its environment and its command, and prints it."""
    before = f".venv/bin/pip install -c constraints.txt -e '.[{install}]'\n" if install else ""
    command = f"{before}.venv/bin/python benchmarks/{folder.name}/main.py"
    page = f"{text}\nEnvironment: {environment}\nTo reproduce (it writes this file):\n\n```bash\n{command}\n```\n"
    (folder / "README.md").write_text(page)
    sys.stdout.write(page)


def ratio_of_times(
    one: Callable[[], Any], other: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the median of the time of ``one`` over that of ``other``. Each goes first in half of the rounds, after two more."""
    ratios = []
    for number in range(rounds + 2):
        times = {}
        for function in (one, other) if number % 2 else (other, one):
            started = clock()
            function()
            times[function] = clock() - started
        ratios.append(times[one] / times[other])
    return statistics.median(ratios[2:])
