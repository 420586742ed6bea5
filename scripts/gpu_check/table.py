"""Rows of a check of a machine, the order in which they are run, and the page that they are written to.

A check is a generator of rows. An exception becomes a row too, so that a failing check never stops the others.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from machine import Machine, NotPossible, describe
from tabulate import tabulate

OK, TOO_FAR, NOT_HERE = "ok", "TOO FAR", "not possible here"
BUDGET = 400.0  # seconds, after which no check is begun: a part takes less than eight minutes


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: of the check.
        measured: numbers, with their limits.
        result: ``OK``, ``TOO_FAR``, or ``NOT_HERE`` with a reason.
    """

    name: str
    measured: str
    result: str


Check = Callable[[Machine], Iterator[Row]]


def judge(name: str, measured: str, fine: bool) -> Row:
    """Returns a row that says ``ok`` if ``fine`` is true."""
    return Row(name, measured, OK if fine else TOO_FAR)


def at_most(name: str, text: str, number: float, limit: float) -> Row:
    """Returns a row that says ``ok`` if ``number`` is at most ``limit``. A nan is not."""
    return judge(name, f"{text}: {number:.3g} (limit {limit:.3g})", number <= limit)


def attempt(name: str, measure: Callable[[], Row], without_meaning: str | None = None) -> Row:
    """Returns ``measure()``. An exception becomes a row, so that a check reaches its next row.

    Args:
        name: of the row, if there is an exception.
        measure: returns the row.
        without_meaning: the reason why numbers of this machine are not judged, if they are not.
    """
    try:
        row = measure()
    except NotPossible as reason:
        return Row(name, "", f"{NOT_HERE}: {reason}")
    except Exception as error:  # noqa: BLE001 - an error of any kind is a result
        text = " ".join(str(error).split())
        return Row(name, f"{type(error).__name__}: {text[:300]}", TOO_FAR)
    return row if without_meaning is None else Row(row.name, "ran", f"{NOT_HERE}: {without_meaning}")


def page_path(part: str) -> Path:
    """Returns the file of a part: in the folder ``$OUT`` (or this file, if it ends in .md), else under runs/."""
    out = Path(os.environ.get("OUT") or "runs")
    return out if out.suffix == ".md" else out / f"gpu_check_{part}.md"


def run_checks(part: str, machine: Machine, checks: Mapping[str, Check]) -> bool:
    """Runs checks, prints their rows, and writes the table after each of them. Returns False if one failed."""
    path, started = page_path(part), time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    header = describe(machine)
    print(f"{header}\n", flush=True)
    table: list[tuple[str, str, str, str]] = []
    for name, check in checks.items():
        rows = iter(_rows(name, check, machine, started))
        while True:
            begun = time.perf_counter()
            row = next(rows, None)
            if row is None:
                break
            table.append((*row, f"{time.perf_counter() - begun:.1f}"))
            print(" | ".join(table[-1]), flush=True)
        cells = [[cell.replace("|", "/") for cell in line] for line in table]
        text = tabulate(cells, ["check", "measured", "result", "seconds"], "github", disable_numparse=True)
        path.write_text(f"# GPU check: {part}\n\n{header}\n\n{text}\n", encoding="utf-8")
        with contextlib.suppress(RuntimeError):  # after an error of a GPU; the next check reports it
            machine.release()
    failed = sum(line[2] == TOO_FAR for line in table)
    print(f"\n{text}\n\n{len(table)} rows, {failed} failed, {time.perf_counter() - started:.0f} s; wrote {path}\n", flush=True)
    return failed == 0


def _rows(name: str, check: Check, machine: Machine, started: float) -> Iterator[Row]:
    """Yields the rows of a check, and one for an exception outside of them."""
    if time.perf_counter() - started > BUDGET:
        yield Row(name, "", f"{NOT_HERE}: the part has taken {BUDGET:.0f} s already, run it alone with --only {name}")
        return
    rows = check(machine)
    while True:
        row = attempt(name, lambda: next(rows, Row("", "", "")))
        if not row.name:
            return  # the generator has ended, or has failed and was reported
        yield row
