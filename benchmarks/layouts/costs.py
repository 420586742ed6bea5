"""Cost of an update with the same bits: time of the processor, bytes of gradients, and traffic between two ranks."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from networks import Problem, make_gpt2, make_problem
from torch import nn
from torch.profiler import ProfilerActivity, profile

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize, simulate

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from measuring import event_bytes

SETTINGS: dict[str, Any] = {"without": False, "reproducible=True": True, 'reproducible="bits"': "bits"}
ROWS, SIZE, ROUNDS = 8, 2, 60


def make_convnet() -> Problem:
    """Returns a narrow convnet with group norm, and a batch of small images."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    module = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(24, 5))
    return Problem(module, torch.randn(ROWS, 3, 16, 16), (torch.randint(5, (ROWS,)),), nn.CrossEntropyLoss(), None)


def make_text(layers: int, width: int) -> Problem:
    """Returns a GPT-2 and a batch of 10 tokens in each row."""
    problem = make_problem("GPT-2", ROWS, torch.float32)
    return problem._replace(module=make_gpt2(layers, width))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "GPT-2, 12 layers of width 32": lambda: make_text(12, 32),
    "GPT-2, 2 layers of width 256": lambda: make_text(2, 256),
    "convnet": make_convnet,
}
WIDE = "GPT-2, 2 layers of width 256"


def make_step(problem: Problem, devices: list[str], reproducible: Any) -> TrainStep:
    """Returns a step of micro-batches of two rows, without dropout."""
    problem.module.eval()
    model = DataParallelModel(problem.module, devices)
    criterion = DataParallelCriterion(problem.criterion, weight=problem.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainStep(model, criterion, optimizer, micro_batch_size=SIZE, max_grad_norm=1.0, reproducible=reproducible)


def measure_times() -> dict[tuple[str, int], list[float]]:
    """Returns the median milliseconds of the processor for each setting, by problem and number of replicas. They take turns."""
    found = {}
    for name, make in PROBLEMS.items():
        for replicas in (1, 2):
            problems = [make() for _ in SETTINGS]
            pairs = zip(problems, SETTINGS.values(), strict=True)
            steps = [make_step(problem, ["cpu"] * replicas, setting) for problem, setting in pairs]
            times: list[list[float]] = [[] for _ in SETTINGS]
            for turn in range(ROUNDS + 3):
                for number in (0, 1, 2) if turn % 2 else (2, 1, 0):
                    started = time.process_time()
                    steps[number](problems[number].inputs, problems[number].targets)
                    times[number].append(time.process_time() - started)
            found[name, replicas] = [1e3 * statistics.median(each[3:]) for each in times]
            print(name, replicas, found[name, replicas], flush=True)
    return found


def measure_bytes() -> dict[int, list[tuple[float, float]]]:
    """Returns bytes for each trained element, by number of simulated devices: held after ``add``, and at the peak of ``apply``.

    Each number is that of the device with the most.
    """
    return {count: [_bytes_of(count, setting) for setting in SETTINGS.values()] for count in (1, 2)}


def _bytes_of(count: int, setting: Any) -> tuple[float, float]:
    with simulate(count) as cluster:
        problem = PROBLEMS[WIDE]()
        step = make_step(problem, [f"sim:{number}" for number in range(count)], setting)
        inputs, targets = problem.inputs.to("sim:0"), tuple(target.to("sim:0") for target in problem.targets)
        step(inputs, targets)  # makes the state of the optimizer, and the copies of the parameters
        step.optimizer.zero_grad()
        elements = sum(parameter.numel() for parameter in problem.module.parameters())
        before = cluster.live
        step.add(inputs, targets)
        held = max(now - then for now, then in zip(cluster.live, before, strict=True))
        cluster.reset_peak()
        step.apply()
        peak = max(most - then for most, then in zip(cluster.peak, before, strict=True))
        return held / elements, peak / elements


def be_traffic() -> dict[str, Counter[str]]:
    """Returns the bytes in and out of this rank for each trained element, by setting and collective, in the third update."""
    return {name: _traffic_of(setting) for name, setting in SETTINGS.items()}


def _traffic_of(setting: Any) -> Counter[str]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    problem = PROBLEMS[WIDE]()
    problem.module.eval()
    model, criterion = parallelize(problem.module, problem.criterion, ["cpu"], weight=problem.weight, strategy="ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=SIZE, max_grad_norm=1.0, reproducible=setting)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    batch = problem.inputs[rows], tuple(target[rows] for target in problem.targets)
    for _ in range(2):
        step(*batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(*batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    elements = sum(parameter.numel() for parameter in problem.module.parameters())
    found: Counter[str] = Counter()
    for event in events:
        if event.get("name", "").startswith("gloo:"):
            found[event["name"][5:]] += event_bytes(event["name"], event.get("args", {}), ranks)
    return Counter({name: round(count / elements, 3) for name, count in found.items()})
