"""Trains a small network on real data, on whatever this machine has, and writes what happened to --out.

One process, every visible accelerator (else the CPU):    python scripts/train.py
One process, three replicas on the CPU:                   python scripts/train.py --devices cpu,cpu,cpu
One process per device:                                   torchrun --standalone --nproc-per-node=2 scripts/train.py
Four GPUs simulated on the CPU, every byte counted:       python scripts/train.py --simulate 4 --memory 2GiB
What fits, without training:                              python scripts/train.py --plan --simulate 4 --memory 48MiB

The numbers are the same each time: --batch-size is the effective batch over all devices and ranks, and how it is cut into
replicas, ranks and micro-batches does not change loss or gradients. Copy this file; what is particular to the two tasks is
in tasks.py.
"""

import argparse
import contextlib
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from simulated import draw_peaks, parts_of, torch_data_parallel_parts
from tasks import Rows, Task, digits_task, text_task
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from tqdm import tqdm

import balanced_parallel
from balanced_parallel import BalancedOptimizer, DataParallelCriterion, TrainStep, gather, memory, parallelize, simulate
from balanced_parallel.batch.scattering import split_sizes
from balanced_parallel.memory import MemoryPlan
from balanced_parallel.runtime.devices import peak_bytes, visible_devices
from balanced_parallel.simulation import Cluster


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def number(kind: type[int] | type[float], minimum: float) -> Callable[[str], Any]:
    """A number of at least ``minimum``; a real one greater than it."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
            fits = minimum <= value if kind is int else minimum < value < float("inf")
        except ValueError:
            fits = False
        if not fits:
            wanted = f"a whole number of at least {minimum}" if kind is int else f"a number greater than {minimum}"
            raise argparse.ArgumentTypeError(f"{text!r} was given, expected {wanted}")
        return value

    return parse


def device_list(text: str) -> list[int | str]:
    return [int(name) if name.strip().isdecimal() else name.strip() for name in text.split(",")]


def make_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=["text", "digits"], default="text", help="what to learn (default: text)")
    add("--data", type=Path, metavar="FILE_OR_FOLDER", help="text to learn (default: Python's standard library)")
    add("--vocabulary", type=number(int, 1), metavar="N", help="words of the text task (default: 8192, or all of a small text)")
    add("--steps", type=number(int, 1), metavar="N", help="updates (default: 200 for text, 300 for digits)")
    add("--epochs", type=number(int, 1), metavar="N", help="passes over the data (default: until --steps)")
    add(
        "--batch-size",
        type=number(int, 1),
        default=24,
        metavar="N",
        help="rows per update, over all devices and ranks (default: 24)",
    )
    add("--micro-batch-size", type=number(int, 1), metavar="N", help="rows per device in one forward (default: its whole share)")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="arithmetic of forward and loss (default: fp32)")
    add("--devices", type=device_list, metavar="LIST", help="such as cpu,cpu,cpu or 0,1 (default: every accelerator, else cpu)")
    add("--max-grad-norm", type=number(float, 0), default=1.0, metavar="X", help="clip the gradient's global norm (default: 1.0)")
    add("--learning-rate", type=number(float, 0), metavar="X", help="of AdamW (default: 0.003)")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of the weights and of the order of rows (default: 0)")
    add("--workers", type=number(int, 0), default=0, metavar="N", help="processes that load data, per rank (default: 0)")
    add("--simulate", type=number(int, 1), metavar="N", help="run on N simulated GPUs, with a table of their memory at the end")
    add("--memory", metavar="SIZE", help="of each simulated GPU, such as 2GiB, or a list: 2GiB,1GiB (default: no limit)")
    add("--plot", type=Path, metavar="FILE", help="draw the simulated GPUs' memory, beside nn.DataParallel's on the same steps")
    add("--plan", action="store_true", help="print how --batch-size fits --devices or --simulate with --memory, and do not train")
    add("--out", type=Path, default=Path("runs/latest"), metavar="DIR", help="where results go (default: runs/latest)")
    return parser


class RankBatches(Sampler[list[int]]):
    """This rank's part of each effective batch. Nobody pads or repeats a row; a rank may get none."""

    def __init__(self, batches: BatchSampler, rank: int, ranks: int) -> None:
        self.batches, self.rank, self.ranks = batches, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            ends = list(itertools.accumulate(split_sizes(len(batch), self.ranks), initial=0))
            yield batch[ends[self.rank] : ends[self.rank + 1]]

    def __len__(self) -> int:
        return len(self.batches)


def make_loader(rows: Rows, order: Sampler[int], batch_size: int, rank: int, ranks: int, workers: int) -> DataLoader[Any]:
    batches = RankBatches(BatchSampler(order, batch_size, drop_last=False), rank, ranks)
    pinned = torch.accelerator.is_available()
    return DataLoader(rows, batch_sampler=batches, collate_fn=tuple, num_workers=workers, pin_memory=pinned)


@torch.no_grad()
def validate(model: nn.Module, criterion: nn.Module, loader: DataLoader[Any]) -> dict[str, float]:
    """Loss and accuracy over all rows of all ranks: gather() puts each row's results together, in the order of the rows."""
    model.eval()
    losses, hits = [], []
    for inputs, targets in loader:
        outputs = model(inputs)
        losses.append(gather(criterion(outputs, targets), "cpu").flatten())
        predictions, labels = gather([output.argmax(1) for output in outputs], "cpu"), gather([targets], "cpu")
        hits.append((predictions == labels).flatten())
    model.train()
    return {"validation_loss": torch.cat(losses).double().mean().item(), "accuracy": torch.cat(hits).double().mean().item()}


def describe_cut(flags: argparse.Namespace, devices: list[torch.device], ranks: int) -> str:
    """How one effective batch is cut, for the first lines of the output."""
    shares = split_sizes(flags.batch_size, ranks * len(devices))
    micro = f", in micro-batches of at most {flags.micro_batch_size}" if flags.micro_batch_size else ""
    where = f"{ranks} processes with one device each" if ranks > 1 else f"1 process, {len(devices)} device(s)"
    return (
        f"{where} ({', '.join(map(str, devices))}); effective batch of {flags.batch_size} rows: "
        f"{', '.join(map(str, shares))} per device{micro}; {flags.precision}"
    )


def mebibytes(counts: list[int]) -> str:
    return " ".join(f"{count / 2**20:.0f}" for count in counts) + " MiB"


def main() -> None:
    parser = make_parser()
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    with contextlib.ExitStack() as stack:
        try:
            if flags.task == "digits" and (flags.data or flags.vocabulary):
                raise ValueError("--data and --vocabulary are for --task text")
            if flags.simulate is None and (flags.plot or (flags.memory and not flags.plan)):
                raise ValueError("--memory and --plot describe simulated GPUs, expected --simulate N beside them")
            if flags.plot:
                flags.plot.parent.mkdir(parents=True, exist_ok=True)
                import matplotlib  # noqa: F401  before the training, not after it
            task = digits_task() if flags.task == "digits" else text_task(flags.data, flags.vocabulary)
            if flags.plan:
                print(make_plan(flags, task))
                return
            cluster = stack.enter_context(simulated_gpus(flags)) if flags.simulate else None
            model, criterion = parallelize(task.module, nn.CrossEntropyLoss(), flags.devices, precision=flags.precision)
            flags.out.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            parser.error(str(error))
        try:
            train(flags, task, model, criterion)
        except torch.OutOfMemoryError as error:
            if cluster is None:
                raise
            print(cluster)
            first = str(error).splitlines()[0]
            parser.exit(1, f"{parser.prog}: error: {first} Give --micro-batch-size fewer rows, or the devices more --memory.\n")
    if cluster is not None and model.devices[0].index == 0:  # rank 0, where there are ranks
        print(cluster)
        if flags.plot:
            draw_memory(flags, task, cluster)


def make_plan(flags: argparse.Namespace, task: Task) -> MemoryPlan:
    """How the effective batch fits, on simulated GPUs or on those that are here; else on as many H200 as --devices names."""
    inputs, targets = task.train.__getitems__([0, 1])
    sizes: Any = flags.memory.split(",") if flags.memory else None
    if flags.simulate and sizes is None:
        raise ValueError("--plan for --simulate needs their --memory, such as 2GiB")
    return memory.plan(
        task.module,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        batch_size=flags.batch_size,
        capacity=sizes[0] if sizes and len(sizes) == 1 else sizes,
        devices=flags.simulate or (len(flags.devices) if flags.devices else len(visible_devices())),
        precision=flags.precision,
        device_kind="sim" if flags.simulate else None,
    )


def simulated_gpus(flags: argparse.Namespace) -> contextlib.AbstractContextManager[Cluster]:
    sizes = flags.memory.split(",") if flags.memory else [None]
    return simulate(flags.simulate, sizes[0] if len(sizes) == 1 else sizes)


def draw_memory(flags: argparse.Namespace, task: Task, cluster: Cluster) -> None:
    task.module.cpu()
    theirs = torch_data_parallel_parts(task, flags.simulate, flags.batch_size, flags.micro_batch_size, flags.precision)
    title = f"{flags.task}: {flags.batch_size} rows per update, AdamW, {flags.precision}"
    draw_peaks(flags.plot, title, cluster.memory, {"balanced_parallel": parts_of(cluster), "nn.DataParallel": theirs})
    print(f"wrote {flags.plot}")


def train(flags: argparse.Namespace, task: Task, model: Any, criterion: DataParallelCriterion) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = flags.steps or (None if flags.epochs else task.steps)
    order = RandomSampler(range(len(task.train)), generator=torch.Generator().manual_seed(flags.seed))
    loader = make_loader(task.train, order, flags.batch_size, rank, ranks, flags.workers)
    held_out = make_loader(task.validation, SequentialSampler(task.validation), flags.batch_size, rank, ranks, 0)
    total = min(count for count in (steps, flags.epochs and flags.epochs * len(loader)) if count)

    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=flags.learning_rate or task.learning_rate)
    step = TrainStep(
        model,
        criterion,
        optimizer,
        micro_batch_size=flags.micro_batch_size,
        precision=flags.precision,
        max_grad_norm=flags.max_grad_norm,
    )
    each_row = DataParallelCriterion(nn.CrossEntropyLoss(reduction="none"), precision=flags.precision)

    main_rank = rank == 0
    terminal = sys.stderr.isatty()
    parameters = sum(parameter.numel() for parameter in task.module.parameters())
    if main_rank:
        print(f"{task.description}; {parameters:,} parameters")
        print(f"{len(task.train):,} rows to train on, {len(task.validation):,} to validate")
        print(describe_cut(flags, model.devices, ranks), flush=True)
    metrics = (flags.out / "metrics.jsonl").open("w") if main_rank else None

    def record(**line: Any) -> None:
        if metrics is not None:
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()

    done, waited, started = 0, 0.0, time.perf_counter()
    validation: dict[str, float] = {}
    losses: list[float] = []
    rows = 0
    with tqdm(total=total, disable=not main_rank or not terminal, unit="step") as bar:
        while done < total:
            asked = time.perf_counter()
            for inputs, targets in loader:
                waited += time.perf_counter() - asked
                loss = step(inputs, targets).item()
                done += 1
                rows += min(flags.batch_size, len(task.train) - (done - 1) % len(loader) * flags.batch_size)
                losses.append(loss)
                elapsed = time.perf_counter() - started
                peak = [peak_bytes(device) for device in dict.fromkeys(model.devices)]
                state = {
                    "loss": loss,
                    "rows_per_second": round(rows / elapsed, 1),
                    "waiting_for_data": round(waited / elapsed, 4),
                    "peak_bytes": peak,
                }
                record(step=done, **state)
                shown = f"loss {loss:.4f}, {rows / elapsed:.0f} rows/s, {waited / elapsed:.1%} waiting for data"
                shown += f", peak {mebibytes(peak)}"
                bar.update()
                bar.set_postfix_str(shown)
                if main_rank and not terminal and (done in (1, total) or done % max(1, total // 10) == 0):
                    print(f"step {done}/{total}: {shown}", flush=True)
                asked = time.perf_counter()
                if done == total:
                    break
            validation = validate(model, each_row, held_out)
            if not task.classifies:
                del validation["accuracy"]
            record(step=done, **validation)
    elapsed = time.perf_counter() - started
    peak = gather([peak])  # of all ranks
    summary = {
        "task": flags.task,
        "steps": done,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **validation,
        "baseline_loss": task.baseline,
        "seconds": round(elapsed, 2),
        "rows_per_second": round(rows / elapsed, 1),
        "waiting_for_data": round(waited / elapsed, 4),
        "peak_bytes": peak,
        "devices": [str(device) for device in model.devices],
        "ranks": ranks,
        "precision": flags.precision,
        "batch_size": flags.batch_size,
        "micro_batch_size": flags.micro_batch_size,
        "seed": flags.seed,
        "versions": {
            "balanced_parallel": balanced_parallel.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if metrics is not None:
        metrics.close()
        (flags.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        torch.save(task.module.state_dict(), flags.out / "model.pt")
        results = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in validation.items())
        guess = "guessing by class" if task.classifies else "a unigram model"
        print(f"after {done} steps in {elapsed:.0f} s: {results} ({guess}: {task.baseline:.4f}); peak {mebibytes(peak)}")
        print(f"wrote {flags.out}/metrics.jsonl, summary.json, model.pt")


if __name__ == "__main__":
    main()
