"""Runs after an out of memory at any place, compared with undisturbed ones. And the cost when it does not happen.

Faults: 300 runs on simulated devices, in one process and on two ranks. In each, one allocation of the third step fails: a random
one of its forward, backward, reduction or update. Cost: a step with ``micro_batch_size="auto"`` beside one without, in turns. Run
without arguments, it measures and writes the README beside it.
"""

import argparse
import collections
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, parallelize, simulate

HERE = Path(__file__).parent
ROWS, CLASSES = 13, 5
Kind = tuple[bool, str, bool]  # balanced optimizer, precision, the batch comes in two parts
KINDS: list[Kind] = [(balanced, kind, add) for balanced in (False, True) for kind in ("fp32", "fp16") for add in (False, True)]


def build() -> nn.Module:
    """Returns a network with batch norm and dropout."""
    torch.manual_seed(3)
    norm = nn.Unflatten(1, (2, 8)), nn.BatchNorm1d(2), nn.Flatten()
    return nn.Sequential(
        nn.Linear(4, 16), *norm, nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


class Run:
    """Four steps on all simulated devices, or on the one of this rank."""

    def __init__(self, kind: Kind, sizes: list[Any]) -> None:
        balanced, precision, self.add = kind
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if dist.is_initialized():
            model, criterion = parallelize(build(), nn.CrossEntropyLoss())
        else:
            net = build().to("sim:0")
            model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        adam = torch.optim.AdamW
        optimizer = BalancedOptimizer(model, adam, lr=0.1) if balanced else adam(model.parameters(), lr=0.1)
        self.model, self.sizes = model, sizes
        self.step = TrainStep(model, criterion, optimizer, micro_batch_size="auto", precision=precision, max_grad_norm=0.5)

    def train(self, number: int) -> Tensor:
        """Runs one step and returns its loss."""
        if self.sizes[number] != "auto":
            self.step.micro_batch_size = self.sizes[number]
        torch.manual_seed(number)
        inputs, targets = torch.randn(ROWS, 4), torch.randint(CLASSES, (ROWS,))
        targets[:2] = -100
        mine = slice(0, 8) if self.rank else slice(8, ROWS)
        some, wanted = (inputs[mine], targets[mine]) if dist.is_initialized() else (inputs, targets)
        if not self.add:
            return self.step(some, wanted)
        self.step.add(some[:3], wanted[:3])
        self.step.add(some[3:], wanted[3:])
        return self.step.apply()

    def state(self) -> list[Tensor]:
        """Returns all numbers of the run."""
        return [tensor.detach().cpu() for tensor in self.model.state_dict().values()] + [torch.get_rng_state()]


def whole_run(kind: Kind, sizes: list[Any], cluster: Any, fault: int = 0) -> tuple[list[Tensor], int | None, int]:
    """Returns the state at the end, the micro-batch size, and the number of allocations in the third step."""
    run, losses, count = Run(kind, sizes), [], 0
    for number in range(4):
        before = cluster.allocations
        if number == 2 and fault:
            cluster.fail_allocation(fault)
        losses.append(run.train(number).cpu())
        count = cluster.allocations - before if number == 2 else count
    return [torch.stack(losses), *run.state()], run.step.micro_batch_size, count


def count_faults(faults: int) -> "collections.Counter[str]":
    """Injects faults, and counts whether the run was that of smaller micro-batches."""
    choose, found = random.Random(0), collections.Counter[str]()
    with simulate(2) as cluster:
        for kind in KINDS:
            expected = {size: whole_run(kind, [None, None, size, size], cluster) for size in (None, 4, 3, 2, 1)}
            count = expected[None][2]
            for _ in range(-(-faults // len(KINDS))):
                place, rank = choose.random(), choose.randrange(2)
                here = not dist.is_initialized() or rank == dist.get_rank()
                state, size, _ = whole_run(kind, ["auto"] * 4, cluster, 1 + int(place * count) if here else 0)
                same = all(map(torch.equal, state, expected[size][0]))
                ended = "operator repeated" if size is None else "batch run again in smaller pieces"
                found[ended if same else "DIFFERENT"] += 1
    return found


def cost(rounds: int) -> tuple[float, float]:
    """Returns the time of a step with ``"auto"`` over that without, and of two equal steps, as medians."""
    with simulate(2) as cluster:
        steps = []
        for size in (None, "auto", None):
            torch.manual_seed(0)
            blocks = [nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(6)]
            net = nn.Sequential(nn.BatchNorm1d(16), *blocks, nn.Linear(64, 100)).to("sim:0")
            model, criterion = DataParallelModel(net, cluster.devices), DataParallelCriterion(nn.MSELoss())
            steps.append(TrainStep(model, criterion, torch.optim.AdamW(net.parameters()), micro_batch_size=size))  # type: ignore[arg-type]
        inputs, targets = torch.randn(64, 16, 64), torch.rand(64, 16, 100)
        times: list[list[float]] = [[], [], []]
        order = random.Random(0)
        for number in range(-2, rounds):
            for index in order.sample(range(3), 3):
                started = time.perf_counter()
                steps[index](inputs, targets)
                if number >= 0:
                    times[index].append(time.perf_counter() - started)
        plain, auto, equal = map(statistics.median, times)
        return auto / plain, equal / plain


def on_ranks(faults: int) -> "collections.Counter[str]":
    """Returns the result of :func:`count_faults` on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(HERE / "main.py"), "--faults", str(faults), "--rank"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3000)
    return collections.Counter(json.loads(done.stdout.split("counted ")[-1]))


def main() -> None:
    """Measures, and writes the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rank", action="store_true", help="run as a rank of torchrun")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.rank:
        dist.init_process_group("gloo")
        found = count_faults(flags.faults)
        if dist.get_rank() == 0:
            print("counted", json.dumps(found))
        return
    results = {"one process, two devices": count_faults(flags.faults), "two ranks": on_ranks(flags.faults)}
    ratio, equal = cost(flags.rounds)
    outcomes = sorted({outcome for found in results.values() for outcome in found} | {"DIFFERENT"})
    rows = [[name, *(found[outcome] for outcome in outcomes)] for name, found in results.items()]
    title, *about = (__doc__ or "").strip().splitlines()
    text = f"""# {title}

{chr(10).join(about).strip()}

{tabulate(rows, ["", *outcomes], "github")}

Runs are compared bit for bit with one of the same micro-batch sizes without a fault: losses, parameters, buffers, and random
numbers. Plain and balanced optimizers, fp32 and fp16, whole batches and batches in two parts, with dropout and batch norm.

| step with "auto" / without | equal steps |
|---|---|
| {ratio:.3f} | {equal:.3f} |

Medians of {flags.rounds} steps of a transformer of 6 layers on two simulated devices. The second number shows how much equal
steps differ.
Environment: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}.
To reproduce (it writes this file):

```bash
.venv/bin/python benchmarks/out_of_memory/main.py
```
"""
    (HERE / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
