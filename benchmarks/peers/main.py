"""Frameworks for data parallelism side by side: exactness, memory, traffic, time of the host, and changes to a plain program.

Each program of this folder trains the same model on the same rows, as the documentation of its framework says. Run without
arguments, it measures all of them and writes the README beside it.
"""

import argparse
import ast
import difflib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from language_task import LENGTH, Case, make_rows, relative_error  # noqa: E402
from launching import Findings, Layout, measure, measure_time, preload, run_processes  # noqa: E402
from reports import environment, table  # noqa: E402

MIB = 2**20
DEVICES = 4
GRADIENTS = Case(words=61, width=16, layers=1, rows=53, batch_size=32, micro_batch_size=2, lr=0.0, dtype=torch.float64)
MEMORY = Case(words=4096, width=64, layers=2, rows=117, batch_size=32, micro_batch_size=2, lr=1e-3, dtype=torch.float32)
TIME = Case(words=61, width=16, layers=6, rows=96, batch_size=16, micro_batch_size=2, lr=1e-3, dtype=torch.float32)

ALONE, ONE_PROCESS, RANKS = Layout(1, 1), Layout(DEVICES, 1), Layout(DEVICES, DEVICES)
TWO = {ONE_PROCESS: ONE_PROCESS, RANKS: Layout(2, 2)}  # for times: a core per rank


class Row(NamedTuple):
    """A program of this folder, its package, its layout, and the program that its time is divided by."""

    program: str
    title: str
    package: str
    layout: Layout
    reference: str | None = None


PROGRAMS = [
    Row("plain", "plain PyTorch, the whole batch", "torch", ALONE),
    Row("slices", "plain PyTorch, micro-batches", "torch", ALONE, "slices"),
    Row("data_parallel", "`nn.DataParallel`", "torch", ONE_PROCESS, "slices"),
    Row("trainer", "HF Trainer in one process", "transformers", ONE_PROCESS, "slices"),
    Row("trainer_told", "HF Trainer in one process, told of the shift", "transformers", ONE_PROCESS, "slices"),
    Row("ours_replicas", "**balanced_parallel**, replicas", "balanced-parallel", ONE_PROCESS, "slices"),
    Row("ddp", "DDP by hand", "torch", RANKS, "ddp"),
    Row("accelerate_guide", "Accelerate", "accelerate", RANKS, "ddp"),
    Row("accelerate_counted", "Accelerate, tokens counted", "accelerate", RANKS, "ddp"),
    Row("fabric", "Lightning Fabric", "lightning-fabric", RANKS, "ddp"),
    Row("trainer", "HF Trainer", "transformers", RANKS, "ddp"),
    Row("trainer_told", "HF Trainer, told of the shift", "transformers", RANKS, "ddp"),
    Row("fsdp", "FSDP2 by hand", "torch", RANKS, "fsdp"),
    Row("ours_ddp", "**balanced_parallel**, DDP", "balanced-parallel", RANKS, "ddp"),
    Row("ours_fsdp", "**balanced_parallel**, FSDP2", "balanced-parallel", RANKS, "fsdp"),
]
HEADERS = ["", "version", "runs on", "error", "error, last batch", "peak, MiB", "mean, MiB", "through, MiB", "time", "lines"]


def code_lines(program: str) -> list[str]:
    """Returns the lines of a program without docstrings, comments and empty lines, and without lines for the simulation."""
    text = (HERE / f"{program}.py").read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or first.lineno) - first.lineno + 1)
    return [line for line in lines if line.strip() and not line.strip().startswith("#") and "# simulation" not in line]


def changed_lines(program: str, original: str = "plain") -> tuple[int, int]:
    """Returns the numbers of lines that difflib adds to the plain program and removes from it."""
    changes = list(difflib.ndiff(code_lines(original), code_lines(program)))
    return sum(line.startswith("+ ") for line in changes), sum(line.startswith("- ") for line in changes)


def errors(found: list[Findings], expected: Findings) -> list[float]:
    """Returns the error of the gradients of each update."""
    return [relative_error(one, other) for one, other in zip(found[0].gradients, expected.gradients, strict=True)]


def table_row(row: Row, found: list[Findings], expected: Findings, time: str) -> list[str]:
    """Returns the cells of a row."""
    first, *_, last = errors(found, expected)
    memory = [one for findings in found for one in findings.memory][: row.layout.devices]
    peaks, through = [one.peak / MIB for one in memory], max(one.through for one in memory) / MIB
    added, removed = changed_lines(row.program)
    where = f"{row.layout.ranks} ranks" if row.layout.ranks > 1 else f"1 process, {row.layout.devices} devices"
    cells = [row.title, importlib.metadata.version(row.package), where if row.layout.devices > 1 else "1 device"]
    cells += [f"{first:.0e}", f"{last:.0e}", f"{max(peaks):.1f}", f"{sum(peaks) / len(peaks):.1f}", f"{through:.1f}"]
    return [*cells, time, "0" if row.program == "plain" else f"+{added} -{removed}"]


def measured_row(row: Row, expected: Findings, rounds: int) -> list[str]:
    """Measures a program. Prints its row, or the reason why it has none."""
    found = run_processes(row.layout, measure, row.program, GRADIENTS, MEMORY)
    ratio = "1" if row.program == row.reference else "-"
    if row.reference and row.reference != row.program and rounds:
        times = run_processes(TWO[row.layout], measure_time, row.program, row.reference, TIME, rounds)
        ratio = f"{max(times):.2f}"
    cells = table_row(row, found, expected, ratio)
    print(*cells, sep=" | ", flush=True)
    return cells


def composer_conflict(requirement: str = "mosaicml==0.32.1") -> str:
    """Returns the answer of pip for Composer with the torch that the others are measured with."""
    constraints = HERE.parents[1] / "constraints.txt"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-c", str(constraints), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    conflict = [line for line in lines if " depends on " in line or "requested (constraint)" in line]
    return "; ".join(conflict) or (lines[-1] if lines else "no answer")


def main() -> None:
    """Measures everything and writes the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="for the ratios of times; 0 leaves them out")
    parser.add_argument("--only", nargs="*", help="programs to measure: the README stays as it is")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    [expected] = run_processes(ALONE, measure, "plain", GRADIENTS, MEMORY)
    rows = [measured_row(row, expected, flags.rounds) for row in PROGRAMS if not flags.only or row.program in flags.only]
    conflict = composer_conflict()
    print(f"Composer: {conflict}")
    if flags.only:
        return
    about = (__doc__ or "").split("\n\n", 1)[1]
    idioms = "\n".join(f"- [{name}.py]({name}.py): {described(name)}" for name in dict.fromkeys(row.program for row in PROGRAMS))
    labels = [row["labels"][1:] for row in make_rows(GRADIENTS)[: GRADIENTS.batch_size]]
    counts = [int((label != -100).sum()) for label in labels]
    page = (
        (HERE / "page.md")
        .read_text()
        .format(
            title="Peers, side by side",
            about=about.split(" Run without")[0].strip(),
            table=table(rows, HEADERS),
            idioms=idioms,
            conflict=conflict,
            devices=DEVICES,
            turns=f"median of {flags.rounds} turns in one process" if flags.rounds else "not measured in this run",
            rows=GRADIENTS.batch_size,
            last=GRADIENTS.rows % GRADIENTS.batch_size,
            micro=GRADIENTS.micro_batch_size,
            length=LENGTH,
            fewest=min(counts),
            most=max(counts),
            environment=f"{environment()}, gloo, 1 thread",
        )
    )
    (HERE / "README.md").write_text(page)


def described(program: str) -> str:
    """Returns the docstring of a program, on one line."""
    return " ".join((ast.get_docstring(ast.parse((HERE / f"{program}.py").read_text())) or "").split())


if __name__ == "__main__":
    main()
