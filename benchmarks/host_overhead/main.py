"""Time of the host for several replicas, compared with the same slices in a plain loop

A transformer of 241 modules with tiny tensors, so most of the time is that of Python: four slices of a batch, on ``["cpu"] * 4``,
without simulation, in one thread. Both sides take turns in one process. Run without arguments, it measures and writes the README
beside it.
"""

import contextlib
import functools
import importlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reports import environment, introduction, ratio_of_times, table, write_page  # noqa: E402

SLICES, ROUNDS, COPIES = 4, 40, 6


def build() -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a network of many small modules, with inputs and targets."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(24)])
    return net, torch.randn(2 * SLICES, 4, 16), torch.randn(2 * SLICES, 4, 16)


def timed(function: Callable[[], Any]) -> float:
    """Returns the seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def make_steps() -> dict[str, Callable[[], Any]]:
    """Returns functions that run one step each: forward, loss, backward, update."""
    # An optimizer of a TrainStep drops gradients that a loop adds to those of the step: each side has a network of its own.
    trained, inputs, targets = build()
    looped, net = build()[0], build()[0]
    devices = ["cpu"] * SLICES
    criterion, plain_criterion = DataParallelCriterion(nn.MSELoss()), nn.MSELoss()
    step = TrainStep(DataParallelModel(trained, devices), criterion, torch.optim.SGD(trained.parameters(), lr=1e-3))
    model = DataParallelModel(looped, devices)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (looped, net))
    slices = list(zip(inputs.chunk(SLICES), targets.chunk(SLICES), strict=True))

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def replicas() -> None:
        criterion(model(inputs), targets).backward()
        update(optimizer)

    def slice_by_slice() -> None:
        for some, wanted in slices:
            (plain_criterion(net(some), wanted) / SLICES).backward()
        update(plain_optimizer)

    def one_backward() -> None:
        torch.stack([plain_criterion(net(some), wanted) for some, wanted in slices]).mean().backward()
        update(plain_optimizer)

    return {
        "model and criterion": replicas,
        "TrainStep": lambda: step(inputs, targets),
        "slice by slice": slice_by_slice,
        "one backward": one_backward,
    }


def replication_times() -> dict[str, float]:
    """Returns milliseconds of the check for changes, of the making of replicas, and of torch's replicate() without copies."""
    net, inputs, _ = build()
    model = DataParallelModel(net, ["cpu"] * SLICES)
    model(inputs)
    home = [torch.device("cpu")] * SLICES

    def hand_out() -> None:
        with model.replicas.of(net, home, home[0]):
            pass

    theirs: Any = importlib.import_module("torch.nn.parallel.replicate")
    originals = theirs._broadcast_coalesced_reshape, theirs._get_device_index
    theirs._broadcast_coalesced_reshape = lambda tensors, devices, detach=False: [list(tensors) for _ in devices]
    theirs._get_device_index = lambda device, *_, **__: 0
    try:
        cases: dict[str, Callable[[], Any]] = {
            "check whether the module changed": lambda: model.replicas.prepare(net, home),
            "replicas handed out": hand_out,
            "torch's replicate(), without its copies": lambda: theirs.replicate(net, list(range(SLICES))),
        }
        return {name: statistics.median(timed(case) for _ in range(ROUNDS)) * 1e3 for name, case in cases.items()}
    finally:
        theirs._broadcast_coalesced_reshape, theirs._get_device_index = originals


class Model(nn.Module):
    """Transformer layers and logits, [rows, classes, positions]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(layers)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 100))

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the logits."""
        logits: Tensor = self.net(inputs)
        return logits.transpose(1, 2)


class Case(NamedTuple):
    """A model, and the numbers of copies and rounds to measure."""

    width: int
    layers: int
    copies: int
    rounds: int


CASES = {
    "small": Case(width=64, layers=6, copies=COPIES, rounds=ROUNDS),  # 0.8 MiB of gradients: one bucket
    "large": Case(width=512, layers=4, copies=COPIES // 2, rounds=ROUNDS // 2),  # 32 MiB: nothing but the last bucket is late
}


def ours_on_a_rank(case: Case, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Returns a step of this library."""
    model, criterion = parallelize(Model(case.width, case.layers), nn.CrossEntropyLoss(), ["cpu"])
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), micro_batch_size=4)
    return lambda: step(inputs, targets)


def by_hand_on_a_rank(case: Case, inputs: Tensor, targets: Tensor, *, exact: bool = False) -> Callable[[], Any]:
    """Returns a step of a hand-written loop of DistributedDataParallel, with the options that parallelize sets.

    Args:
        exact: divides by the number of counted targets of all ranks, and sums the loss over them, in one all-reduce of both.
    """
    model = nn.parallel.DistributedDataParallel(Model(case.width, case.layers), gradient_as_bucket_view=True)
    loss = nn.CrossEntropyLoss(reduction="sum" if exact else "mean")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        divisor, total = torch.tensor(1.0 if exact else 4.0), torch.zeros(())
        for index, (some, wanted) in enumerate(zip(inputs.split(4), targets.split(4), strict=True)):
            with model.no_sync() if index < 3 else contextlib.nullcontext():
                one = loss(model(some), wanted)
                total += one.detach()
                (one / divisor).backward()
        if exact:
            sums = torch.stack([total, (targets != -100).sum()])
            dist.all_reduce(sums)
            total, divisor = sums.unbind()
            for parameter in model.parameters():
                parameter.grad *= dist.get_world_size() / divisor
        optimizer.step()
        return total / divisor

    return step


def measure_rank(case: Case) -> tuple[float, float, float]:
    """Measures several copies of the programs, which run in a new random order in each round.

    Returns:
        The time of ours over that of the loop by hand, and over that of the exact one, as means of the copies' medians; and the
        time of the slowest copy of the loop by hand over the fastest. Equal programs differ by this factor, because of the
        addresses of their memory.
    """
    inputs, targets = torch.randn(16, 32, case.width), torch.randint(100, (16, 32))
    makers = ours_on_a_rank, by_hand_on_a_rank, functools.partial(by_hand_on_a_rank, exact=True)
    programs = [make(case, inputs, targets) for _ in range(case.copies) for make in makers]
    order, times = random.Random(0), [[0.0] * case.rounds for _ in programs]
    for number in range(-2, case.rounds):
        for index in order.sample(range(len(programs)), len(programs)):
            dist.barrier()
            times[index][number] = timed(programs[index])  # the first two, which warm up, are written over
    medians = [statistics.median(some) for some in times]
    ours, by_hand, exact = (statistics.mean(medians[start::3]) for start in range(3))
    return ours / by_hand, ours / exact, max(medians[1::3]) / min(medians[1::3])


def ratios_under_torchrun(ranks: int, case: str) -> list[str]:
    """Returns the results of :func:`measure_rank` on rank 0, as text."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(HERE / "main.py"), "--rank", case], capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout.split()[-3:]


def main() -> None:
    """Measures everything and writes the README."""
    torch.set_num_threads(1)
    if "--rank" in sys.argv:
        results = measure_rank(CASES[sys.argv[-1]])
        if dist.get_rank() == 0:
            print(*(f"{result:.3f}" for result in results))
        dist.destroy_process_group()
        return
    steps = make_steps()
    plain = statistics.median(timed(steps["slice by slice"]) for _ in range(ROUNDS)) * 1e3
    rows = [
        [ours, other, f"{ratio_of_times(steps[ours], steps[other], ROUNDS):.3f}"]
        for ours in ("model and criterion", "TrainStep")
        for other in ("slice by slice", "one backward")
    ]
    ratios = table(rows, ["ours", "plain program", "time of ours / plain"])
    parts = [[name, f"{value:.2f}", f"{value / plain:.1%}"] for name, value in replication_times().items()]
    times = table(parts, ["", "ms", "of a plain step"])
    ranked = table(
        [[ranks, case, *ratios_under_torchrun(ranks, case)] for ranks, case in ((1, "small"), (2, "small"), (2, "large"))],
        ["ranks", "model", "time of TrainStep / by hand", "/ by hand, exact", "slowest copy by hand / fastest"],
    )
    text = f"""{introduction(__doc__)}

{ratios}

*Slice by slice*: forward, loss and backward of one slice after the other. *One backward*: the four losses are averaged first,
which starts the autograd engine once instead of four times. A plain step takes {plain:.1f} ms.

{times}

## Under torchrun

`TrainStep` compared with a hand-written loop of `DistributedDataParallel` with `no_sync`, four micro-batches each, on gloo.
It divides by the targets that all ranks count and returns their exact loss, which the loop by hand does not. *By hand, exact* is
the same loop with one more all-reduce, of the loss and the number of counted targets, and a division of the gradients. The small
model has 0.8 MiB of gradients in one bucket. The large one has 32 MiB, most of which are reduced during the backward. {COPIES}
copies of each program ({COPIES // 2} of the large one) take turns. The last column shows how much copies of the same program
differ.

{ranked}

Medians of {ROUNDS} ({ROUNDS // 2} of the large model).
"""
    write_page(HERE, text, f"{environment()}, 1 thread.")


if __name__ == "__main__":
    main()
