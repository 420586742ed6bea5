"""Interrupts many runs of train.py at random steps, layouts and places, and compares their results. See README.md."""

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "scripts" / "train.py"
STEPS, EVERY = 12, 2
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from helpers.processes import run_script  # noqa: E402 - processes are forked, which is five times as fast
from helpers.torchrun import run_torchrun  # noqa: E402

LAYOUTS: dict[str, tuple[int, list[str]]] = {  # ranks; 0 is without torchrun, under which a process has one device
    "one device": (1, ["--devices", "cpu"]),
    "3 replicas": (0, ["--devices", "cpu,cpu,cpu"]),
    "2 ranks": (2, []),
    "3 ranks": (3, []),
    "2 ranks, FSDP2": (2, ["--strategy", "fsdp"]),
}
PLACES = ("forward", "backward", "exchange", "between", "loader", "hang", "checkpoint", "checkpoint-complete")
PLACES += ("checkpoint-again", "read-error")
LIMIT = 300.0  # seconds, then a run counts as hanging
MOVES = ("one device", "3 ranks", "2 ranks")  # The run is killed in each but the last.
BITS = ("--reproducible", "bits", "--dropout", 0.1)

FLAGS = argparse.ArgumentParser(description=__doc__)
FLAGS.add_argument("--runs", type=int, default=300)
FLAGS.add_argument("--seed", type=int, default=0)
FLAGS.add_argument("--only", choices=LAYOUTS, help="runs of one layout")
FLAGS.add_argument(
    "--moves", type=int, default=0, help="runs with --reproducible bits that go on in other layouts, and no others"
)


def run(layout: str, faults: list[str], out: Path, restarts: int, *more: Any) -> Any:
    """Runs train.py with the faults and more flags, and starts it again after each. Returns a ``subprocess.CompletedProcess``.

    Raises:
        AssertionError: it has not ended in time.
    """
    ranks, flags = LAYOUTS[layout]
    program = [HERE / "inject.py", out / "faults", ",".join(faults) or "none:0:0", SCRIPT, "--out", out, "--task", "digits"]
    program += ["--batch-size", 719, "--steps", STEPS, "--checkpoint-every", EVERY, "--resume", *flags, *more]
    if ranks:
        launcher = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        return run_torchrun(*launcher, *program, timeout=LIMIT)
    done = run_script(*program, timeout=LIMIT)
    return run(layout, faults, out, restarts - 1, *more) if done.returncode and restarts else done


def draw_faults(layout: str, dice: random.Random) -> list[str]:
    """Returns one to three faults that this layout can have."""
    ranks, _ = LAYOUTS[layout]
    places = [place for place in PLACES if ranks > 1 or place not in ("exchange", "hang")]
    faults = []
    for _ in range(dice.randint(1, 3)):
        place = dice.choice(places)
        rank = 0 if place in ("checkpoint-complete", "checkpoint-again") else dice.randrange(max(1, ranks))  # rank 0 completes it
        most = {"checkpoint": 2, "checkpoint-complete": 2, "loader": 2, "checkpoint-again": 6, "read-error": 1}.get(place, 3)
        faults.append(f"{place}:{rank}:{dice.randint(1, most)}")
    return sorted(faults, key=lambda fault: fault.startswith("read-error"))  # at a start that has something to read


def losses(out: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def judge(layout: str, faults: list[str], expected: list[dict[str, Any]], out: Path) -> tuple[str, int]:
    """Returns the outcome of a run, and the number of faults that came."""
    try:
        done = run(layout, faults, out, len(faults))
    except AssertionError:
        return "hang", 0
    came = len(os.listdir(out / "faults"))
    if done.returncode:
        print(f"{layout} {faults}: exit code {done.returncode}\n{done.stderr[-3000:]}", flush=True)
        return "failed", came
    found = losses(out)
    if found == expected:
        return "equal", came
    steps = [line["step"] for line in found if "loss" in line]
    if len(steps) > len(set(steps)):
        return "trained twice", came
    return "lost" if len(steps) < STEPS else "other losses", came


def move(out: Path, dice: random.Random) -> list[str]:
    """Trains to the end in ``MOVES``, with a fault in each but the last, and returns the faults."""
    faults: list[str] = []
    for layout in MOVES[:-1]:
        ranks, _ = LAYOUTS[layout]
        place = dice.choice(["forward", "backward", "between", "checkpoint", *["exchange"] * (ranks > 1)])
        number = 2 if place == "checkpoint" else dice.randint(3, 5)  # after the first checkpoint of this start
        faults.append(f"{place}:{dice.randrange(ranks)}:{number}")
        done = run(layout, faults, out, 0, *BITS)
        assert done.returncode, f"{layout} {faults} has not failed"
        assert len(losses(out)) < STEPS
    run(MOVES[-1], faults, out, 0, *BITS).check_returncode()
    return faults


def digests(out: Path) -> set[str]:
    """Returns the digest at the end of a run, and that of its last checkpoint, which are one."""
    paths = out / "summary.json", out / "checkpoints" / f"step-{STEPS:08}" / "checkpoint.json"
    return {json.loads(path.read_text())["digest"] for path in paths}


def print_moves(runs: int, dice: random.Random, folder: Path) -> None:
    """Prints how many runs that moved have the losses and the digest of the undisturbed one."""
    run(MOVES[0], [], folder / "undisturbed", 0, *BITS).check_returncode()
    expected = losses(folder / "undisturbed"), digests(folder / "undisturbed")
    equal = count = 0
    for number in range(1, runs + 1):
        out = folder / str(number)
        faults = move(out, dice)
        is_equal = (losses(out), digests(out)) == expected and len(expected[1]) == 1
        equal += is_equal
        count += len(os.listdir(out / "faults"))
        print(
            f"{number} of {runs}: {' -> '.join(MOVES)}, {' '.join(faults)}: {'equal' if is_equal else 'other bits'}", flush=True
        )
    print(tabulate([[" -> ".join(MOVES), runs, count, equal]], ["layouts", "runs", "faults", "equal digests"], tablefmt="github"))


def main() -> None:
    """Prints a table of all runs."""
    flags = FLAGS.parse_args()
    if flags.moves:
        with tempfile.TemporaryDirectory() as folder:
            print_moves(flags.moves, random.Random(flags.seed), Path(folder))
        return
    dice, outcomes, counts = random.Random(flags.seed), collections.Counter[tuple[str, str]](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        layouts = [flags.only] if flags.only else list(LAYOUTS)
        for layout in layouts:  # undisturbed
            run(layout, [], Path(folder) / layout, 0).check_returncode()
            expected[layout] = losses(Path(folder) / layout)
        began = time.monotonic()
        for number in range(1, flags.runs + 1):
            layout = dice.choice(layouts)
            faults = draw_faults(layout, dice)
            outcome, came = judge(layout, faults, expected[layout], Path(folder) / str(number))
            outcomes[layout, outcome] += 1
            counts[layout] += came
            seconds = (time.monotonic() - began) / number
            print(f"{number} of {flags.runs}, {seconds:.0f} s each: {layout}, {' '.join(faults)}: {outcome}", flush=True)
    columns = ["equal", "lost", "trained twice", "other losses", "failed", "hang"]
    rows = [
        [layout, sum(outcomes[layout, column] for column in columns), counts[layout], *(outcomes[layout, one] for one in columns)]
        for layout in layouts
    ]
    print(tabulate(rows, ["layout", "runs", "faults", *columns], tablefmt="github"))


if __name__ == "__main__":
    main()
