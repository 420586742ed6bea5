"""Results of train.py: lines on the terminal, and files in the folder ``--out``.

``metrics.jsonl`` has the loss of each step: the same lines in each run, also in one that was interrupted. ``speed.jsonl`` has
times and memory. :mod:`charts` has both for TensorBoard and W&B. ``summary.json``, ``model.safetensors`` and ``model.pt`` are
written at the end.
"""

import argparse
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from charts import Charts
from packing import describe_packing, is_by_cost
from safetensors.torch import save_file
from tasks import Task
from tqdm import tqdm

import balanced_parallel
from balanced_parallel import gather


def describe(flags: argparse.Namespace, devices: list[torch.device], ranks: int, by_cost: bool) -> str:
    """Returns the layout of one effective batch, for the first lines of the output."""
    count = ranks * len(devices)
    rows = ", ".join(str(flags.batch_size // count + (index < flags.batch_size % count)) for index in range(count))
    micro = "" if flags.micro_batch_size == "auto" else f", in micro-batches of at most {flags.micro_batch_size}"
    where = f"{ranks} processes with one device each" if ranks > 1 else f"1 process, {len(devices)} device(s)"
    names, shares = ", ".join(map(str, devices)), "of equal cost for each device" if by_cost else f"{rows} per device"
    return f"{where} ({names}); effective batch of {flags.batch_size} rows: {shares}{micro}; {flags.precision}"


def waiting_advice(share: float, workers: int) -> list[str]:
    """Returns a line that names the flag to turn, if more than 20 % of the time was spent waiting for data."""
    more = workers * 2 or 2
    return [f"{share:.0%} of the time was spent waiting for data: load it ahead, with --workers {more}"] if share > 0.2 else []


def peak_bytes(device: torch.device) -> int:
    """Returns the peak of the allocator, or of the whole process for the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def mebibytes(counts: list[int]) -> str:
    """Formats byte counts as MiB."""
    return " ".join(f"{count / 2**20:.0f}" for count in counts) + " MiB"


class Recorder:
    """Records one training. Every rank has one; only rank 0 prints and writes.

    Args:
        total: updates of the whole training.
        cluster: simulated devices, or None. They know where a GPU would make the host wait.
    """

    def __init__(
        self, flags: argparse.Namespace, task: Task, devices: list[torch.device], rank: int, ranks: int, total: int, cluster: Any
    ) -> None:
        self.flags, self.task, self.devices, self.ranks, self.total = flags, task, devices, ranks, total
        self.cluster, self.waits_before = cluster, 0
        self.main = rank == 0
        self.terminal = sys.stderr.isatty()
        self.losses: list[float] = []
        self.done = 0  # updates so far
        self.validation: dict[str, float] = {}
        self.peak: list[int] = []
        self.rows = 0
        self.waited = 0.0
        self.started = time.perf_counter()
        self.lines = 0  # of metrics.jsonl
        self.files = [(flags.out / name).open("a+") for name in ("metrics.jsonl", "speed.jsonl") if self.main]
        self.charts = Charts(flags.out, flags.tensorboard) if self.main else None
        if self.main:
            parameters = sum(parameter.numel() for parameter in task.module.parameters())
            print(f"{task.description}; {parameters:,} parameters")
            print(f"{len(task.train):,} rows to train on, {len(task.validation):,} to validate")
            print(describe(flags, devices, ranks, is_by_cost(flags, task.train)))
            print("".join(f"{line}\n" for line in describe_packing(flags, task.train, ranks * len(devices))), end="", flush=True)
        self.bar = tqdm(total=total, disable=not (self.main and self.terminal), unit="step")

    def begin(self) -> None:
        """Begins a new run: lines of an earlier one are removed."""
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of updates and of lines. The lines themselves are on the disk by then."""
        for file in self.files:
            os.fsync(file.fileno())
        if self.charts:
            self.charts.save()
        return {"done": self.done, "lines": self.lines, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes back to a number of updates. Lines behind it are removed.

        Raises:
            ValueError: metrics.jsonl has fewer lines.
        """
        self.done, self.lines, self.validation = state_dict["done"], state_dict["lines"], state_dict["validation"]
        self.bar.update(self.done - self.bar.n)
        for file, count in zip(self.files, (self.lines, self.done), strict=False):
            file.seek(0)
            lines = file.readlines()[:count]
            if len(lines) < count:
                raise ValueError(f"{file.name} has {len(lines)} lines, expected the {count} of the checkpoint: begin anew")
            file.truncate(len("".join(lines)))
            self.losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line] or self.losses
        if self.charts:
            self.charts.go_back(self.done)

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a loader, epoch after epoch, until all updates are done. Measures the time that they take."""
        while self.done < self.total:
            asked = time.perf_counter()
            for batch in loader:
                self.waited += time.perf_counter() - asked
                yield batch
                asked = time.perf_counter()

    def record_step(self, loss: float) -> None:
        """Records one update."""
        size, rows = self.flags.batch_size, len(self.task.train)
        self.rows += min(size, rows - self.done % -(-rows // size) * size)  # the last batch of an epoch may be short
        self.losses.append(loss)
        self.done += 1
        elapsed = time.perf_counter() - self.started
        speed, waiting = self.rows / elapsed, self.waited / elapsed
        self.peak = [peak_bytes(device) for device in dict.fromkeys(self.devices)]
        state: dict[str, Any] = {"rows_per_second": round(speed, 1), "waiting_for_data": round(waiting, 4)}
        state["peak_bytes"] = self.peak
        line = f"loss {loss:.4f}, {speed:.0f} rows/s, {waiting:.1%} waiting for data, peak {mebibytes(self.peak)}"
        if self.cluster is not None:
            state["waits"], self.waits_before = self.cluster.wait_count - self.waits_before, self.cluster.wait_count
            line += f", waits for a GPU: {state['waits']}"
        self._check_finite("loss", loss)
        self.lines += 1
        self._write(0, step=self.done, loss=loss)
        self._write(1, step=self.done, **state)
        self._chart(loss=loss, rows_per_second=speed, waiting_for_data=waiting, peak_bytes=max(self.peak))
        self.bar.update()
        self.bar.set_postfix_str(line)
        if self.main and not self.terminal and (self.done in (1, self.total) or self.done % max(1, self.total // 10) == 0):
            print(f"step {self.done}/{self.total}: {line}", flush=True)

    def record_validation(self, results: dict[str, float]) -> None:
        """Records the results of one pass over the validation rows."""
        for name, value in results.items():
            self._check_finite(name.replace("_", " "), value)
        self.validation = results
        self.waits_before = 0 if self.cluster is None else self.cluster.wait_count
        self.lines += 1
        self._write(0, step=self.done, **results)
        self._chart(**results)

    def finish(self) -> None:
        """Writes the summary and the model. Every rank calls it, for the memory of all ranks.

        A run that a signal has ended before all updates has none.
        """
        self.bar.close()
        for file in (*self.files, self.charts) if self.charts else ():
            file.close()
        if self.done < self.total:
            if self.main:
                print(f"stopped after step {self.done}/{self.total}, all state is saved: go on with --resume", flush=True)
            return
        elapsed = time.perf_counter() - self.started
        peak = gather([self.peak])
        state = {name: whole(tensor) for name, tensor in self.task.module.state_dict().items()}
        if not self.main:
            return
        names = ("task", "precision", "batch_size", "micro_batch_size", "seed")
        summary = {
            **{name: getattr(self.flags, name) for name in names},
            "steps": self.done,
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            **self.validation,
            "baseline_loss": self.task.baseline,
            "seconds": round(elapsed, 2),
            "rows_per_second": round(self.rows / elapsed, 1),
            "waiting_for_data": round(self.waited / elapsed, 4),
            "peak_bytes": peak,
            "devices": [str(device) for device in self.devices],
            "ranks": self.ranks,
            "versions": {
                "balanced_parallel": balanced_parallel.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        out = self.flags.out
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        torch.save(state, out / "model.pt")
        save_file(state, out / "model.safetensors")
        results = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.validation.items())
        guess = "guessing by class" if self.task.classifies else "a unigram model"
        print(
            f"after {self.done} steps in {elapsed:.0f} s: {results} ({guess}: {self.task.baseline:.4f}); peak {mebibytes(peak)}"
        )
        for line in waiting_advice(self.waited / elapsed, self.flags.workers):
            print(line)
        charts = "wandb-history.jsonl, tensorboard/" if self.flags.tensorboard else "wandb-history.jsonl"
        print(f"wrote {out}/metrics.jsonl, speed.jsonl, {charts}, summary.json, model.safetensors, model.pt")

    def _check_finite(self, name: str, value: float) -> None:
        """Raises ``FloatingPointError`` for nan and infinity, which JSON does not have, and which no later update mends."""
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} of step {self.done} is {value}: begin anew with a smaller --learning-rate or --precision fp32, or "
                "go on from an earlier checkpoint"
            )

    def _chart(self, **values: float) -> None:
        if self.charts:
            self.charts.record(self.done, values)

    def _write(self, number: int, **line: Any) -> None:
        for file in self.files[number : number + 1]:
            file.write(json.dumps(line) + "\n")
            file.flush()


def whole(tensor: Any) -> torch.Tensor:
    """Returns a copy of all elements on the CPU, also of a tensor that is sharded over ranks (``DTensor``)."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    copy: torch.Tensor = gathered.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copy
