"""Rows of unequal length: what do the hottest device and the slowest shard save where rows are cut by cost?

Equal rows of the batch that is padded to its longest row, as any ``DataLoader`` makes it, compared with rows that are cut by cost
and padded after the cut. Run without arguments, it measures everything and writes the README beside it.
"""

import copy
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from balanced_parallel import BalancedOptimizer, ByCost, DataParallelCriterion, DataParallelModel, TrainStep, simulate
from balanced_parallel.batch.plan import cut_by_cost, split_sizes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from problems import Problem, image_problem, text_problem  # noqa: E402

DEVICES = (1, 2, 4, 8)
ROWS = (32, 64, 256, 1024)
BATCHES = 50  # for the tables of padding
REPEATS = 5
MIB = 2**20
TOKENS_TARGET, TIME_TARGET = 1.1, 0.4


def sampled(problem: Problem, rows: int, seed: int) -> list[Any]:
    """Returns an effective batch."""
    return random.Random(seed).sample(list(problem.samples), rows)


def padded(costs: Sequence[float]) -> float:
    """Returns the cost of a shard after padding."""
    return len(costs) * max(costs)


# Padding -----------------------------------------------------------------------------------------------------------------------


class Padding(NamedTuple):
    """Words or pixels of the hottest device, in those of equal rows.

    Attributes:
        whole: equal rows of the padded batch: 1.
        alone: equal rows, each shard padded to its own longest.
        cut: one shard by cost for each device.
        four, sixteen: so many shards by cost for each device, one after the other.
        bound: no padding at all, and no device with less than the longest row.
    """

    whole: float
    alone: float
    cut: float
    four: float
    sixteen: float
    bound: float


def padding(costs: Sequence[int], devices: int) -> Padding:
    """Measures the padding of one batch."""
    sizes = split_sizes(len(costs), devices)
    starts = [sum(sizes[:index]) for index in range(devices)]
    whole = max(sizes) * max(costs)
    equal = max(padded(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True) if size)
    bound = max(sum(costs) / devices, max(costs))
    several = [hottest(costs, devices, micro_batches) for micro_batches in (1, 4, 16)]
    return Padding(*(found / whole for found in (whole, equal, *several, bound)))


def hottest(costs: Sequence[int], devices: int, micro_batches: int) -> float:
    """Returns the sum of the shards of the hottest device. Neighbours run together, as in :class:`TrainStep`."""
    shards = [padded([costs[row] for row in rows]) for rows in cut_by_cost(costs, devices * micro_batches)]
    return max(sum(shards[index::devices]) for index in range(devices))


def mean_padding(problem: Problem, rows: int, devices: int, batches: int = BATCHES) -> Padding:
    """Returns the mean over several batches."""
    found = [padding([problem.cost(one) for one in sampled(problem, rows, seed)], devices) for seed in range(batches)]
    return Padding(*(statistics.mean(column) for column in zip(*found, strict=True)))


def padding_table(problem: Problem) -> tuple[str, list[str]]:
    """Returns the table, and the targets that were missed."""
    table, missed = [], []
    for rows in ROWS:
        for devices in DEVICES:
            found = mean_padding(problem, rows, devices)
            ratios = [f"{value / found.bound:.2f}" for value in (found.cut, found.four, found.sixteen)]
            table.append([rows, devices, *(f"{value:.3f}" for value in found), *ratios])
            if rows >= 64 and devices == 4 and found.cut / found.bound > TOKENS_TARGET:
                one, four, sixteen = ratios
                where = f"{problem.name}, {rows} rows on 4 devices"
                missed.append(f"{where}: {one} of the lower bound, {four} in 4 micro-batches per device, {sixteen} in 16")
    headers = ["rows", "devices", "equal rows", "each padded alone", "cut by cost", "in 4 micro-batches", "in 16", "lower bound"]
    return tabulate(table, [*headers, "cut / bound", "in 4 / bound", "in 16 / bound"], "github", disable_numparse=True), missed


# Memory and gradients ----------------------------------------------------------------------------------------------------------


def plain_gradients(problem: Problem, batch: list[Any]) -> list[Tensor]:
    """Returns the gradients of the plain program with the whole padded batch, in float64."""
    torch.manual_seed(0)
    module = problem.make().double()
    inputs, targets = in_double(problem.collate(batch))
    problem.criterion(module(*inputs) if isinstance(inputs, tuple) else module(inputs), targets).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def in_double(batch: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    """Returns the batch with images in float64."""
    inputs, targets = batch
    cast = [one.double() if one.is_floating_point() else one for one in (inputs if isinstance(inputs, tuple) else (inputs,))]
    return (tuple(cast) if isinstance(inputs, tuple) else cast[0]), targets


def measure(problem: Problem, batch: list[Any], devices: int, by_cost: bool, expected: list[Tensor]) -> tuple[list[int], float]:
    """Returns the peak of each device in the second step, and the largest difference of a gradient from the expected ones."""
    with simulate(devices) as cluster:
        torch.manual_seed(0)
        module = problem.make().double()
        model, criterion = DataParallelModel(module), DataParallelCriterion(copy.deepcopy(problem.criterion))
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.0, momentum=0.9)
        cut = ByCost(problem.cost, collate=lambda rows: in_double(problem.collate(rows))) if by_cost else None
        step = TrainStep(model, criterion, optimizer, cut=cut)
        for _ in range(2):
            cluster.reset_peak()
            step(batch) if by_cost else step(*in_double(problem.collate(batch)))
        gradients = [grad for parameter in module.parameters() if (grad := optimizer.gradient(parameter)) is not None]
        scale = max(float(one.abs().max()) for one in expected)
        error = max(float((one.cpu() - other).abs().max()) for one, other in zip(gradients, expected, strict=True)) / scale
        return cluster.peak, error


def slowest_shards(problem: Problem, batch: list[Any], devices: int, repeats: int = REPEATS) -> float:
    """Returns the time of the slowest shard cut by cost, run alone on the CPU, in that of a shard of equal rows."""
    costs = [problem.cost(one) for one in batch]
    inputs, targets = problem.collate(batch)
    rows = slice(0, max(split_sizes(len(batch), devices)))
    cut = tuple(one[rows] for one in inputs) if isinstance(inputs, tuple) else inputs[rows]
    shards = [(cut, targets[rows]), *(problem.collate([batch[row] for row in rows]) for rows in cut_by_cost(costs, devices))]
    module = problem.make()
    seconds: list[list[float]] = [[] for _ in shards]
    for _ in range(repeats + 1):
        for shard, times in zip(shards, seconds, strict=True):  # interleaved, so that all meet the same machine
            times.append(timed(problem, module, *shard))
    equal, *others = (min(times[1:]) for times in seconds)
    return max(others) / equal


def timed(problem: Problem, module: torch.nn.Module, inputs: Any, targets: Tensor) -> float:
    """Returns the seconds of one forward and backward."""
    started = time.perf_counter()
    problem.criterion(module(*inputs) if isinstance(inputs, tuple) else module(inputs), targets).backward()
    return time.perf_counter() - started


def steps_table(problem: Problem, rows: int = 64, devices: Sequence[int] = DEVICES) -> tuple[str, list[str]]:
    """Returns the table of peaks, gradients and times, and the targets that were missed."""
    batch = sampled(problem, rows, seed=0)
    expected = plain_gradients(problem, batch)
    table, missed = [], []
    for count in devices:
        equal, cut = (measure(problem, batch, count, by_cost, expected) for by_cost in (False, True))
        ratio = slowest_shards(problem, batch, count)
        peaks = [f"{max(peak) / MIB:.1f}" for peak, _ in (equal, cut)]
        off = [f"{error:.0e}" for _, error in (equal, cut)]
        table.append([count, *peaks, f"{max(cut[0]) / max(equal[0]):.2f}", f"{ratio:.2f}", *off])
        if count == 4 and ratio > TIME_TARGET:
            missed.append(f"{problem.name}, 4 devices: the slowest shard takes {ratio:.2f} of the time of equal rows")
    headers = [
        "devices",
        "peak of equal rows, MiB",
        "cut by cost",
        "ratio",
        "time of the slowest shard",
        "off by",
        "off by (cut)",
    ]
    return tabulate(table, headers, "github", disable_numparse=True), missed


def report() -> str:
    """Returns the README."""
    title, rest = (__doc__ or "").split("\n\n", 1)
    parts, missed = [f"# {title}\n\n{rest.split(' Run without')[0].strip()}"], []
    for problem in (text_problem(), image_problem()):
        (padding_of, beyond), (steps, slow) = padding_table(problem), steps_table(problem)
        missed += beyond + slow
        parts.append(
            f"## {problem.name}\n\n{problem.description}.\n\n### Padded {problem.unit} of the hottest device\n\n{padding_of}"
        )
        parts.append(f"### A step of 64 rows\n\n{steps}")
    values = {
        "batches": BATCHES,
        "missed": "\n".join(f"- {one}" for one in missed) or "None.",
        "environment": f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
    }
    return "\n\n".join(parts) + "\n\n" + (HERE / "page.md").read_text().format(**values)


def main() -> None:
    """Writes the README and prints it."""
    text = report()
    (HERE / "README.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
