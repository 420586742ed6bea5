"""Runs ``scripts/train.py`` as a user runs it."""

import itertools
import json
import shlex
from pathlib import Path

from .processes import run_script
from .torchrun import run_torchrun

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
SENTENCES = "the cat sat on the mat . the dog ate the cat ; " * 200


def words_of(flags):
    """Returns the words of a command line. Text may have several, as in a shell; a path is one."""
    lists = [shlex.split(flag) if isinstance(flag, str) else [flag] for flag in flags]
    return [*itertools.chain(*lists)]


def run(*flags, **environment):
    return run_script(SCRIPT, *words_of(flags), **environment)


def train(out, *flags, ranks=1):
    done = (
        run("--out", out, *flags)
        if ranks == 1
        else run_torchrun(f"--nproc-per-node={ranks}", SCRIPT, "--out", out, *words_of(flags))
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, lines, json.loads((out / "summary.json").read_text())
