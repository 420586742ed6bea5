"""Comparison of a simulated run with plain PyTorch: the losses on one device, and the memory of ``nn.DataParallel``."""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from loading import make_loader
from tabulate import tabulate
from tasks import Task
from torch import Tensor, nn

from balanced_parallel import Precision, RankBatchSampler, memory, simulate

Parts = list[dict[str, int]]  # bytes at the peak by category, per device
UPDATES = 2  # the optimizer state exists from the second update on


class Autocast(nn.Module):
    """Enters autocast inside the forward, as torch documents it for ``nn.DataParallel``: its threads have no other."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module = module
        self.precision = Precision(precision)

    def forward(self, inputs: Tensor) -> Any:
        """Runs the module under autocast."""
        with self.precision.autocast([inputs.device]):
            return self.module(inputs)


def plain_losses(task: Task, module: nn.Module, flags: argparse.Namespace, steps: int) -> list[float]:
    """Trains with plain PyTorch on the CPU, the whole batch in one forward, and returns the losses.

    Args:
        task: its rows and its learning rate.
        module: with the weights that the other run began with.
        flags: of train.py.
        steps: updates.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=flags.learning_rate or task.learning_rate)
    scaler = torch.amp.GradScaler("cpu", enabled=flags.precision == "fp16")
    batches = RankBatchSampler(task.train, flags.batch_size, flags.seed, rank=0, ranks=1)
    loader = make_loader(task.train, batches)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in loader:
            batches.advance()
            with Precision(flags.precision).autocast([torch.device("cpu")]):
                loss = nn.functional.cross_entropy(module(inputs), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), flags.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


def torch_data_parallel_parts(task: Task, flags: argparse.Namespace) -> Parts:
    """Runs ``nn.DataParallel``, as its documentation shows it, on simulated devices without a limit."""
    inputs, targets = task.train.__getitems__(list(range(min(flags.batch_size, len(task.train)))))
    rows = flags.micro_batch_size * flags.simulate if flags.micro_batch_size else len(inputs)
    with simulate(flags.simulate) as cluster:
        model = nn.DataParallel(Autocast(copy.deepcopy(task.module), flags.precision).to("sim:0"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
        for _ in range(UPDATES):
            cluster.reset_peak()
            for some, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
                output = model(some)
                with Precision(flags.precision).autocast([output.device]):
                    loss = nn.functional.cross_entropy(output, wanted.to("sim:0"))
                (loss * (len(some) / len(inputs))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [cluster.categories(index) for index in range(flags.simulate)]


def estimated_parts(task: Task, flags: argparse.Namespace) -> Parts:
    """Predicts the memory of simulated devices, for machines without a compiler."""
    return [dict(parts) for parts in predict(task.module, task, flags, "replicas", flags.simulate, "sim").parts]


def predict(
    module: nn.Module, task: Task, flags: argparse.Namespace, layout: str, devices: int, kind: str | None
) -> memory.MemoryReport:
    """Predicts the memory of an update with the first rows of the task, those of one rank under ``"ddp"`` and ``"fsdp"``."""
    rows = min(flags.batch_size, len(task.train))
    inputs, targets = task.train.__getitems__(list(range(-(-rows // devices) if layout in ("ddp", "fsdp") else rows)))
    return memory.estimate(
        module,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        precision=flags.precision,
        micro_batch_size=None if flags.micro_batch_size == "auto" else flags.micro_batch_size,
        layout=layout,
        devices=devices,
        balanced_optimizer=layout in ("replicas", "ddp"),
        device_kind=kind,
    )


def loss_table(plain: list[float], losses: list[float], name: str, precision: str) -> str:
    """Returns the losses side by side, of a few of the steps."""
    pairs = list(zip(plain, losses, strict=False))
    shown = sorted({step for step in (1, 2, 4, 8) if step <= len(pairs)} | {len(pairs)})
    rows = [[step, *(f"{loss:.6f}" for loss in pairs[step - 1])] for step in shown]
    table = tabulate(rows, ["step", "plain PyTorch, one device", name], "simple", disable_numparse=True, stralign="right")
    largest = max(abs(one - other) / abs(one) for one, other in pairs)
    last = f"largest relative difference of {len(pairs)} steps: {largest:.1e} ({precision} rounding)"
    return f"The loss of the same steps:\n\n{table}\n\n{last}"


def hottest_over_mean(parts: Parts) -> float:
    """Returns the largest peak over the mean of all devices."""
    peaks = [sum(part.values()) for part in parts]
    return max(peaks) * len(peaks) / sum(peaks)


def memory_table(bars: dict[str, Parts]) -> str:
    """Returns the peak of each device, a row for each entry of ``bars``."""
    rows = []
    for name, parts in bars.items():
        rows.append([name, *(f"{sum(part.values()) / 2**20:.1f}" for part in parts), f"{hottest_over_mean(parts):.2f}"])
    devices = [f"GPU {index}" for index in range(len(next(iter(bars.values()))))]
    table = tabulate(rows, ["", *devices, "hottest / mean"], "simple", disable_numparse=True, stralign="right")
    return f"MiB at the peak of an update:\n\n{table}"


def draw_memory(path: Path, title: str, capacities: list[int | None], bars: dict[str, Parts]) -> None:
    """Draws a bar per device, stacked by category, with one group of bars for each entry of ``bars``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(bars), sharey=True, figsize=(5 * len(bars), 4.0), layout="constrained", squeeze=False)
    everything = [part for parts in bars.values() for part in parts]
    highest = max(sum(part.values()) for part in everything) / 2**20
    seen = [name for name in everything[0] if max(part.get(name, 0) for part in everything) > highest * 2**20 / 1000]
    for axis, (name, parts) in zip(axes[0], bars.items(), strict=True):
        places = range(len(parts))
        bottom = [0.0] * len(parts)
        for category in seen:
            heights = [part.get(category, 0) / 2**20 for part in parts]
            axis.bar(places, heights, bottom=bottom, label=category)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, capacity in zip(places, capacities, strict=True):
            if capacity is not None and capacity / 2**20 < 2 * highest:  # a line far above would flatten the bars
                axis.hlines(capacity / 2**20, place - 0.45, place + 0.45, color="black", linestyle="dashed")
        axis.bar_label(axis.containers[-1], [f"{sum(part.values()) / 2**20:.1f}" for part in parts], padding=2)
        axis.margins(y=0.1)
        axis.set_xticks(places, [f"GPU {place}" for place in places])
        axis.set_title(f"{name}: hottest / mean = {hottest_over_mean(parts):.2f}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("MiB at the peak of an update")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
