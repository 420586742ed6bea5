"""Runs a script in which ranks fail, in the manner of torchft's event injector.

python benchmarks/faults/inject.py FOLDER PLACE:RANK:STEP,PLACE:RANK:STEP,... scripts/train.py ...

Each start of the script has one fault, in their order. Those behind the last have none. A file in FOLDER is written just before a
fault, with the process id. STEP counts the steps of this start, or its checkpoints for the places "checkpoint",
"checkpoint-complete" and "disk-full". For "checkpoint-again" it counts the calls that rename, and each checkpoint is saved twice
with its number. For "read-error" it counts the checkpoints that are looked at before one is loaded.
"""

import datetime
import errno
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import balanced_parallel
from balanced_parallel.runtime import collectives

PLACES = ("forward", "backward", "exchange", "between", "loader", "hang", "checkpoint", "checkpoint-complete", "disk-full")
PLACES += ("checkpoint-again", "read-error")


class Fault:
    """Fails at a place of a step, if this is the rank and the first attempt.

    Args:
        place: one of ``PLACES``.
        step: number of the step or of the checkpoint, from 1.
        marker: file that is written before.
        is_here: this is the rank that fails. The others only have a short timeout while it hangs.
    """

    def __init__(self, place: str, step: int, marker: Path, is_here: bool) -> None:
        self.place, self.step, self.marker, self.is_here = place, step, marker, is_here
        self.steps = self.saves = self.renames = self.reads = 0

    def at(self, place: str, count: int | None = None) -> None:
        """Fails if this is the place and the step."""
        if (
            not self.is_here
            or place != self.place
            or (self.steps if count is None else count) != self.step
            or self.marker.exists()
        ):
            return
        self.marker.write_text(str(os.getpid()))
        if place == "loader":
            raise LookupError("the loader of this rank fails")
        if place == "read-error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if place == "disk-full":
            Path("/dev/full").write_text("the error of the kernel")
        if place == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun would wait for 30 s
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Puts the places into the code that runs."""
        from balanced_parallel.state import checkpoint

        call, load = balanced_parallel.TrainStep.__call__, balanced_parallel.RankBatchSampler.__iter__
        forward = nn.Linear.forward
        write, finish = checkpoint.Writer.write_data, checkpoint.Writer.finish
        save, rename, damage = balanced_parallel.Checkpoints.save, os.rename, checkpoint.damage

        def step(*arguments: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.place == "hang" and self.steps == self.step:
                set_timeout(5)
            result = call(*arguments, **kwargs)
            self.at("between")
            return result

        def linear(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.at("forward")
                self.at("hang")
            output = forward(module, inputs)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.at("backward"))
            return output

        def exchanging(reduce: Callable[..., Any]) -> Callable[..., Any]:
            def exchange(*arguments: Any) -> Any:
                self.at("exchange")
                return reduce(*arguments)

            return exchange

        def batches(sampler: Any) -> Any:
            for number, batch in enumerate(load(sampler), 1):
                if sampler.seed is not None:
                    self.at("loader", number)
                yield batch

        def write_data(*arguments: Any) -> Any:
            self.saves += 1
            self.at("disk-full", self.saves)
            written = write(*arguments)
            self.at("checkpoint", self.saves)
            return written

        def complete(*arguments: Any, **kwargs: Any) -> None:
            finish(*arguments, **kwargs)
            self.at("checkpoint-complete", self.saves)

        def save_twice(checkpoints: Any, number: int) -> None:
            save(checkpoints, number)
            save(checkpoints, number)

        def count_rename(*arguments: Any, **kwargs: Any) -> None:
            self.renames += 1
            self.at("checkpoint-again", self.renames)
            rename(*arguments, **kwargs)

        def read(*arguments: Any) -> str:
            self.reads += 1
            self.at("read-error", self.reads)
            return damage(*arguments)

        if self.place == "checkpoint-again":
            balanced_parallel.Checkpoints.save = save_twice  # type: ignore[method-assign]
            os.rename = count_rename
        checkpoint.damage = read
        balanced_parallel.TrainStep.__call__ = step  # type: ignore[method-assign]
        balanced_parallel.RankBatchSampler.__iter__ = batches  # type: ignore[method-assign]
        nn.Linear.forward = linear  # type: ignore[method-assign]
        collectives.gather_numbers = exchanging(collectives.gather_numbers)
        collectives.sum_over_ranks = exchanging(collectives.sum_over_ranks)  # with --reproducible bits
        checkpoint.Writer.write_data = write_data  # type: ignore[method-assign]
        checkpoint.Writer.finish = complete  # type: ignore[method-assign]


def set_timeout(seconds: float) -> None:
    """Gives the running process group a timeout. From the beginning, it would be that of slow starts as well."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


def main() -> None:
    """Runs the script of the command line."""
    folder, faults, script, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    done = len(os.listdir(folder))
    if done < len(faults.split(",")):
        place, rank, step = faults.split(",")[done].split(":")
        Fault(place, int(step), Path(folder) / f"{done} {place}", os.environ.get("RANK", "0") == rank).install()
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
