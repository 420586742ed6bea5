"""Comparison of train.py on simulated GPUs with plain PyTorch: the losses, and the memory of each GPU at its peak. And plans."""

import argparse
import contextlib
import copy
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tabulate import tabulate
from tasks import Task
from torch import Tensor, nn
from tqdm import tqdm

from balanced_parallel import Precision, RankBatchSampler, memory, simulate

BEAT = 5.0  # seconds between two lines of progress
NAMES = {"temporaries": "gradients of activations, temporaries"}  # of the backward and of the update


class Result(NamedTuple):
    """A configuration, the loss of each update, and the bytes of each category at the peak of each GPU."""

    name: str
    losses: list[float]
    parts: list[dict[str, int]]

    @property
    def hottest(self) -> float:
        """The largest peak, in MiB."""
        return max(sum(part.values()) for part in self.parts) / 2**20

    @property
    def mean(self) -> float:
        """The mean of all peaks, in MiB."""
        return sum(sum(part.values()) for part in self.parts) / len(self.parts) / 2**20


class Autocast(nn.Module):
    """Enters autocast inside the forward, as torch documents it for ``nn.DataParallel``: its threads have no other."""

    def __init__(self, module: nn.Module, precision: Literal["fp32", "bf16", "fp16"]) -> None:
        super().__init__()
        self.module = module
        self.precision = Precision(precision)

    def forward(self, inputs: Tensor) -> Any:
        """Runs the module under autocast."""
        with self.precision.autocast([inputs.device]):
            return self.module(inputs)


class Comparison:
    """A run on simulated GPUs, beside the same updates by plain PyTorch.

    Without a compiler, the replicas run on the CPU, and their memory is estimated.

    Args:
        task: its module has the weights that all configurations begin with.
        flags: of train.py.
        stack: ends the simulation of the run.

    Raises:
        ImportError: ``--plot`` needs matplotlib.
        RuntimeError: there is no compiler, and ``--memory`` needs the simulation.
        ValueError: the number of GPUs or their memory is invalid.
    """

    def __init__(self, task: Task, flags: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        if flags.plot and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--plot needs the package matplotlib: pip install matplotlib")
        self.task, self.flags, self.before, self.cluster = task, flags, copy.deepcopy(task.module), None
        try:
            self.cluster = stack.enter_context(simulate(flags.simulate, memory_sizes(flags)))
            stack.push(self._explain_failure)
        except RuntimeError as error:
            if flags.memory:
                raise
            print(f"{error}\nRunning {flags.simulate} replicas on the CPU instead. Their memory is estimated.\n", flush=True)
            flags.devices = flags.devices or ["cpu"] * flags.simulate
        size = sum(parameter.numel() for parameter in task.module.parameters())
        settings = f"{flags.batch_size} rows per update, AdamW, {flags.precision}"
        self.title = f"{type(task.module).__name__}, {size / 1e6:.1f} M parameters; {settings}; simulated GPUs"
        print(f"{self.title}: {flags.steps} updates\n", flush=True)

    def show(self, losses: list[float], devices: list[torch.device]) -> None:
        """Prints a line for each configuration, and draws the memory if ``--plot``.

        Args:
            losses: of the run.
            devices: of the run, or of this rank.
        """
        flags, cluster = self.flags, self.cluster
        name = f"balanced_parallel, {flags.simulate} GPUs" if len(devices) == flags.simulate else "balanced_parallel, this rank"
        if cluster is None:
            parts = self._estimate("replicas", flags.simulate)
            plain = [Result("plain PyTorch, 1 GPU", self._train([torch.device("cpu")], len(losses)), self._estimate("single", 1))]
        else:
            parts = [cluster.categories(device.index) for device in devices]
            plain = [self._simulate(number, len(losses)) for number in dict.fromkeys([1, flags.simulate])]
        results = [*plain, Result(name, losses, parts)]
        print(f"{table_of(results)}\n")
        if flags.dropout:
            print("The losses differ: the dropout of plain PyTorch draws other numbers.\n")
        if flags.table and cluster is not None:
            print(f"{cluster}\n")
        if flags.plot:
            draw(flags.plot, self.title, cluster.memory if cluster else [], results[-2:])
        plot = f"{flags.plot}, " if flags.plot else ""
        print(f"wrote {plot}{flags.out}/metrics.jsonl, summary.json, model.safetensors")

    def _explain_failure(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Prints the table, if the run has failed."""
        if kind is not None and self.flags.table:
            print(self.cluster)

    def _simulate(self, number: int, updates: int) -> Result:
        """Trains with plain PyTorch on simulated GPUs without a limit."""
        with simulate(number) as cluster:
            losses = self._train(cluster.devices, updates)
            parts = [cluster.categories(index) for index in range(number)]
        return Result(f"nn.DataParallel, {number} GPUs" if number > 1 else "plain PyTorch, 1 GPU", losses, parts)

    def _train(self, devices: list[torch.device], updates: int) -> list[float]:
        """Trains as torch documents it, by ``nn.DataParallel`` on several devices. Returns the losses."""
        flags, rows, first = self.flags, self.task.train, devices[0]
        model: nn.Module = Autocast(copy.deepcopy(self.before), flags.precision).to(first)
        if len(devices) > 1:
            model = nn.DataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=flags.learning_rate)
        scaler = torch.amp.GradScaler(first.type, enabled=flags.precision == "fp16")
        batches = RankBatchSampler(rows, flags.batch_size, flags.seed, rank=0, ranks=1)
        losses: list[float] = []
        for _ in show_progress(updates, f"plain PyTorch on {len(devices)} x {first.type}"):
            inputs, targets = rows.__getitems__(next(iter(batches)))
            batches.advance()
            optimizer.zero_grad()
            outputs = model(inputs.to(first))  # kept until the next are there, as in most loops
            with Precision(flags.precision).autocast([first]):
                loss = nn.functional.cross_entropy(outputs, targets.to(first))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), flags.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    def _estimate(self, layout: str, devices: int) -> list[dict[str, int]]:
        """Predicts the memory of an update with the first rows of the task."""
        flags, rows = self.flags, range(min(self.flags.batch_size, len(self.task.train)))
        report = memory.estimate(
            self.before,
            nn.CrossEntropyLoss(),
            *self.task.train.__getitems__(list(rows)),
            precision=flags.precision,
            micro_batch_size=None if flags.micro_batch_size == "auto" else flags.micro_batch_size,
            layout=layout,
            devices=devices,
            balanced_optimizer=devices > 1,
            device_kind="sim",
        )
        return [dict(parts) for parts in report.parts]


def show_progress(steps: int, name: str) -> Iterator[int]:
    """Yields the numbers of steps, with a bar on a terminal, elsewhere with a line on stderr after each ``BEAT``."""
    numbers = range(1, steps + 1)
    if sys.stderr.isatty():
        yield from tqdm(numbers, name, leave=False)
        return
    print(f"{name}: {steps} steps", file=sys.stderr, flush=True)
    last = time.perf_counter()
    for step in numbers:
        yield step
        if step < steps and time.perf_counter() - last >= BEAT:
            print(f"{name}: step {step}/{steps}", file=sys.stderr, flush=True)
            last = time.perf_counter()


def memory_sizes(flags: argparse.Namespace) -> Any:
    """Returns ``--memory`` as the library takes it: one size, a list with one per device, or None."""
    sizes = flags.memory.split(",") if flags.memory else [None]
    return sizes[0] if len(sizes) == 1 else sizes


def make_plan(task: Task, flags: argparse.Namespace) -> memory.MemoryPlan:
    """Plans the effective batch for simulated GPUs, for those of this machine, or for as many H200 as ``--devices`` names."""
    return memory.plan(
        task.module,
        nn.CrossEntropyLoss(),
        *task.train.__getitems__([0, 1]),
        batch_size=flags.batch_size,
        capacity=memory_sizes(flags),
        devices=flags.simulate or len(flags.devices or []) or max(1, torch.accelerator.device_count()),
        precision=flags.precision,
        device_kind="sim" if flags.simulate else None,
    )


def table_of(results: list[Result]) -> str:
    """Returns a line for each configuration: some losses, the largest difference from the first configuration, and the memory."""
    plain = results[0].losses
    steps = sorted({1, (len(plain) + 1) // 2, len(plain)})
    rows = []
    for result in results:
        losses = [f"{result.losses[step - 1]:.6f}" for step in steps]
        difference = max(abs(loss - other) / abs(other) for loss, other in zip(result.losses, plain, strict=True))
        differs = "" if result is results[0] else f"{difference:.0e}"
        rows.append([result.name, *losses, differs, f"{result.hottest:.1f} MiB", f"{result.mean:.1f} MiB"])
    headers = ["", *(f"loss {step}" for step in steps), "differs by", "hottest GPU", "mean"]
    return str(tabulate(rows, headers, "simple", disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)]))


def draw(path: Path, title: str, capacities: list[int | None], results: list[Result]) -> None:
    """Draws a bar per GPU, stacked by category, with a panel for each configuration.

    The picture is narrow, so that its words can be read on a phone. The ground is transparent, and words are grey, so that they
    can be read on a white page and on a black one. The title that is stored in the file has the numbers of the bars.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey = "#757575"
    matplotlib.rcParams.update({"text.color": grey, "axes.labelcolor": grey, "axes.edgecolor": grey})
    matplotlib.rcParams.update({"xtick.color": grey, "ytick.color": grey, "font.size": 11})
    matplotlib.rcParams.update({"axes.titlesize": 11, "figure.titlesize": 11})
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = []
    highest = max(result.hottest for result in results)
    figure, axes = pyplot.subplots(1, len(results), sharey=True, figsize=(4.8, 4.4), layout="constrained", squeeze=False)
    peaks = [part for result in results for part in result.parts]
    categories = [name for name in peaks[0] if max(part.get(name, 0) for part in peaks) > highest * 2**20 / 1000]
    for axis, result in zip(axes[0], results, strict=True):
        places, bottom = range(len(result.parts)), [0.0] * len(result.parts)
        for category in categories:
            heights = [part.get(category, 0) / 2**20 for part in result.parts]
            axis.bar(places, heights, bottom=bottom, label=NAMES.get(category, category))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, capacity in zip(places, capacities, strict=False):
            if capacity is not None and capacity / 2**20 < 2 * highest:  # a line far above would flatten the bars
                axis.hlines(capacity / 2**20, place - 0.45, place + 0.45, color=grey, linestyle="dashed")
        axis.bar_label(axis.containers[-1], [f"{height:.0f}" for height in bottom], padding=2)
        axis.margins(y=0.1)
        axis.set_xticks(places)
        axis.set_xlabel("GPU")
        name, _, devices = result.name.partition(", ")
        ratio = f"hottest / mean = {result.hottest / result.mean:.2f}"
        axis.set_title("\n".join([name, devices, ratio]))
        numbers.append(f"{result.name}: {', '.join(f'{height:.1f}' for height in bottom)} MiB, {ratio}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("MiB at the peak")
    shape: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "handlelength": 1, "columnspacing": 1, "frameon": False}
    figure.legend(*axes[0][0].get_legend_handles_labels(), **shape)
    figure.suptitle(title.replace("; ", "\n", 1))
    figure.savefig(path, dpi=120, transparent=True, metadata={"Title": "; ".join(numbers)})
    pyplot.close(figure)
