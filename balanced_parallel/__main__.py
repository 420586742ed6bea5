"""Memory of a training step before it runs.

What a step needs:     PROGRAM estimate --problem net.py:build --devices 4
How it fits:           PROGRAM plan --problem net.py:build --batch-size 512 --memory 24GiB
What fits at once:     PROGRAM fit --problem net.py:build --batch-size 512 --memory 24GiB
What would save:       PROGRAM tricks --problem net.py:build --devices 4

``build`` is a function that returns ``(module, criterion, inputs, targets)``.

No accelerator is needed, and the model takes no memory. The exit code is 0 for success, 1 if
nothing fits, and 2, with one line on stderr, if the model or a flag is wrong. Plans print there what
they try, and traces of more than three seconds their progress.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import json
import logging
import math
import operator
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch import nn

from . import __version__, memory
from .batch.containers import describe
from .memory.devices import find_kind
from .memory.estimation import MODES, make_request
from .memory.fitting import fit_request, saved_bytes
from .memory.planning import MATERIALIZE, MemoryPlan
from .memory.problem import Problem
from .memory.report import MemoryReport, load_plotly, parse_each
from .memory.savings import PLANNED
from .memory.trace.layouts import LAYOUTS
from .runtime.values import format_bytes, parse_bytes


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, and end the program with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Prints ``message`` and ends the program."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def whole_number(at_least: int, expected: str, text: str) -> int:
    """Parses a whole number."""
    if not text.isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected {expected}")
    return int(text)


def capacity(text: str) -> int | list[int]:
    """Parses a size of memory, or one of each device."""
    try:
        sizes = [parse_bytes(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return sizes if len(sizes) > 1 else sizes[0]


def optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Parses the name of a class of ``torch.optim``, in any case."""
    base = torch.optim.Optimizer
    classes = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }
    if name.lower() not in classes:
        raise argparse.ArgumentTypeError(
            f"torch.optim has no {name!r}, expected one of {', '.join(classes)}"
        )
    return classes[name.lower()]


NUMBER: dict[str, Any] = {
    "type": functools.partial(whole_number, 1, "a whole number of at least 1"),
    "metavar": "N",
}
dimension = functools.partial(whole_number, 0, "a dimension: 0, 1, ...")


def make_parser() -> OneLineParser:
    """Makes the parser of all commands."""
    program = (
        "balanced-parallel"
        if Path(sys.argv[0]).name == "balanced-parallel"
        else "python -m balanced_parallel"
    )
    description = (__doc__ or "").replace("PROGRAM", program)
    parser = OneLineParser(
        program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"balanced_parallel {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="|".join(COMMANDS))
    commands = {
        name: subparsers.add_parser(
            name, help=text, parents=[_problem_and_step()], allow_abbrev=False
        )
        for name, (_, text) in COMMANDS.items()
    }
    add = commands["estimate"].add_argument
    add(
        "--layout",
        choices=LAYOUTS,
        help="how the devices are used (default: single, replicas on several devices)",
    )
    add(
        "--mode",
        choices=MODES,
        default="train",
        help="an update, or the forward and the loss alone (default: train)",
    )
    add(
        "--micro-batch-size",
        **NUMBER,
        help="rows per device in one forward (default: its whole share)",
    )
    add(
        "--balanced-optimizer",
        action="store_true",
        help="spread the optimizer's state over the devices",
    )
    add(
        "--savings",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="functions of balanced_parallel.savings that are applied before",
    )
    for name in ("plan", "fit"):
        commands[name].add_argument(
            "--memory",
            dest="capacity",
            type=capacity,
            metavar="SIZE",
            help="of each device, such as 24GiB, or a list: 24GiB,16GiB (default: that of the device kind)",
        )
    add = commands["plan"].add_argument
    add(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="time for the search; after it, or Ctrl-C, the best option so far is printed",
    )
    add(
        "--hosts",
        default=1,
        **NUMBER,
        help="hosts with --devices each, under torchrun (default: 1)",
    )
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="also print what was not tried, and savings to apply by hand",
    )
    return parser


def _problem_and_step() -> OneLineParser:
    """Makes the flags that all commands have."""
    parser = OneLineParser(add_help=False)
    add = parser.add_argument
    add(
        "--problem",
        required=True,
        metavar="FILE.py:NAME",
        help="or package.module:name; a function without arguments that returns (module, criterion, inputs, targets)",
    )
    add(
        "--dim",
        type=dimension,
        default=0,
        metavar="N",
        help="the dimension of the rows (default: 0)",
    )
    add(
        "--batch-size",
        **NUMBER,
        help="rows per update, over all devices and ranks (default: those of the inputs)",
    )
    add("--devices", default=1, **NUMBER, help="how many, or how many ranks (default: 1)")
    add(
        "--optimizer",
        type=optimizer,
        default="adamw",
        metavar="NAME",
        help="default: adamw, of torch.optim",
    )
    add(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        default="fp32",
        help="arithmetic of forward and loss (default: fp32)",
    )
    add(
        "--device-kind",
        metavar="KIND",
        help="h200, a100, ..., cpu; estimate takes several: a100,rtx4090 (default: this machine's accelerator, else h200)",
    )
    add(
        "--scalar",
        type=float,
        metavar="X",
        help="the largest value that the module reads of a tensor (.item(), if), where it does",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="write a page: memory over the step, the holders of its peak, the options of a plan; needs no network",
    )
    add("--json", action="store_true", help="print JSON, and assumptions to stderr")
    return parser


def estimate(flags: argparse.Namespace) -> int:
    """Prints the memory of one update. Returns the exit code."""
    layout = flags.layout or layout_of(flags.devices)
    problem, rows, settings = _build(
        flags, "micro_batch_size", "balanced_optimizer", "mode", "savings"
    )
    ranks = flags.devices if LAYOUTS[layout].is_distributed else 1
    settings |= vars(problem.with_rows(-(-rows // ranks))) | {"layout": layout}
    kinds = (flags.device_kind or "").split(",")
    if len(kinds) > 1:
        comparison = memory.compare_kinds(**settings | {"device_kind": kinds})
        parts = {name: json.loads(report.to_json()) for name, report in comparison.items()}
        text = json.dumps(parts, indent=2) if flags.json else str(comparison)
        print(text, file=flags.output)
        return 0 if any(report.at(report.rows).fits for report in comparison.values()) else 1
    report = memory.estimate(**settings)
    return _show(flags, report, str(report))


def plan(flags: argparse.Namespace) -> int:
    """Prints the plan, with lines that make the problem beside its file. Returns the exit code."""
    problem, rows, settings = _build(flags, "capacity", "hosts", "seconds")
    result = memory.plan(**vars(problem), batch_size=rows, **settings)
    if result.lines:
        where, _, name = flags.problem.rpartition(":")
        module = Path(where.removesuffix(".py")).name
        import_line = f"from {module} import {name.partition('.')[0]}"
        source = [import_line, "", f"module, criterion, inputs, targets = {name}()"]
        place = result.lines.index("")
        # The module has values there.
        rest = [line for line in result.lines[place:] if line != MATERIALIZE]
        result = dataclasses.replace(result, lines=(*result.lines[:place], *source, *rest))
    return _show(flags, result, result.describe(verbose=flags.verbose))


def fit(flags: argparse.Namespace) -> int:
    """Prints the most rows per device that fit in one forward. Returns the exit code."""
    problem, count, settings = _build(flags)
    request = make_request(problem.with_rows(count), layout="replicas", **settings)
    size = flags.capacity or request.kind.capacity
    if size is None:
        raise ValueError(f"{request.kind.name} has no capacity, expected --memory")
    rows, report = fit_request(request, parse_each(size, flags.devices))
    title = f"micro_batch_size={rows}, in {report.micro_batches} micro-batch(es)"
    return _show(flags, report, f"{title}\n\n{report}")


def tricks(flags: argparse.Namespace) -> int:
    """Prints the bytes that each saving alone takes off the peak of the busiest device.

    Returns the exit code.
    """
    problem, count, settings = _build(flags)
    report = memory.estimate(
        **vars(problem.with_rows(count)), layout=layout_of(flags.devices), **settings
    )
    request = report.batches.request
    peak = max(report.allocated)
    saved = saved_bytes(request, request.rows, peak, PLANNED)
    rows = [(planned.saving.name, size, planned.saving.cost) for planned, size in saved.items()]
    if flags.json:
        items = [dict(zip(("name", "saves", "cost"), row, strict=True)) for row in rows]
        return _show(flags, report, "", json.dumps({"peak": peak, "tricks": items}, indent=2))
    lines = [[name, format_bytes(size), f"{size / peak:.0%}", cost] for name, size, cost in rows]
    table = tabulate(
        lines, ["trick", "saves", "of the peak", "cost"], "simple", disable_numparse=True
    )
    others = ", ".join(planned.saving.name for planned in PLANNED if planned not in saved)
    first = f"peak without tricks: {format_bytes(peak)} on the busiest device"
    return _show(flags, report, f"{first}\n\n{table}\n\nnot traced for this step: {others}")


def layout_of(devices: int) -> str:
    """Returns the name of the layout of one process with so many devices."""
    return "single" if devices == 1 else "replicas"


def _build(flags: argparse.Namespace, *names: str) -> tuple[Problem, int, dict[str, Any]]:
    """Returns the problem, the rows of an update, and the settings of the step, with flags of these
    names.

    Wrong flags fail before the model is built.
    """
    for name in (flags.device_kind or "").split(","):
        find_kind(name or None)
    if flags.html:
        load_plotly()
        flags.html.parent.mkdir(parents=True, exist_ok=True)
    problem = dataclasses.replace(build_problem(flags.problem), dim=flags.dim, scalar=flags.scalar)
    names = ("optimizer", "devices", "precision", "device_kind", *names)
    settings = {name: getattr(flags, name) for name in names}
    return problem, flags.batch_size or problem.batch.rows or 0, settings


def _show(
    flags: argparse.Namespace, result: MemoryReport | MemoryPlan, text: str, as_json: str = ""
) -> int:
    """Prints a result as text or as JSON, by default its own, and writes its page.

    Returns the exit code, 1 if nothing fits.
    """
    print((as_json or result.to_json()) if flags.json else text, file=flags.output)
    fits = isinstance(result, MemoryReport) or result.fits
    if flags.html:
        if isinstance(result, MemoryReport):
            result.save_html(flags.html, find_kind(result.device_kind).capacity)
        elif fits:
            result.save_html(flags.html)
        done = f"wrote {flags.html}" if fits else f"nothing fits, so {flags.html} was not written"
        print(done, file=sys.stderr if flags.json else flags.output)
    return 0 if fits else 1


COMMANDS = {
    "estimate": (estimate, "the memory of an update on each device"),
    "plan": (plan, "the cheapest way to fit the batch"),
    "fit": (fit, "the most rows per device that fit in one forward"),
    "tricks": (tricks, "the bytes that each known trick saves for the model"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    For bad input it prints one line to stderr and raises ``SystemExit(2)``.
    """
    parser = make_parser()
    flags = parser.parse_args(arguments, argparse.Namespace(output=sys.stdout))
    if flags.command is None:
        parser.print_help()
        return 0
    command, _ = COMMANDS[flags.command]
    try:
        # a model may print, which is not part of the output
        with (
            warnings.catch_warnings(record=True) as caught,
            logs_of_a_command(),
            contextlib.redirect_stdout(sys.stderr),
        ):
            code = command(flags)
    # a model may raise anything, and a traceback would not help
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        explains_itself = isinstance(error, (ValueError, ImportError, OSError)) and str(error)
        parser.error(f"{'' if explains_itself else f'{type(error).__name__}: '}{str(error)[:600]}")
    for warning in caught:
        print(f"{parser.prog}: warning: {' '.join(str(warning.message).split())}", file=sys.stderr)
    return code


@contextlib.contextmanager
def logs_of_a_command() -> Iterator[None]:
    """Prints what is tried, and the progress of long traces.

    Hides torch's log, a traceback for each shape that does not suit.
    """
    shown = logging.getLogger(memory.__name__)
    with (
        patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        patch.object(shown, "handlers", [logging.StreamHandler()]),
        contextlib.ExitStack() as undo,
    ):
        undo.callback(shown.setLevel, shown.level)
        shown.setLevel(logging.INFO)
        yield


# Files of torch, of this package and of Python: their lines do not show the mistake of a user
_NOT_THE_USERS = (
    *(str(Path(place).parent) for place in (torch.__file__, __file__, traceback.__file__)),
    "<",
)


def build_problem(place: str) -> Problem:
    """Makes the problem at ``place``, on the meta device if the function can run there.

    ``my_file.py:build`` or ``package.module:build`` is a function without required arguments that
    returns ``(module, criterion, inputs, targets)``.
    """
    result = _make(place, _find(place))
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != 4 or not isinstance(parts[0], nn.Module) or not callable(parts[1]):
        returned = ", ".join(map(describe, parts))
        raise ValueError(
            f"{place} returned {returned}: expected (module, criterion, inputs, targets)"
        )
    return Problem(*parts)


def _find(place: str) -> object:
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(
            f"{place!r} is not a place, expected my_file.py:name or package.module:name"
        )
    try:
        with patch.object(sys, "argv", [where]):  # a script may read its flags at import
            if not where.endswith(".py"):
                module = importlib.import_module(where)
            else:
                path = Path(where).resolve(strict=True)
                key = re.sub(r"\W", "_", str(path))  # The file name alone may be another module's.
                sys.path.insert(0, str(path.parent))  # Python does the same for a script.
                spec = importlib.util.spec_from_file_location(key, path)
                assert spec is not None
                assert spec.loader is not None
                module = sys.modules[key] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise ValueError(f"{where} cannot be imported: {_in_one_line(error)}") from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        names = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        defined = ", ".join(names[:20]) or "nothing"
        raise ValueError(f"{where} has no {name!r}; it defines: {defined}") from error


def _make(place: str, make: object) -> object:
    """Returns ``make()``, or ``make`` itself if it is a module or not callable."""
    if isinstance(make, nn.Module) or not callable(make):
        return make
    # a constructor that reads values fails on the meta device, and runs again below
    with contextlib.suppress(Exception, SystemExit), torch.device("meta"):
        return make()
    try:
        return make()
    except (Exception, SystemExit) as error:
        hint = (
            ": expected a function without required arguments"
            if isinstance(error, TypeError)
            else ""
        )
        raise ValueError(f"{place} cannot be built: {_in_one_line(error)}{hint}") from error


def _in_one_line(error: BaseException) -> str:
    """Returns the error as one line of text, with the last line of the user's file."""
    if isinstance(error, SystemExit):
        return "it ends the program: put its main part under if __name__ == '__main__'"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 400 else text[:400] + ' ...'}{where}"


def run_console_script() -> int:
    """Runs ``balanced-parallel``.

    Modules of the present folder can be imported, as with ``python -m``. The garbage collector
    visits all imported modules, also at the end of the process: it stays off.
    """
    gc.disable()
    sys.path.insert(0, os.getcwd())
    try:
        return main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(run_console_script())
