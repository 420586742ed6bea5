"""Runs train.py on two ranks, one of which has another setting, and counts what comes of it.

"refused" counts runs in which both ranks named the difference, "equal" those that trained as the undisturbed run. Neither another
model nor a hang may come of it.

Run as ``settings.py RANK FLAG VALUE SCRIPT ...``, it is a rank: the one with this number gets the flag too.
"""

import argparse
import collections
import os
import random
import runpy
import sys
import tempfile
from pathlib import Path

from main import HERE, SCRIPT, losses
from tabulate import tabulate

LAYOUTS = {"2 ranks": [], "2 ranks, FSDP2": ["--strategy", "fsdp"]}
SETTINGS = {  # values of one rank, beside train.py's own
    "--batch-size": ["360", "500"],
    "--seed": ["3", "7"],
    "--learning-rate": ["0.1", "0.003"],
    "--precision": ["bf16"],
    "--max-grad-norm": ["0.5", "2.0"],
    "--micro-batch-size": ["auto", "100"],
    "--strategy": ["auto"],
}
LIMIT = 120.0  # seconds, then a run counts as hanging


def run(out: Path, layout: str, rank: int, flag: str, value: str) -> tuple[int, str]:
    """Returns the exit code of torchrun, and what the ranks have written to stderr; -1 for a hang."""
    from helpers.torchrun import run_torchrun  # main has added its folder

    program = [HERE / "settings.py", rank, flag, value, SCRIPT, "--out", out, "--task", "digits", "--batch-size", 719]
    try:
        done = run_torchrun(*program, "--steps", 4, *LAYOUTS[layout], timeout=LIMIT)
    except AssertionError:
        return -1, ""
    return done.returncode, done.stderr


def outcome(code: int, errors: str, out: Path, expected: Path) -> str:
    """Returns the column of the table that a run counts in."""
    if code == -1:
        return "hang"
    if code:
        return "refused" if "the ranks differ" in errors else "failed"
    return "equal" if losses(out) == losses(expected) else "other losses"


def main() -> None:
    """Prints a table of all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    dice, counts = random.Random(flags.seed), collections.Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            run(Path(folder) / layout, layout, -1, "", "")
        for number in range(flags.runs):
            layout, flag = dice.choice(list(LAYOUTS)), dice.choice(list(SETTINGS))
            value, out = dice.choice(SETTINGS[flag]), Path(folder) / str(number)
            code, errors = run(out, layout, dice.randrange(2), flag, value)
            column = outcome(code, errors, out, Path(folder) / layout)
            counts[layout, column] += 1
            print(f"{number + 1} of {flags.runs}: {layout}, {flag} {value}: {column}", flush=True)
            if column in ("failed", "other losses"):
                print(errors[-2000:], flush=True)
    columns = ["refused", "equal", "other losses", "failed", "hang"]
    rows = [[layout, *(counts[layout, column] for column in columns)] for layout in LAYOUTS]
    print(tabulate(rows, ["layout", *columns], tablefmt="github"))


def be_rank() -> None:
    """Runs the script of the command line as a rank."""
    rank, flag, value, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments, *([flag, value] if os.environ["RANK"] == rank else [])]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    be_rank() if "RANK" in os.environ else main()
