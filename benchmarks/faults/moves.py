"""Kills runs of train.py with dropout, and lets each go on in another layout. See README.md.

The losses and the weights at the end are compared with those of an undisturbed run on one device.
"""

import argparse
import itertools
import os
import random
import tempfile
from pathlib import Path

import torch
from main import LAYOUTS, losses, run
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor

SETTINGS = {
    "dropout of 0.1, `--reproducible`": ["--dropout", "0.1", "--reproducible"],
    "no dropout": [],
    "dropout of 0.1": ["--dropout", "0.1"],
}
Outcome = tuple[dict[int, float], Tensor]  # losses by step, and all weights


def draw_fault(layout: str, dice: random.Random) -> str:
    """Returns a fault of a layout, after at least one checkpoint."""
    ranks, _ = LAYOUTS[layout]
    place = dice.choice(
        ["forward", "backward", "between", "checkpoint", "checkpoint-complete"] + ["exchange", "hang"] * (ranks > 1)
    )
    rank = 0 if place == "checkpoint-complete" else dice.randrange(max(1, ranks))
    return f"{place}:{rank}:{2 if place.startswith('checkpoint') else dice.choice([4, 5])}"


def outcome(out: Path) -> Outcome:
    """Returns the losses and the weights of a run that has ended."""
    weights = load_file(out / "model.safetensors")
    return {line["step"]: line["loss"] for line in losses(out) if "loss" in line}, torch.cat(
        [*map(torch.flatten, weights.values())]
    )


def move(layouts: list[str], faults: list[str], out: Path, flags: list[str]) -> int:
    """Runs until each fault in turn, in one layout after the other, and in the last to the end. Returns the faults that came."""
    for number, layout in enumerate(layouts):
        done = run(layout, faults, out, 0, *flags)
        if done.returncode == 0:  # a fault at a place that this start has not come to
            break
        if number == len(layouts) - 1:
            raise RuntimeError(f"{layout} has failed without a fault: {done.stderr[-3000:]}")
    return len(os.listdir(out / "faults"))


def errors(moved: Outcome, expected: Outcome) -> tuple[float, float]:
    """Returns the largest relative difference of a loss, and that of the weights: the norm of the difference over the norm."""
    if moved[0].keys() != expected[0].keys():
        raise RuntimeError(f"steps {sorted(moved[0])}, expected {sorted(expected[0])}")
    of_losses = max(abs(moved[0][step] - loss) / loss for step, loss in expected[0].items())
    return of_losses, float((moved[1] - expected[1]).norm() / expected[1].norm())


def main() -> None:
    """Prints a table of all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice, rows = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in SETTINGS.items():
            runs = arguments.runs if "--reproducible" in flags else -(-arguments.runs // 3)
            alone = Path(folder) / name / "alone"
            run("one device", [], alone, 0, *flags).check_returncode()
            expected, differences, faults_of_all, moves = outcome(alone), [], 0, set()
            for number in range(runs):
                layouts = dice.sample(list(LAYOUTS), dice.randint(2, 3))
                faults = [draw_fault(layout, dice) for layout in layouts[:-1]]
                out = Path(folder) / name / f"{number}"
                came = move(layouts, faults, out, flags)
                differences.append(errors(outcome(out), expected))
                faults_of_all += came
                moves |= {*itertools.pairwise(layouts[: came + 1])}
                print(
                    f"{number + 1} of {runs}: {' -> '.join(layouts)}, {' '.join(faults)}, {came} came: {differences[-1]}",
                    flush=True,
                )
            largest = [f"{max(column):.0e}" for column in zip(*differences, strict=True)]
            rows.append([name, runs, faults_of_all, len(moves), *largest])
    print(tabulate(rows, ["", "runs", "faults", "kinds of moves", "loss", "weights"], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
