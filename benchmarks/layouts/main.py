"""Errors of updates with dropout, in layouts that split the rows differently, and bits of trainings

Seven models that draw random numbers make one update of 7 rows in float64, by `TrainStep(reproducible=True)`. Run without
arguments, it measures all layouts, the trainings and the costs, and writes the README beside it.
"""

import argparse
import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from costs import SETTINGS, WIDE, be_traffic, measure_bytes, measure_times  # noqa: E402 - beside this file
from networks import MODELS, make_problem  # noqa: E402
from reports import environment, table  # noqa: E402
from trainings import DROPOUT, TRAININGS, Drift, measure_drifts, run_training  # noqa: E402

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize, savings, simulate  # noqa: E402
from balanced_parallel.strategies import launch  # noqa: E402

ROWS = 7
TEXT = [name for name, (kind, _) in MODELS.items() if kind == "text"]
Result = tuple[Tensor, dict[str, Tensor]]  # a loss and gradients


class Layout(NamedTuple):
    """A way to split the rows of an update."""

    devices: list[str] | None = None  # of one process; None for ranks
    micro_batch_size: int | None = None
    split: list[int] | None = None
    strategy: str = "ddp"  # of ranks
    checkpointed: str = ""
    reproducible: bool = True


THREE = ["cpu"] * 3
WHOLE = Layout(["cpu"])
LAYOUTS = {
    "one device, 4 micro-batches": Layout(["cpu"], 2),
    "3 replicas (3, 2, 2 rows)": Layout(THREE),
    "3 replicas (5, 1, 1 rows)": Layout(THREE, split=[5, 1, 1]),
    "2 replicas, micro-batches of 1 row": Layout(["cpu"] * 2, 1),
    "3 simulated devices, micro-batches of 2": Layout(["sim:0", "sim:1", "sim:2"], 2),
    "2 ranks, DDP (5, 2 rows)": Layout(),
    "2 ranks, DDP, micro-batches of 2": Layout(micro_batch_size=2),
    "2 ranks, FSDP2 (5, 2 rows)": Layout(strategy="fsdp"),
    "3 replicas, checkpointed by savings": Layout(THREE, 2, checkpointed="savings"),
    "3 replicas, checkpointed by transformers": Layout(THREE, 2, checkpointed="transformers"),
    "3 replicas without reproducible=True": Layout(THREE, reproducible=False),
}


def train(name: str, layout: Layout, rows: slice = slice(None)) -> Result:
    """Runs one update whose gradients stay. Returns them with the loss."""
    problem = make_problem(name, ROWS)
    module: Any = problem.module
    if layout.checkpointed == "savings":
        blocks = [f"model.{'bert.encoder.layer' if 'BERT' in name else 'transformer.h'}.{number}" for number in range(2)]
        savings.checkpoint_activations(module, blocks=blocks)
    elif layout.checkpointed == "transformers":
        module.model.activation_checkpointing_enable()
    if layout.devices is None:
        model, criterion = parallelize(module, problem.criterion, strategy=layout.strategy, weight=problem.weight)
    else:
        model = DataParallelModel(module, layout.devices, split=layout.split)
        criterion = DataParallelCriterion(problem.criterion, weight=problem.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    settings = {"micro_batch_size": layout.micro_batch_size, "reproducible": layout.reproducible}
    step = TrainStep(model, criterion, optimizer, **settings)
    torch.manual_seed(3)
    loss = step(problem.inputs[rows], tuple(target[rows] for target in problem.targets))
    return loss.cpu(), {key: whole(parameter) for key, parameter in module.named_parameters()}


def whole(parameter: Any) -> Tensor:
    """Returns a copy of a parameter's gradient, joined from the ranks if they have shards of it."""
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    joined: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return joined.detach().cpu().clone()


def relative_error(result: Result, expected: Result) -> float:
    """Returns the largest relative error of the loss and of the gradients that are not zero."""
    pairs = [(result[0], expected[0]), *((result[1][name], value) for name, value in expected[1].items())]
    return max(float((value - wanted).norm() / wanted.norm()) for value, wanted in pairs if wanted.norm() > 1e-12)


def run_layout(name: str, layout: Layout) -> Result:
    """Runs one update in a layout of one process."""
    assert layout.devices is not None
    with simulate(len(layout.devices)) if layout.devices[0].startswith("sim") else contextlib.nullcontext():
        return train(name, layout)


def measure_layouts(names: list[str]) -> dict[str, dict[str, float]]:
    """Returns the errors of all layouts, by layout and model."""
    of_ranks = run_on_ranks(["--layouts", *names])
    errors: dict[str, dict[str, float]] = {label: {} for label in LAYOUTS}
    for name in names:
        expected = train(name, WHOLE)
        for label, layout in LAYOUTS.items():
            if layout.checkpointed and name not in TEXT:
                continue
            result = of_ranks[name, label] if layout.devices is None else run_layout(name, layout)
            errors[label][name] = relative_error(result, expected)
        print(name, {label: f"{row[name]:.1e}" for label, row in errors.items() if name in row}, flush=True)
    return errors


def run_on_ranks(flags: list[str], ranks: int = 2) -> Any:
    """Runs this script on new ranks. Returns what their first has saved."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.pt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*launcher, str(HERE / "main.py"), "--save", str(target), *flags]
        subprocess.run(command, check=True, timeout=900, env=environment)
        return torch.load(target)


def be_rank(names: list[str]) -> dict[tuple[str, str], Result]:
    """Runs the layouts of two ranks, with 5 and 2 rows."""
    rows = slice(0, 5) if os.environ["RANK"] == "0" else slice(5, ROWS)
    of_ranks = [label for label, layout in LAYOUTS.items() if layout.devices is None]
    return {(name, label): train(name, LAYOUTS[label], rows) for name in names for label in of_ranks}


def idioms(programs: Mapping[str, tuple[str, Callable[..., Any]]]) -> str:
    """Returns a list of programs, each with what its docstring says."""
    return "\n".join(f"- {name}. {' '.join((run.__doc__ or '').split())}" for name, (_, run) in programs.items())


def table_of_drifts(drifts: dict[str, dict[str, Drift]]) -> str:
    """Returns the table of bits that differ."""
    layouts = ["2 ranks", "3 ranks", "3 replicas", DROPOUT]
    rows = [
        [name, importlib.metadata.version(TRAININGS[name][0]), *(str(row.get(layout, "")) for layout in layouts)]
        for name, row in drifts.items()
    ]
    return table(rows, ["", "version", *layouts])


def tables_of_costs() -> dict[str, str]:
    """Measures what the same bits cost. Returns a table for each of three questions."""
    times = [
        [f"{name}, {count} replica{'s' * (count > 1)}", *(f"{each:.1f} ms" for each in row), f"{row[2] / row[1]:.2f}"]
        for (name, count), row in measure_times().items()
    ]
    memory = [
        [f"{count} device{'s' * (count > 1)}", *(f"{number:.1f}" for pair in row for number in pair)]
        for count, row in measure_bytes().items()
    ]
    traffic = run_on_ranks(["--traffic"])
    kinds = sorted({kind for row in traffic.values() for kind in row})
    return {
        "times": table(times, ["", *SETTINGS, '"bits" / True']),
        "bytes": table(memory, ["", *(f"{name}, {what}" for name in SETTINGS for what in ("held", "peak"))]),
        "traffic": table([[name, *(f"{row[kind]:.2f}" for kind in kinds)] for name, row in traffic.items()], ["", *kinds]),
        "wide": WIDE,
    }


def report(
    errors: dict[str, dict[str, float]],
    drifts: dict[str, dict[str, Drift]],
    costs: dict[str, str],
) -> str:
    """Returns the text of the README."""
    parts = {
        **costs,
        "drifts": table_of_drifts(drifts),
        "trainings": idioms(TRAININGS),
        "layouts": table(
            [[label, *(f"{row[name]:.0e}" if name in row else "" for name in MODELS)] for label, row in errors.items()],
            ["", *MODELS],
        ),
        "environment": f"{environment('transformers')}, CPU with {os.cpu_count()} cores, one thread, gloo",
    }
    return (HERE / "page.md").read_text().format(**parts)


def main() -> None:
    """Measures everything, or runs as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", help="models, on this rank (for the launcher)")
    parser.add_argument("--training", choices=TRAININGS, help="train with one program on this rank (for the launcher)")
    parser.add_argument("--draws", action="store_true", help="train with dropout")
    parser.add_argument("--traffic", action="store_true", help="count collectives on this rank (for the launcher)")
    parser.add_argument("--save", type=Path, help="where its results go")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.save:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if flags.training:
            results: Any = run_training(flags.training, rank, ranks, draws=flags.draws)
        elif flags.traffic:
            results = be_traffic()
        else:
            results = be_rank(flags.layouts)
        if rank == 0:
            torch.save(results, flags.save)
        launch.end_process_group()  # a plain end of gloo's ranks aborts some of them
        return
    errors = measure_layouts(list(MODELS))
    drifts = measure_drifts(run_on_ranks)
    (HERE / "README.md").write_text(report(errors, drifts, tables_of_costs()))
    *exact, (_, control) = errors.items()
    if max(error for _, row in exact for error in row.values()) > 1e-10 or min(control.values()) < 1e-3:
        sys.exit("a layout is off by more than 1e-10, or the control is not")
    *others, bits = drifts.values()
    if any(drift.differ for drift in bits.values()) or not all(drift.differ for row in others for drift in row.values()):
        sys.exit("bits differ with reproducible='bits', or do not without it")


if __name__ == "__main__":
    main()
