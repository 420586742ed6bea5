"""Predicted memory, compared with the memory that a training step uses

``memory.estimate`` compared with the second step of the plain loop (``zero_grad``, ``criterion(model(x), y)``, ``backward``,
``step`` of AdamW). The CPU's allocator reports every allocation and release to torch's profiler, those within operators
included. The prediction counts tensors only, so it is below the allocator where oneDNN takes memory for itself: for convolutions,
and for products in bf16 on some processors. Run without arguments, it measures everything and writes the README beside it;
``--quick`` prints a small part.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from balanced_parallel import memory
from balanced_parallel.memory import MemoryReport
from balanced_parallel.savings.checkpointing import find_blocks

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import data_parallel  # noqa: E402, F401 - registers its layout
import layouts  # noqa: E402
import lengths  # noqa: E402
import models  # noqa: E402
import pretrained  # noqa: E402
from models import Problem  # noqa: E402
from reports import environment, introduction, table  # noqa: E402
from truth import allocator_peak  # noqa: E402

MIB = 2**20
LIMITS = {"MLPs and transformers": 1e-3, "convnets": 2e-1, "recurrent nets": 1e-3}
SECONDS = 5.0
ROWS = (1, 2, 3, 5, 7, 8, 11, 16, 21, 40)


@dataclass(frozen=True)
class Model:
    """A model of the tables. Its group sets the limit of the error."""

    group: str
    build: Callable[..., Problem]


_DENSE, _CONVOLUTIONAL, _RECURRENT = LIMITS
MODELS = {
    "MLP": Model(_DENSE, models.mlp),
    "GPT": Model(_DENSE, models.plain_gpt),
    "nn.TransformerEncoder": Model(_DENSE, models.encoder),
    "GPT-2 (transformers)": Model(_DENSE, pretrained.small_gpt2),
    "BERT (transformers)": Model(_DENSE, pretrained.bert),
    "ViT (transformers)": Model(_DENSE, pretrained.vit),
    "Llama (transformers)": Model(_DENSE, pretrained.llama),
    "T5 (transformers)": Model(_DENSE, pretrained.t5),
    "Whisper (transformers)": Model(_DENSE, pretrained.whisper),
    "ResNet-18": Model(_CONVOLUTIONAL, models.resnet18),
    "MobileNet-like": Model(_CONVOLUTIONAL, models.mobilenet),
    "ConvNeXt-like": Model(_CONVOLUTIONAL, models.convnext),
    "U-Net": Model(_CONVOLUTIONAL, models.unet),
    "GRU": Model(_RECURRENT, functools.partial(models.recurrent, torch.nn.GRU)),
}
QUICK = ("MLP", "nn.TransformerEncoder", "BERT (transformers)", "MobileNet-like", "GRU")
LINES = ("MLP", "nn.TransformerEncoder", "GPT-2 (transformers)", "MobileNet-like")
ABOVE = """\
What is above its limit has one cause: to leave out a causal mask, transformers looks at the values of position ids (Llama, GPT-2,
Whisper), which it does not do where tensors have none. There the mask is counted, and with it Llama's keys and values, repeated
for its heads.

"""
BELOW = """\
What is below its limit runs in bf16: oneDNN copies the operands of some products on this processor.

"""
BESIDE = ("MLP", "GPT-2 (transformers)", "BERT (transformers)", "ResNet-18")
TIMED: dict[str, Callable[[], Problem]] = {
    "GPT-2 small, 4 rows of 512 words": lambda: pretrained.gpt2(4, 512),
    "ResNet-50, 16 images of 224 x 224": models.resnet50,
}


def build(name: str, **settings: int) -> Problem:
    """Returns a model of the tables with its batch."""
    torch.manual_seed(0)
    return MODELS[name].build(**settings)


def estimate(problem: Problem, **settings: object) -> MemoryReport:
    """Estimates the memory of a problem on the CPU, or with other settings."""
    arguments: dict[str, object] = {"device_kind": "cpu", "keeps_gradients": False} | settings
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return memory.estimate(problem.module, problem.criterion, problem.inputs, problem.targets, **arguments)  # type: ignore[arg-type]


def percent(error: float) -> str:
    """Formats a relative error."""
    return f"{error:+.3%}"


# Against the allocator ---------------------------------------------------------------------------------------------------------


def single_error(problem: Problem, precision: str, checkpoint: bool) -> tuple[int, float]:
    """Returns the bytes used, and the relative error of the prediction."""
    used = allocator_peak(problem, precision, checkpoint)
    guess = estimate(problem, precision=precision, savings=["checkpoint_activations"] * checkpoint).allocated[0]
    return used, guess / used - 1


def single_table(names: tuple[str, ...]) -> tuple[str, dict[str, list[float]]]:
    """Returns the table, and all errors of each group."""
    rows: list[list[object]] = []
    errors: dict[str, list[float]] = {MODELS[name].group: [] for name in names}
    for name in names:
        problem = build(name)
        for checkpoint in (False, True) if find_blocks(problem.module) else (False,):
            found = [single_error(problem, precision, checkpoint) for precision in ("fp32", "bf16")]
            cells = [cell for used, error in found for cell in (f"{used / MIB:.2f}", percent(error))]
            rows.append([name, "yes" if checkpoint else "", *cells])
            errors[MODELS[name].group] += [error for _, error in found]
    headers = ["model", "checkpoint", "fp32: used, MiB", "predicted", "bf16: used, MiB", "predicted"]
    return table(rows, headers), errors


def limits_table(errors: dict[str, list[float]]) -> str:
    """Returns the table of the largest errors of each group."""
    rows: list[list[object]] = []
    for group, found in errors.items():
        limit, beyond = LIMITS[group], sum(abs(error) > LIMITS[group] for error in found)
        rows.append([group, len(found), percent(min(found)), percent(max(found)), f"{limit:.1%}", beyond or "none"])
    return table(rows, ["group", "cases", "lowest", "highest", "limit", "beyond it"])


# Other rows, other layouts -----------------------------------------------------------------------------------------------------


def rows_error(name: str, kind: str, sizes: tuple[int, ...] = ROWS) -> float:
    """Returns the largest relative difference of ``report.at(rows)`` from an estimate of a batch of ``rows`` rows."""
    report = estimate(build(name, rows=6), device_kind=kind)
    pairs = ((report.at(rows)[0], estimate(build(name, rows=rows), device_kind=kind).allocated[0]) for rows in sizes)
    return max(abs(known / traced - 1) for known, traced in pairs)


def rows_table(names: tuple[str, ...], sizes: tuple[int, ...] = ROWS) -> str:
    """Returns the table of the errors for other numbers of rows."""
    rows: list[list[object]] = [[name, *(f"{rows_error(name, kind, sizes):.4%}" for kind in ("cpu", "h200"))] for name in names]
    return table(rows, ["model", "cpu", "h200"])


def simulated_table() -> str:
    """Returns the table of replicas on simulated devices."""
    problems = {"MLP": build("MLP"), "GPT": build("GPT", rows=16), "MobileNet-like": build("MobileNet-like", rows=16)}
    problems["nn.TransformerEncoder"] = build("nn.TransformerEncoder", rows=16, words=1000)
    rows: list[list[object]] = []
    for layout, balanced in (("replicas", False), ("replicas", True), ("torch_data_parallel", False)):
        for name, problem in problems.items():
            row: list[object] = [layout + ", balanced optimizer" * balanced, name]
            for precision in ("fp32", "bf16"):
                with warnings.catch_warnings(action="ignore", category=UserWarning):
                    used = layouts.simulated_peaks(problem, layout, balanced, precision)
                settings = {"layout": layout, "balanced_optimizer": balanced, "precision": precision}
                guess = estimate(problem, devices=len(used), device_kind="sim", **settings).allocated
                errors = [one / other - 1 for one, other in zip(guess, used, strict=True)]
                row += [f"{used[0] / MIB:.2f}", percent(errors[0]), percent(max(errors[1:], key=abs))]
            rows.append(row)
    columns = [f"{precision}: {what}" for precision in ("fp32", "bf16") for what in ("first, MiB", "predicted", "others")]
    return table(rows, ["layout", "model", *columns])


def ranks_table(names: tuple[str, ...] = ("MLP", "GPT", "MobileNet-like")) -> str:
    """Returns the table of several ranks."""
    problems = {name: build(name) for name in names}
    ways = (("ddp", False), ("ddp", True), ("fsdp", False))
    cases = [(name, *way, precision) for way in ways for name in names for precision in ("fp32", "bf16")]
    found = layouts.rank_peaks([(problems[name], layout, balanced, precision) for name, layout, balanced, precision in cases])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    rows: list[list[object]] = []
    for (name, layout, balanced, precision), (live, given) in zip(cases, found, strict=True):
        settings = {"layout": layout, "balanced_optimizer": balanced, "precision": precision}
        report = estimate(problems[name], devices=layouts.RANKS, **settings)
        tensors = percent(max(report.timeline[0]) / live - 1)
        whole = percent(report.allocated[0] / given - 1) if given else "-"
        rows.append([layout + " + ZeRO-1" * balanced, name, precision, f"{live / MIB:.2f}", tensors, whole])
    torch.set_num_threads(threads)
    return table(rows, ["layout", "model", "", "tensors, MiB", "predicted", "predicted, by the allocator"])


# Time, and others --------------------------------------------------------------------------------------------------------------


def seconds(name: str) -> list[float]:
    """Returns the seconds of three estimates in a new process, without imports and without the construction of the module."""
    command = [sys.executable, str(HERE / "main.py"), "--time", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_seconds(name: str) -> None:
    """Prints the seconds of three estimates as JSON."""
    problem, times = TIMED[name](), []
    for _ in range(3):
        started = time.perf_counter()
        estimate(problem, device_kind="h200")
        times.append(time.perf_counter() - started)
    sys.stdout.write(json.dumps(times) + "\n")


def others(problem: Problem) -> dict[str, int]:
    """Returns the predictions of other tools, if they are installed."""
    found = {}
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes

        size, _ = calculate_maximum_sizes(problem.module)
        found["accelerate"] = max(estimate_training_usage(size, "float32").values())
    except ImportError:
        pass
    try:
        import torchinfo

        summary = torchinfo.summary(problem.module, input_data=problem.inputs, verbose=0, mode="train")
        found["torchinfo"] = summary.total_input + summary.total_output_bytes + summary.total_param_bytes
    except ImportError:
        pass
    found["DeepSpeed, ZeRO-2 on 1 GPU"] = 20 * sum(parameter.numel() for parameter in problem.module.parameters())
    return found


def others_table(names: tuple[str, ...] = BESIDE) -> str:
    """Returns the table of the predictions of other tools."""
    lines: list[dict[str, object]] = []
    for name in names:
        problem = build(name)
        used = allocator_peak(problem)
        guesses = {"memory.estimate": estimate(problem).allocated[0]} | others(problem)
        lines.append({"model": name, "used, MiB": f"{used / MIB:.1f}"})
        lines[-1] |= {tool: f"{guess / MIB:.1f} ({guess / used - 1:+.1%})" for tool, guess in guesses.items()}
    missing = [f"{tool} was not installed" for tool in ("accelerate", "torchinfo") if tool not in lines[0]]
    return "\n\n".join([table([[*line.values()] for line in lines], list(lines[0])), *missing])


def report() -> tuple[str, list[str]]:
    """Returns the README, and the limits that did not hold."""
    single, errors = single_table(tuple(MODELS))
    failures = [f"{group}: {max(found, key=abs):+.3%}" for group, found in errors.items() if max(map(abs, found)) > LIMITS[group]]
    times = {name: seconds(name) for name in TIMED}
    failures += [f"{name}: {t[0]:.1f} s" for name, t in times.items() if max(t[0], statistics.median(t)) > SECONDS]
    timed: list[list[object]] = [[name, f"{t[0]:.2f}", f"{statistics.median(t):.2f}"] for name, t in times.items()]
    values = {
        "introduction": introduction(__doc__),
        "limits": limits_table(errors),
        "causes": ABOVE * (max(errors[_DENSE]) > LIMITS[_DENSE]) + BELOW * (min(errors[_DENSE]) < -LIMITS[_DENSE]),
        "single": single,
        "rows": rows_table(LINES),
        "lengths": table(lengths.length_rows(build), lengths.HEADERS),
        "simulated": simulated_table(),
        "ranks": ranks_table(),
        "others": others_table(),
        "timed": table(timed, ["model", "first call, s", "median of 3, s"]),
        "environment": f"{environment('transformers')}, {torch.get_num_threads()} threads",
    }
    return (HERE / "page.md").read_text().format(**values), failures


def main() -> None:
    """Measures what the flags select, and writes the README without flags."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few models beside the allocator, and nothing is written")
    parser.add_argument("--time", choices=TIMED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time:
        print_seconds(options.time)
    elif options.quick:
        single, errors = single_table(QUICK)
        sys.stdout.write(f"{limits_table(errors)}\n\n{single}\n\n{rows_table(QUICK[:1], ROWS[:4])}\n")
    else:
        text, failures = report()
        (HERE / "README.md").write_text(text)
        sys.stdout.write(text)
        if failures:
            raise SystemExit("beyond the limit: " + "; ".join(failures))


if __name__ == "__main__":
    main()
