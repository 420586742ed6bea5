"""A contrastive loss of 4,096 pairs on 4 devices: memory, error, and losses of other packages in every layout. See README.md.

Writes the README beside it. Needs the packages of requirements.txt, installed with ``--no-deps``.
"""

import copy
import multiprocessing
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from losses import CLASSES, losses
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, parallelize, simulate

HERE = Path(__file__).parent
PAIRS, DEVICES, SMALL = 4096, 4, 64
ROWS = 23
LAYOUTS = [(devices, size, adds) for devices in (1, 2, 4) for size in (None, 3, 1) for adds in (None, 6)]
RANKS = [(2, (12, 11)), (2, (23, 0)), (3, (11, 2, 10))]
MIB = 2**20


class Pairs(nn.Module):
    """Two encoders whose activations need most of the memory, and a temperature."""

    def __init__(self, inputs: int = 64, hidden: int = 256, outputs: int = 64, depth: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(inputs, hidden), *[nn.LeakyReLU(0.99)] * depth, nn.Linear(hidden, outputs))
        self.right = copy.deepcopy(self.left)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns normalised features of both sides, and the temperature."""
        return F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1), self.scale.exp()


def clip_loss(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """Returns the loss of CLIP."""
    logits, own = scale * left @ right.T, torch.arange(len(left), device=left.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def pairs() -> tuple[Tensor, Tensor]:
    """Returns the batch."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(PAIRS, 64, generator=generator, dtype=torch.float64)
    return left, left + 0.5 * torch.randn(PAIRS, 64, generator=generator, dtype=torch.float64)


def gradients(*modules: Any) -> list[Tensor]:
    """Returns the gradients on the host."""
    parameters = [parameter for module in modules if isinstance(module, nn.Module) for parameter in module.parameters()]
    return [torch.zeros_like(one).cpu() if one.grad is None else one.grad.cpu() for one in parameters]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of any gradient, over its largest entry."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-12)) for one, other in pairs)


def measure_pairs(way: str, expected: tuple[float, list[Tensor]]) -> list[Any]:
    """Returns a row of the table of memory: one update on simulated devices, after a first."""
    left, right = pairs()
    with simulate(DEVICES) as cluster:
        net = Pairs().double().to("sim:0")
        model, optimizer = DataParallelModel(net), torch.optim.SGD(net.parameters(), lr=0.0)
        peaks: list[int] = []
        for _ in range(2):
            cluster.reset_peak()
            if way == "gather, no micro-batches":
                optimizer.zero_grad()
                whole = gather(model(left, right).map(lambda output: output[:2]))
                loss = clip_loss(*whole, net.scale.exp())
                loss.backward()
            else:
                is_whole = way.startswith("whole")
                criterion = DataParallelCriterion(
                    clip_loss, whole=is_whole, weight=None if is_whole else lambda left, *_: len(left)
                )
                size = SMALL if "of 64" in way else None
                loss = TrainStep(model, criterion, optimizer, micro_batch_size=size)((left, right), ())
            peaks = cluster.peak
        found = float(loss.detach()), gradients(net)
    peak = f"{peaks[0] / MIB:.0f}, {max(peaks[1:]) / MIB:.0f}"
    return [way, peak, f"{found[0]:.4f}", f"{abs(found[0] / expected[0] - 1):.0e}", f"{difference(found[1], expected[1]):.0e}"]


def problem(name: str) -> tuple[nn.Module, DataParallelCriterion, Tensor, tuple[Tensor, ...]]:
    """Returns model, criterion, inputs and targets of a loss, in float64."""
    torch.manual_seed(2)
    make, criterion = losses()[name]
    module = make().double()
    targets = () if type(module).__name__ == "Towers" else (torch.randint(CLASSES, (ROWS,)),)
    return module, criterion, torch.randn(ROWS, 8, dtype=torch.float64), targets


def plain(name: str) -> tuple[float, list[Tensor]]:
    """Returns loss and gradients of the plain program."""
    module, criterion, inputs, targets = problem(name)
    output = module(inputs)
    loss = criterion.module(*(output if isinstance(output, tuple) else (output,)), *targets)
    loss.backward()
    return float(loss.detach()), gradients(module)


def error_of(found: tuple[float, list[Tensor]], expected: tuple[float, list[Tensor]]) -> float:
    """Returns the relative error of loss and gradients."""
    return max(abs(found[0] / expected[0] - 1), difference(found[1], expected[1]))


def on_replicas(name: str, devices: int, size: int | None, adds: int | None) -> tuple[float, list[Tensor]]:
    """Returns loss and gradients of an update in one process."""
    module, criterion, inputs, targets = problem(name)
    step = TrainStep(
        DataParallelModel(module, ["cpu"] * devices), criterion, torch.optim.SGD(module.parameters(), 0.0), micro_batch_size=size
    )
    if adds is None:
        return float(step(inputs, targets)), gradients(module)
    for piece in zip(inputs.split(adds), *(target.split(adds) for target in targets), strict=True):
        step.add(piece[0], piece[1:])
    return float(step.apply()), gradients(module)


def on_ranks(ranks: int, sizes: tuple[int, ...]) -> dict[str, float]:
    """Returns the largest error of each loss over ranks, with one and with many micro-batches."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, sizes, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return {name: max(one[name] for one in found) for name in found[0]}


def _rank(rank: int, ranks: int, port: int, sizes: tuple[int, ...], queue: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    errors = {}
    for name in losses():
        for size in (None, 2):
            module, criterion, inputs, targets = problem(name)
            expected = plain(name)
            model, criterion = parallelize(module, criterion, strategy="ddp")
            step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), 0.0), micro_batch_size=size)
            mine = inputs.split(list(sizes))[rank], tuple(target.split(list(sizes))[rank] for target in targets)
            found = float(step(*mine)), gradients(module)
            errors[name] = max(errors.get(name, 0.0), error_of(found, expected))
    queue.put(errors)
    torch.distributed.destroy_process_group()


def tables() -> tuple[list[list[Any]], list[list[Any]]]:
    """Returns the rows of both tables."""
    by_ranks = [on_ranks(*case) for case in RANKS]
    exact = []
    for name in losses():
        expected = plain(name)
        replicas = max(error_of(on_replicas(name, *layout), expected) for layout in LAYOUTS)
        exact.append([name, f"{replicas:.0e}", *(f"{errors[name]:.0e}" for errors in by_ranks)])
    net = Pairs().double()
    loss = clip_loss(*net(*pairs()))
    loss.backward()
    expected = float(loss.detach()), gradients(net)
    ways = [
        "whole=True, micro-batches of 64",
        "whole=True, one micro-batch",
        "gather, no micro-batches",
        "loss per device",
        "loss per micro-batch of 64",
    ]
    return [measure_pairs(way, expected) for way in ways], exact


def report(memory: list[list[Any]], exact: list[list[Any]]) -> str:
    """Returns the text of the README."""
    ranks = [f"{count} ranks, {' + '.join(map(str, sizes))} rows" for count, sizes in RANKS]
    lines = [
        "# How much memory does a contrastive loss of 4,096 pairs need, and is it exact?",
        "",
        f"CLIP's loss of {PAIRS:,} pairs on {DEVICES} simulated devices, in float64: two encoders of width 256, whose",
        f"activations need most of the memory, and the matrix of {PAIRS:,} x {PAIRS:,} pairs ({PAIRS**2 * 8 / MIB:.0f} MiB),",
        "which device 0 computes.",
        "",
        tabulate(
            memory,
            ["", "peak of device 0, of the others, MiB", "loss", "loss off by", "gradients off by"],
            "github",
            disable_numparse=True,
        ),
        "",
        "Off by: relative, against the plain program on one device with the whole batch. A loss per device is another loss: each",
        "row has a quarter of the negatives. A loss per micro-batch is yet another, with 64 of them.",
        "",
        "## Losses of open_clip, of pytorch-metric-learning, and functions of sums",
        "",
        f"Largest relative error of loss and gradients in float64, {ROWS} rows. In one process: 1, 2 and 4 replicas, one",
        "micro-batch, and micro-batches of 3 and of 1 row per device, at once and by `add` of 6 rows. Under torchrun:",
        "`DistributedDataParallel` on the CPU, one micro-batch and micro-batches of 2.",
        "",
        tabulate(exact, ["", f"one process, {len(LAYOUTS)} layouts", *ranks], "github", disable_numparse=True),
        "",
        f"Environment: {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__},",
        "open_clip_torch 3.3.0, pytorch-metric-learning 2.9.0. To reproduce (it writes this file):",
        "",
        "```bash",
        "pip install --no-deps -r benchmarks/contrastive/requirements.txt",
        "python benchmarks/contrastive/main.py",
        "```",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures everything and writes the README."""
    text = report(*tables())
    (HERE / "README.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
