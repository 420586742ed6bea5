"""Claims about memory and speed that are often repeated, each with a measurement."""

import copy
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from balanced_parallel import simulate
from balanced_parallel.memory import estimate

MIB = 2**20


@dataclass(frozen=True)
class Claim:
    """A claim, the verdict, and the measurement behind it."""

    text: str
    verdict: str
    measured: str


def activations_without_parameters() -> Claim:
    """Adds layers without parameters to a network."""
    peaks = []
    for extra in (0, 4):
        layers = [nn.Linear(256, 256), *[nn.Sequential(nn.Tanh(), nn.Dropout(0.1)) for _ in range(extra)], nn.Linear(256, 10)]
        peaks.append(_peak(nn.Sequential(*layers), torch.zeros(1024, 256), torch.zeros(1024, dtype=torch.int64)))
    size = (peaks[1] - peaks[0]) / MIB
    measured = f"4 Tanh and 4 Dropout of 1 MiB each, without a parameter, add {size:.1f} MiB to the peak"
    return Claim("Activations without parameters take no memory", "wrong", measured)


def doubling_in_backward(modules: list[tuple[str, nn.Module, torch.Tensor, torch.Tensor]]) -> Claim:
    """Compares the peak of the backward with the memory at its start."""
    ratios = []
    for name, module, inputs, targets in modules:
        report = estimate(module, nn.CrossEntropyLoss(), inputs, targets, device_kind="sim", optimizer=torch.optim.SGD)
        start = report.timeline[0][report.phases["backward"]]
        ratios.append(f"{max(report.timeline[0]) / start:.2f} ({name})")
    measured = f"peak over the memory when the backward begins: {', '.join(ratios)}; saved tensors are freed on the way"
    return Claim("Intermediates double in the backward", "exaggerated", measured)


def emptying_the_cache() -> Claim:
    """Measures bytes in use before and after collecting garbage and emptying the cache."""
    with simulate(1) as cluster:
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to("sim:0")
        loss = net(torch.ones(1024, 256, device="sim:0")).sum()
        before = cluster.live[0]
        gc.collect()
        torch.accelerator.empty_cache() if hasattr(torch.accelerator, "empty_cache") else None
        after = cluster.live[0]
        cycle = [torch.ones(1024, 256, device="sim:0")]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        held = cluster.live[0]
        gc.collect()
        freed = held - cluster.live[0]
        del loss
    measured = (
        f"of {before / MIB:.1f} MiB in use, empty_cache and gc.collect freed {(before - after) / MIB:.1f} MiB. The cache is "
        "reused by this process anyway; emptying it helps other processes. gc.collect freed a tensor in a reference cycle "
        f"({freed / MIB:.1f} MiB)"
    )
    return Claim("Emptying the cache frees memory", "wrong for the process itself", measured)


def multiples_of_eight() -> Claim:
    """Compares the memory of neighbouring numbers of rows."""
    peaks = [_peak(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), *_rows(count)) for count in (63, 64, 65)]
    steps = [(later - earlier) / 1024 for earlier, later in itertools.pairwise(peaks)]
    measured = (
        f"63 to 64 rows: {steps[0]:+.1f} KiB, 64 to 65 rows: {steps[1]:+.1f} KiB; no step. Tensor cores want sizes of layers in "
        "multiples of 8, as documented by NVIDIA, and pad the rows; that is not measured here"
    )
    return Claim("The batch size must be a multiple of 8", "wrong for memory", measured)


def running_loss() -> Claim:
    """Sums losses with and without their graph, in training and in evaluation."""
    grows = {}
    for training in (True, False):
        with simulate(1) as cluster:
            net = nn.Sequential(*[nn.Linear(256, 256), nn.ReLU()] * 4).to("sim:0")
            inputs, total, live = torch.ones(1024, 256, device="sim:0"), torch.zeros((), device="sim:0"), []
            for _ in range(3):
                loss = net(inputs).mean()
                if training:
                    loss.backward()
                total = total + loss
                del loss
                live.append(cluster.live[0])
            grows[training] = (live[2] - live[1]) / 1024
            del total
    measured = (
        f"total += loss keeps {grows[True]:.1f} KiB per step after a backward, which has freed the activations, and "
        f"{grows[False]:.1f} KiB without a backward, as in an evaluation"
    )
    return Claim("A running loss must not keep its graph", "exaggerated in training, held in evaluation", measured)


class WorkPerRow(Dataset[torch.Tensor]):
    """Rows that need some work, as images that are decoded."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(64, 64)
        for _ in range(100):
            noise = noise @ noise / 32
        return noise


def workers(counts: tuple[int, ...] = (0, 1, 2, 4)) -> Claim:
    """Measures the time to load batches with several numbers of workers, which are running already."""
    times = {}
    for count in counts:
        with warnings.catch_warnings(action="ignore"):  # of more workers than cores
            loader = DataLoader(WorkPerRow(), 16, num_workers=count, persistent_workers=count > 0)
            times[count] = _seconds(lambda loader=loader: list(loader), 2)
            del loader
    ratios = ", ".join(f"{count}: {times[count] / times[0]:.2f}" for count in counts)
    measured = (
        f"time to load rows with some work, by number of workers, without any as 1: {ratios}, on {os.cpu_count()} cores. The "
        "best number depends on the work per row and on the cores, not on the GPUs"
    )
    return Claim("num_workers = 4 x GPUs", "wrong as a rule", measured)


def channels_last() -> Claim:
    """Compares convolutions in both layouts."""
    net, images = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()] * 4), torch.randn(8, 32, 32, 32)
    plain = _seconds(lambda: net(images).sum().backward())
    net, images = net.to(memory_format=torch.channels_last), images.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ratio = _seconds(lambda: net(images).sum().backward()) / plain
    return Claim(
        "channels-last is faster",
        "depends on the device",
        f"time of a step of convolutions on this CPU: {ratio:.2f} of the plain one",
    )


def fused_optimizers() -> Claim:
    """Compares the kernels of Adam."""
    times = {}
    for name in ("loop", "foreach", "fused"):
        parameters = [torch.randn(64, 64, requires_grad=True) for _ in range(100)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        settings = {"foreach": name == "foreach", "fused": name == "fused"}
        times[name] = _seconds(torch.optim.Adam(parameters, **settings).step)
    ratios = ", ".join(f"{name} {times[name] / times['loop']:.2f}" for name in times)
    return Claim("Fused optimizers are faster", "held", f"time of Adam on 100 small tensors on this CPU: {ratios}")


SAID = (
    Claim("Pinned memory is faster", "held for copies that do not wait", "needs a GPU: not measured here"),
    Claim(
        "cudnn.benchmark = True is faster", "for fixed shapes", "needs a GPU: not measured here. Each new shape is searched again"
    ),
    Claim("torch.compile is faster", "after the first steps", "its compilation takes seconds to minutes; not measured here"),
)


def _peak(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Returns the peak of a plain step on a simulated device, without an optimizer's state."""
    with simulate(1) as cluster:
        net = copy.deepcopy(module).to("sim:0")
        for _ in range(2):
            net.zero_grad()
            cluster.reset_peak()
            nn.functional.cross_entropy(net(inputs.to("sim:0")), targets.to("sim:0")).backward()
        return cluster.peak[0]


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 256), torch.zeros(count, dtype=torch.int64)


def _seconds(function: Callable[[], object], times: int = 5) -> float:
    """Returns the shortest time of several runs, after one to warm up."""
    function()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)
