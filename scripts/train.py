"""Trains a small network on real data, on all devices of this machine, and writes the results to --out.

One process, every visible accelerator (else the CPU):    python scripts/train.py
One process, three replicas on the CPU:                   python scripts/train.py --devices cpu,cpu,cpu
One process per device:                                   torchrun --standalone --nproc-per-node=2 scripts/train.py
A model sharded over them:                                torchrun ... scripts/train.py --strategy fsdp
A run that survives being killed, run again:              python scripts/train.py --checkpoint-every 50 --resume
With dropout, and the same bits, except with FSDP2:       python scripts/train.py --dropout 0.1 --reproducible bits
A plan of what fits, without training:                    python scripts/train.py --plan --simulate 4 --memory 48MiB
Four simulated GPUs, compared with plain PyTorch:         python scripts/train.py --simulate 4 --plot runs/memory.png

--batch-size is the effective batch over all devices and ranks. Its split does not change the losses. Copy this file, and put your
data and model in place of tasks.py. The file comparison.py is for --simulate alone.
"""

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tasks import Task, add_arguments, check_same_data, count, load_task, make_batches, make_loader, one_line
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from balanced_parallel import BalancedOptimizer, Checkpoints, TrainStep, gather, parallelize


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser. The description holds the usage, so an error is one line without it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("train.py", usage=argparse.SUPPRESS, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add_arguments(parser)
    add("--steps", type=count, metavar="N", help="updates (default: 200, or 12 with --simulate)")
    rows = "rows per device in one forward (default: auto, its whole share, and less where that does not fit; 8 for bits)"
    add("--micro-batch-size", type=lambda text: text if text == "auto" else count(text), metavar="N", help=rows)
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="arithmetic of forward and loss (default: fp32)")
    add("--devices", metavar="LIST", help="such as cpu,cpu,cpu or 0,1 (default: every accelerator, else cpu)")
    add("--strategy", choices=["auto", "replicas", "ddp", "fsdp"], default="auto", help="default: auto, which says why")
    add("--max-grad-norm", type=float, default=1.0, metavar="X", help="clip the gradient's global norm (default: 1.0)")
    add("--learning-rate", type=float, default=3e-3, metavar="X", help="of AdamW (default: 0.003)")
    same = "draw the dropout of one device with any devices, ranks and micro-batches; bits: have the same bits on any of them"
    add("--reproducible", nargs="?", const=True, default=False, choices=["bits"], help=same)
    add("--checkpoint-every", type=count, metavar="N", help="save all state every N updates, and at SIGTERM or Ctrl-C")
    add("--resume", action="store_true", help="go on from the newest checkpoint in DIR/checkpoints, if there is one")
    add("--simulate", type=count, metavar="N", help="compare N simulated GPUs with plain PyTorch: losses and memory")
    add("--memory", metavar="SIZE", help="of each simulated GPU, such as 2GiB, or a list: 2GiB,1GiB (default: no limit)")
    add("--plot", type=Path, metavar="FILE", help="with --simulate: draw the memory")
    add("--table", action="store_true", help="with --simulate: a table with the categories, traffic and waits of each GPU")
    add("--plan", action="store_true", help="print how --batch-size fits --devices or --simulate with --memory, and do not train")
    add("--out", type=Path, default=Path("runs/latest"), metavar="DIR", help="where results go (default: runs/latest)")
    return parser


class Training:
    """A run: the model, the batches, and the losses, which are part of a checkpoint."""

    def __init__(self, flags: argparse.Namespace, task: Task) -> None:
        settings = {"precision": flags.precision, "strategy": flags.strategy}
        self.model, criterion = parallelize(task.module, nn.CrossEntropyLoss(), flags.devices, **settings)
        check_same_data(task)
        self.flags, self.task, self.losses, self.stopping = flags, task, list[float](), False
        self.is_main = not dist.is_initialized() or dist.get_rank() == 0
        self.step = TrainStep(
            self.model,
            criterion,
            BalancedOptimizer(self.model, torch.optim.AdamW, lr=flags.learning_rate),
            micro_batch_size=flags.micro_batch_size,
            precision=flags.precision,
            max_grad_norm=flags.max_grad_norm,
            cut=None if flags.reproducible == "bits" else task.cut,
            reproducible=flags.reproducible,
        )
        self.batches = make_batches(task.train, flags)
        folder = flags.out / "checkpoints"
        if not flags.resume and any(folder.glob("step-*")):
            raise ValueError(f"{folder} is of another run: go on with it by --resume, or give another --out")
        flags.out.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(folder, step=self.step, batches=self.batches, losses=self)
        if not flags.resume or self.checkpoints.load_latest() is None:
            self.record([], "w")

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the losses so far."""
        return {"losses": list(self.losses)}

    def load_state_dict(self, state_dict: dict[str, list[float]]) -> None:
        """Goes back to the losses of a checkpoint."""
        self.losses = []
        self.record(state_dict["losses"], "w")

    def record(self, losses: list[float], mode: str = "a") -> None:
        """Writes lines of metrics.jsonl. The file has the same lines after a run that was interrupted."""
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, len(self.losses) + 1)]
        self.losses += losses
        if self.is_main:
            with (self.flags.out / "metrics.jsonl").open(mode) as file:
                file.writelines(lines)

    def run(self) -> bool:
        """Trains. Returns False if a signal has ended the run before its last update, with all state saved."""
        flags, first, began, shown, every = self.flags, len(self.losses), time.perf_counter(), 0.0, self.flags.checkpoint_every
        for number in (signal.SIGTERM, signal.SIGINT) if every else ():
            signal.signal(number, self.stop)
        if self.is_main and not flags.simulate:
            print(f"{self.task.description}; {flags.batch_size} rows per update; {type(self.model).__name__}", flush=True)
        batches = itertools.chain.from_iterable(itertools.repeat(make_loader(self.task.train, self.batches, flags.workers)))
        hidden = None if self.is_main else True  # None: shown on a terminal
        steps = tqdm(range(first + 1, flags.steps + 1), initial=first, total=flags.steps, disable=hidden, leave=False)
        for step, batch in zip(steps, batches, strict=False):
            loss = self.step(*(batch if self.step.cut is None else ([*zip(*batch, strict=True)],))).item()
            if not math.isfinite(loss):  # no later update mends it
                advice = "begin anew with a smaller --learning-rate or --precision fp32, or go on from an earlier checkpoint"
                raise FloatingPointError(f"the loss of step {step} is {loss}: {advice}")
            self.batches.advance()
            self.record([loss])
            elapsed = time.perf_counter() - began
            if self.is_main and (step in (1, flags.steps) or step % max(1, flags.steps // 10) == 0 or elapsed - shown > 5):
                shown, place = elapsed, sys.stderr if flags.simulate else sys.stdout
                speed = (step - first) * flags.batch_size / elapsed
                with tqdm.external_write_mode():
                    print(f"step {step}/{flags.steps}: loss {loss:.4f}, {speed:.0f} rows/s", file=place, flush=True)
            stops = bool(every) and any(gather([[self.stopping]], "cpu"))  # on any rank
            if every and (stops or step == flags.steps or step % every == 0):
                self.checkpoints.save(step)
            if stops:
                break
        self.checkpoints.wait()
        return len(self.losses) >= int(flags.steps)

    def stop(self, *_: Any) -> None:
        """Lets the update under way end. A second Ctrl-C ends the process."""
        self.stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def finish(self) -> None:
        """Writes the model and a summary. Every rank calls it, for shards and memory of all ranks."""
        flags, task, digests = self.flags, self.task, gather([[self.step.digest()]], "cpu")  # one of each rank
        results = {} if flags.simulate else task.evaluate(self.model, flags.batch_size, flags.precision)
        devices = [device for device in dict.fromkeys(self.model.devices) if device.type != "cpu"]
        peaks = gather([[torch.accelerator.max_memory_allocated(device) for device in devices]], "cpu")
        state: Any = get_model_state_dict(task.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.is_main:
            save_file(state, flags.out / "model.safetensors")
            layout = {"ranks": len(digests), "devices": self.model.devices, "micro_batch_size": self.step.micro_batch_size}
            summary = vars(flags) | {"loss": self.losses[-1], "digest": digests[0], **results, **layout, "peak_bytes": peaks}
            (flags.out / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
            print(f"digest of the parameters: {digests[0]}")
            if not flags.simulate:
                print(", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items()))
                print(f"wrote {flags.out}/metrics.jsonl, summary.json, model.safetensors")


def main() -> None:
    """Runs the script with the flags of its command line."""
    flags, comparison = make_parser().parse_args(), None
    flags.steps = flags.steps or (12 if flags.simulate else 200)
    flags.micro_batch_size = flags.micro_batch_size or (8 if flags.reproducible == "bits" else "auto")
    if flags.reproducible == "bits":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for on GPUs
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)  # the number that torchrun gives to ranks, on which bits of the CPU depend
    flags.devices = flags.devices and [int(name) if name.isdecimal() else name for name in flags.devices.split(",")]
    logging.basicConfig(format="%(message)s")
    logging.getLogger("balanced_parallel").setLevel(logging.INFO)  # why "auto" chose a strategy
    with contextlib.ExitStack() as stack:
        with one_line(2, OSError, ValueError, ImportError, RuntimeError):
            if not flags.simulate and (flags.plot or flags.table or (flags.memory and not flags.plan)):
                raise ValueError("--memory, --plot and --table describe simulated GPUs, expected --simulate N beside them")
            torch.manual_seed(flags.seed)
            task = load_task(flags)
            if flags.plan or flags.simulate:
                from comparison import Comparison, make_plan

                if flags.plan:
                    print(make_plan(task, flags))
                    return
                comparison = Comparison(task, flags, stack)
            training = Training(flags, task)
        with one_line(1, OSError, FloatingPointError, *[torch.OutOfMemoryError] * bool(flags.simulate)):
            finished = training.run()
            if finished:
                training.finish()
            elif training.is_main:
                print(f"stopped after step {len(training.losses)}/{flags.steps}, all state is saved: go on with --resume")
    if comparison and finished and training.is_main:
        comparison.show(training.losses, training.model.devices)


if __name__ == "__main__":
    main()
