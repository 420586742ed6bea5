"""The flags of train.py, and their checks. Bad input ends with one line on stderr and exit code 2."""

import argparse
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIMULATED_STEPS = 12  # by default: a simulation shows memory and equal losses, it does not train a model


def number(kind: type[int] | type[float], minimum: float, below: float = float("inf")) -> Callable[[str], Any]:
    """Returns a parser of whole numbers of at least ``minimum``, or of real numbers greater than it, that are below a limit."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
            fits = minimum <= value < below if kind is int else minimum < value < below
        except ValueError:
            fits = False
        if not fits:
            wanted = f"a whole number of at least {minimum}" if kind is int else f"a number greater than {minimum}"
            limit = "" if below == float("inf") else f" and below {below}"
            raise argparse.ArgumentTypeError(f"{text!r} was given, expected {wanted}{limit}")
        return value

    return parse


def rows_or_auto(text: str) -> int | str:
    """Returns a number of rows, or ``"auto"``."""
    return text if text == "auto" else number(int, 1)(text)


def device_list(text: str) -> list[int | str]:
    """Splits ``"cpu,cpu"`` or ``"0,1"`` into devices."""
    return [int(name) if name.strip().isdecimal() else name.strip() for name in text.split(",")]


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser. The description holds the usage, so an error is one line without it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("train.py", usage=argparse.SUPPRESS, description=description, formatter_class=raw)
    add = parser.add_argument
    add("--task", choices=["text", "digits"], default="text", help="what to learn (default: text)")
    add("--data", type=Path, metavar="FILE_OR_FOLDER", help="text to learn (default: Python's standard library)")
    add("--vocabulary", type=number(int, 1), metavar="N", help="words of the text task (default: 8192, or all of a small text)")
    steps = f"updates (default: 200 for text, 300 for digits, {SIMULATED_STEPS} with --simulate)"
    add("--steps", type=number(int, 1), metavar="N", help=steps)
    add("--epochs", type=number(int, 1), metavar="N", help="passes over the data (default: until --steps)")
    rows = "rows per update, over all devices and ranks (default: 24)"
    add("--batch-size", type=number(int, 1), default=24, metavar="N", help=rows)
    forward = "rows per device in one forward (default: auto, its whole share, and less where that does not fit)"
    add("--micro-batch-size", type=rows_or_auto, default="auto", metavar="N", help=forward)
    pack = "rows of a device: equal numbers, or equal cost after padding to its own longest row (default: cost, for text)"
    add("--pack", choices=["cost", "rows"], default="cost", help=pack)
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="arithmetic of forward and loss (default: fp32)")
    add("--devices", type=device_list, metavar="LIST", help="such as cpu,cpu,cpu or 0,1 (default: every accelerator, else cpu)")
    strategy = "of several devices: replicas in one process, ddp or fsdp under torchrun (default: auto, which says why)"
    add("--strategy", choices=["auto", "replicas", "ddp", "fsdp"], default="auto", help=strategy)
    add("--max-grad-norm", type=number(float, 0), default=1.0, metavar="X", help="clip the gradient's global norm (default: 1.0)")
    add("--learning-rate", type=number(float, 0), metavar="X", help="of AdamW (default: 0.003)")
    add("--dropout", type=number(float, 0, 1), default=0.0, metavar="P", help="rate in the network (default: none)")
    add("--reproducible", action="store_true", help="draw the dropout of one device with any devices, ranks and micro-batches")
    add("--seed", type=number(int, 0, 2**64), default=0, metavar="N", help="of the weights and of the order of rows (default: 0)")
    add("--workers", type=number(int, 0), default=0, metavar="N", help="processes that load data, per rank (default: 0)")
    every = "save all state every N updates and at SIGTERM or Ctrl-C, in DIR/checkpoints (default: never)"
    add("--checkpoint-every", type=number(int, 1), metavar="N", help=every)
    add("--keep", type=number(int, 1), default=3, metavar="K", help="checkpoints that stay, the newest (default: 3)")
    add("--resume", action="store_true", help="go on from the newest checkpoint in DIR/checkpoints, if there is one")
    add("--simulate", type=number(int, 1), metavar="N", help="run on N simulated GPUs, with a table of their memory at the end")
    add("--memory", metavar="SIZE", help="of each simulated GPU, such as 2GiB, or a list: 2GiB,1GiB (default: no limit)")
    compared = "with --simulate: compare losses with one device and memory with nn.DataParallel, and draw the memory"
    add("--plot", type=Path, metavar="FILE", help=compared)
    add("--plan", action="store_true", help="print how --batch-size fits --devices or --simulate with --memory, and do not train")
    add("--html", type=Path, metavar="FILE", help="write a page about the memory of an update, with the plan if --plan")
    add("--tensorboard", action="store_true", help="write DIR/tensorboard, for tensorboard --logdir DIR/tensorboard")
    add("--out", type=Path, default=Path("runs/latest"), metavar="DIR", help="where results go (default: runs/latest)")
    return parser


def check(flags: argparse.Namespace) -> None:
    """Checks flags that depend on one another, before anything runs.

    Raises:
        ImportError: ``--plot`` needs matplotlib, ``--html`` plotly, and ``--tensorboard`` tensorboard.
        ValueError: two flags do not fit together.
    """
    if flags.task == "digits" and (flags.data or flags.vocabulary):
        raise ValueError("--data and --vocabulary are for --task text")
    if flags.simulate is None and (flags.plot or (flags.memory and not flags.plan)):
        raise ValueError("--memory and --plot describe simulated GPUs, expected --simulate N beside them")
    if flags.plot and flags.dropout:
        raise ValueError("--plot compares with plain PyTorch, whose --dropout draws other numbers: give one of them")
    if flags.plan and flags.simulate and not flags.memory:
        raise ValueError("--plan for --simulate needs their --memory, such as 2GiB")
    if not flags.resume and any((flags.out / "checkpoints").glob("step-*")):
        raise ValueError(f"{flags.out}/checkpoints is of another run: go on with it by --resume, or give another --out")
    for flag, package in (("plot", "matplotlib"), ("html", "plotly"), ("tensorboard", "tensorboard")):
        if getattr(flags, flag) and importlib.util.find_spec(package) is None:  # an error now, not after the training
            raise ImportError(f"--{flag} needs the package {package}: pip install {package}")
    for path in (flags.plot, flags.html):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)


def memory_sizes(flags: argparse.Namespace) -> Any:
    """Returns ``--memory`` as the library takes it: one size, a list with one per device, or None."""
    sizes = flags.memory.split(",") if flags.memory else [None]
    return sizes[0] if len(sizes) == 1 else sizes


@contextlib.contextmanager
def one_line_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turns errors of the input into one line on stderr and exit code 2."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        parser.error(" ".join(str(error).split()))
