"""Runs ``scripts/train.py`` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SENTENCES = "the cat sat on the mat . the dog ate the cat ; " * 200


def run(*flags, launcher=(sys.executable,), timeout=200, **environment):
    command = [*launcher, str(SCRIPT), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment)


def train(out, *flags, **settings):
    done = run("--out", out, *flags, **settings)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, lines, json.loads((out / "summary.json").read_text())
