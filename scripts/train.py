"""Trains a small network on real data, on all devices of this machine, and writes the results to --out.

One process, every visible accelerator (else the CPU):    python scripts/train.py
One process, three replicas on the CPU:                   python scripts/train.py --devices cpu,cpu,cpu
One process per device:                                   torchrun --standalone --nproc-per-node=2 scripts/train.py
A model sharded over them:                                torchrun ... scripts/train.py --strategy fsdp
Four simulated GPUs, compared with plain PyTorch:         python scripts/train.py --simulate 4 --plot runs/memory.png
A run that survives being killed, run again:              python scripts/train.py --checkpoint-every 50 --resume
Equal numbers of rows in place of equal cost:             python scripts/train.py --pack rows --devices cpu,cpu,cpu
With dropout, and the same losses in all of these:        python scripts/train.py --dropout 0.1 --reproducible
A plan of what fits, without training:                    python scripts/train.py --plan --simulate 4 --memory 48MiB
Curves, and a page about the memory of an update:         python scripts/train.py --tensorboard --html runs/memory.html

The losses are the same each time. --batch-size is the effective batch over all devices and ranks. Its split into replicas,
ranks and micro-batches does not change loss or gradients, nor with --dropout if --reproducible. Copy this file; the two tasks
are in tasks.py.
"""

import argparse
import contextlib
import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from arguments import SIMULATED_STEPS, check, make_parser, memory_sizes, one_line_errors
from comparison import (
    draw_memory,
    estimated_parts,
    loss_table,
    memory_table,
    plain_losses,
    predict,
    torch_data_parallel_parts,
)
from loading import make_loader
from packing import make_batches, make_cut
from recording import Recorder
from stopping import StopSignal
from tasks import IGNORED, Task, check_same_data, digits_task, text_task
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from balanced_parallel import (
    BalancedOptimizer,
    Checkpoints,
    DataParallelCriterion,
    RankBatchSampler,
    TrainStep,
    gather,
    memory,
    parallelize,
    simulate,
)


def train(flags: argparse.Namespace, task: Task, model: Any, criterion: DataParallelCriterion, cluster: Any) -> list[float]:
    """Trains the task's module, on the devices of a simulated cluster if there is one.

    Returns:
        The loss of each step. It is empty after SIGTERM or Ctrl-C, if steps are left.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = make_batches(flags, task.train)
    loader = make_loader(task.train, batches, flags.workers)
    held_out = make_loader(task.validation, RankBatchSampler(task.validation, flags.batch_size))
    total = count_steps(flags, task, len(loader))

    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=flags.learning_rate or task.learning_rate)
    step = TrainStep(
        model,
        criterion,
        optimizer,
        micro_batch_size=flags.micro_batch_size,
        precision=flags.precision,
        max_grad_norm=flags.max_grad_norm,
        cut=make_cut(flags, task.train),
        reproducible=flags.reproducible,
    )
    each_row = DataParallelCriterion(nn.CrossEntropyLoss(reduction="none"), precision=flags.precision)

    recorder = Recorder(flags, task, model.devices, rank, ranks, total, cluster)
    saves = bool(flags.checkpoint_every or flags.resume)
    checkpoints = Checkpoints(flags.out / "checkpoints", keep=flags.keep, step=step, batches=batches, recorder=recorder)
    if not flags.resume or checkpoints.load_latest() is None:
        recorder.begin()
    stop = StopSignal(saves)
    for inputs, targets in recorder.timed(loader):
        recorder.record_step(step(inputs, targets).item())
        batches.advance()
        if recorder.done == total or batches.batches % len(batches) == 0:
            recorder.record_validation(validate(model, each_row, held_out, task.classifies))
        is_last = recorder.done == total or stop.on_any_rank()
        if saves and (is_last or recorder.done % (flags.checkpoint_every or total) == 0):
            checkpoints.save(recorder.done)
        if is_last:
            break
    checkpoints.wait()
    flags.micro_batch_size = step.micro_batch_size  # that "auto" has settled on
    recorder.finish()
    optimizer.zero_grad()  # nothing is left on simulated devices, which end before the optimizer is collected
    return recorder.losses if recorder.done == total else []


@torch.no_grad()
def validate(model: nn.Module, criterion: nn.Module, loader: DataLoader[Any], classifies: bool) -> dict[str, float]:
    """Returns loss and accuracy over all rows of all ranks. ``gather`` joins the results in the order of the rows."""
    model.eval()
    losses, hits = [], []
    for inputs, targets in loader:
        outputs = model(inputs)
        predictions, labels = gather([output.argmax(1) for output in outputs], "cpu"), gather([targets], "cpu")
        counted = labels != IGNORED
        losses.append(gather(criterion(outputs, targets), "cpu")[counted])
        hits.append((predictions == labels)[counted])
    model.train()
    results = {"validation_loss": torch.cat(losses).double().mean().item()}
    return {**results, "accuracy": torch.cat(hits).double().mean().item()} if classifies else results


def count_steps(flags: argparse.Namespace, task: Task, batches: int) -> int:
    """Returns the number of updates. An epoch has ``batches`` of them."""
    default = SIMULATED_STEPS if flags.simulate else task.steps
    steps: int = flags.steps or (flags.epochs * batches if flags.epochs else default)
    return min(steps, flags.epochs * batches) if flags.epochs else steps


def make_plan(flags: argparse.Namespace, task: Task) -> memory.MemoryPlan:
    """Plans the effective batch for simulated GPUs, for those of this machine, or for as many H200 as ``--devices`` names."""
    inputs, targets = task.train.__getitems__([0, 1])
    return memory.plan(
        task.module,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        batch_size=flags.batch_size,
        capacity=memory_sizes(flags),
        devices=flags.simulate or (len(flags.devices) if flags.devices else max(1, torch.accelerator.device_count())),
        precision=flags.precision,
        device_kind="sim" if flags.simulate else None,
    )


def start_simulation(flags: argparse.Namespace, stack: contextlib.ExitStack) -> Any:
    """Returns the cluster of simulated GPUs. Without a compiler it is None, and replicas run on the CPU."""
    try:
        return stack.enter_context(simulate(flags.simulate, memory_sizes(flags)))
    except RuntimeError as error:
        if flags.memory:
            raise
        print(f"{error}\nRunning {flags.simulate} replicas on the CPU instead. Their memory is estimated.\n", flush=True)
        flags.devices = flags.devices or ["cpu"] * flags.simulate
        return None


def compare(flags: argparse.Namespace, task: Task, before: nn.Module, losses: list[float], cluster: Any) -> None:
    """Compares losses with those of one device and memory with that of ``nn.DataParallel``, and draws the memory."""
    task.module.cpu()
    if cluster is not None:
        bars = {"nn.DataParallel": torch_data_parallel_parts(task, flags)}
        bars["balanced_parallel"] = [cluster.categories(index) for index in range(flags.simulate)]
        name, limits = "simulated GPUs", cluster.memory
    else:
        bars = {"balanced_parallel": estimated_parts(task, flags)}
        name, limits = "replicas on the CPU", [None] * flags.simulate
    plain = plain_losses(task, before, flags, min(len(losses), SIMULATED_STEPS))
    print(f"\n{loss_table(plain, losses, f'balanced_parallel, {flags.simulate} {name}', flags.precision)}\n")
    print(f"{memory_table(bars)}\n")
    draw_memory(flags.plot, f"{flags.task}: {flags.batch_size} rows per update, AdamW, {flags.precision}", limits, bars)
    print(f"wrote {flags.plot}")


def write_page(flags: argparse.Namespace, task: Task, before: nn.Module, devices: list[torch.device]) -> None:
    """Writes the page about the memory of an update of this run: where it is at each moment, and for other numbers of rows."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    over_ranks = "fsdp" if isinstance(task.module, FSDPModule) else "ddp"
    layout = over_ranks if ranks > 1 else "replicas" if len(devices) > 1 else "single"
    kind = devices[0].type if devices[0].type in ("cpu", "sim") else None
    report = predict(before, task, flags, layout, max(ranks, len(devices)), kind)
    report.save_html(flags.html, memory_sizes(flags))
    print(f"wrote {flags.html}")


def main() -> None:
    """Runs the script with the flags of its command line."""
    parser = make_parser(__doc__)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("balanced_parallel").setLevel(logging.INFO)  # why "auto" chose a strategy
    with contextlib.ExitStack() as stack:
        with one_line_errors(parser):
            check(flags)
            is_text = flags.task == "text"
            task = text_task(flags.data, flags.vocabulary, flags.dropout) if is_text else digits_task(flags.dropout)
            if flags.plan:
                plan = make_plan(flags, task)
                print(plan)
                if flags.html:
                    plan.save_html(flags.html)
                return
            cluster = start_simulation(flags, stack) if flags.simulate else None
            before = copy.deepcopy(task.module) if flags.plot or flags.html else task.module
            settings = {"precision": flags.precision, "strategy": flags.strategy}
            model, criterion = parallelize(task.module, nn.CrossEntropyLoss(), flags.devices, **settings)
            check_same_data(task)
            flags.out.mkdir(parents=True, exist_ok=True)
        try:
            losses = train(flags, task, model, criterion, cluster)
        except (OSError, FloatingPointError) as error:  # a checkpoint, on a full disk; a loss that is nan
            parser.exit(1, f"{parser.prog}: error: {error}\n")
        except torch.OutOfMemoryError as error:
            if cluster is None:
                raise
            print(cluster)
            first = str(error).splitlines()[0]
            parser.exit(
                1, f"{parser.prog}: error: {first} Give --micro-batch-size auto or fewer rows, or the devices more --memory.\n"
            )
    if not losses or (dist.is_initialized() and dist.get_rank() > 0):
        return
    if cluster is not None:
        alone = "" if not dist.is_initialized() else "rank 0, which uses one of its devices; every rank simulates its own:\n\n"
        print(f"\n{alone}{cluster}")
    if flags.plot:
        compare(flags, task, before, losses, cluster)
    if flags.html:
        write_page(flags, task, before, model.devices)


if __name__ == "__main__":
    main()
