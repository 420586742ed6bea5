"""Times of training steps, host memory over many of them, and the language model of train.py scaled up."""

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine import Machine, names, resident_bytes
from steps import Batch, Devices, language_model, make_step
from table import Row, at_most, attempt, judge
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from balanced_parallel import Precision

SEARCH_LIMIT = 1.5  # a search for a plan in each step would be several times the step
GROWTH_LIMIT = 32.0  # MiB of host memory in 150 steps, after the first 50
SLOWER_LIMIT = 1.1  # of TrainStep against the plain loop
PEAK_LIMIT = 1.05
LONGEST = 60.0  # seconds for the 200 steps
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Self-attention with one projection before and one after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Adds attention over the positions of ``inputs`` [rows, positions, width]."""
        parts = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.before(inputs).chunk(3, 2))
        outputs: Tensor = self.after(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return inputs + outputs


def _attention(machine: Machine) -> tuple[nn.Module, Batch]:
    rows, positions, width = machine.size(16, 2), machine.size(512, 16), machine.size(1024, 32)
    layers = [Attention(width, heads=machine.size(16, 2)) for _ in range(4)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(positions * width, 10))
    return net, (torch.randn(rows, positions, width), torch.arange(rows) % 10)


def _convolutions(machine: Machine) -> tuple[nn.Module, Batch]:
    rows, size, channels = machine.size(16, 2), machine.size(112, 8), machine.size(64, 4)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(6):
        layers += [nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return net, (torch.randn(rows, 3, size, size), torch.arange(rows) % 10)


def check_plans(machine: Machine, devices: Devices) -> Iterator[Row]:
    """Compares steps of several replicas on one GPU with those of one, and measures host memory meanwhile.

    cuDNN keeps its plans per thread. A new thread for each forward would search again, and leak the plans of the last one.
    """
    cases: dict[str, tuple[Callable[[Machine], tuple[nn.Module, Batch]], Callable[[], Any]]] = {
        "bf16 attention (cuDNN first)": (_attention, lambda: sdpa_kernel(KERNELS, set_priority=True)),
        "cudnn.benchmark": (_convolutions, lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False)),
    }
    for text, (build, setting) in cases.items():
        name = f"{names(devices)}: {text}, step"
        growth: list[float] = []

        def run(build: Any = build, setting: Any = setting, name: str = name, growth: list[float] = growth) -> Row:
            net, (inputs, targets) = build(machine)
            first = machine.devices[0]
            half = inputs.to(first), targets.to(first)
            whole = torch.cat([half[0]] * len(devices)), torch.cat([half[1]] * len(devices))
            with setting():
                alone = make_step(net, [first], "bf16", lr=1e-4)
                one = machine.median_seconds(lambda: alone(*half), machine.size(20, 1))
                together = make_step(net, devices, "bf16", lr=1e-4)
                both, grown = _many_steps(machine, lambda: together(*whole))
            growth.append(grown)
            measured = f"{both * 1e3:.1f} ms for {len(devices)} replicas, {one * 1e3:.1f} ms for one; time per replica / one"
            return at_most(name, measured, both / (one * len(devices)), SEARCH_LIMIT)

        yield attempt(name, run, machine.without_speed)
        name = f"{names(devices)}: {text}, host memory"
        steps = machine.size(200, 8)

        def host(name: str = name, growth: list[float] = growth, steps: int = steps) -> Row:
            if not growth:
                return judge(name, "the steps failed", False)
            return at_most(name, f"MiB that {steps} steps add after the first {steps // 4}", growth[0] / 2**20, GROWTH_LIMIT)

        yield attempt(name, host)


def _many_steps(machine: Machine, step: Callable[[], Any]) -> tuple[float, float]:
    """Returns the median time of 200 steps, and the bytes by which the process grows after the first 50."""
    steps, times, started = machine.size(200, 8), [], time.perf_counter()
    grown = 0.0
    for number in range(steps):
        begun = time.perf_counter()
        step()
        machine.synchronize()
        times.append(time.perf_counter() - begun)
        if number == steps // 4 - 1:
            grown = -resident_bytes()
        if time.perf_counter() - started > LONGEST and number >= steps // 4:
            break
    return statistics.median(times[2:]), grown + resident_bytes()


def check_tokens(machine: Machine) -> Iterator[Row]:
    """Compares tokens per second and peak of the scaled-up model of train.py with those of the plain loop."""
    first = machine.devices[0]
    rows = machine.size(256 if torch.accelerator.get_memory_info(first)[1] > 30 * 2**30 else 64, 4)
    model, batch = language_model(machine, rows, words=16384, width=1024, layers=8)  # 135 million parameters
    on_device = batch[0].to(first), batch[1].to(first)
    results: dict[str, tuple[float, int]] = {}

    def measure(name: str, devices: Devices | None) -> Row:
        machine.release()
        if devices is None:
            step = plain_step(copy.deepcopy(model).to(first), on_device, first, "bf16")
        else:
            trained = make_step(model, devices, "bf16", optimizer=torch.optim.AdamW, lr=1e-4)
            step = lambda: trained(*on_device)  # noqa: E731
        step()
        step()
        machine.synchronize()
        torch.accelerator.reset_peak_memory_stats(first)
        seconds = machine.median_seconds(step, machine.size(10, 1))
        results[name] = seconds, torch.accelerator.max_memory_allocated(first)
        speed = "" if machine.simulated else f"{batch[0].numel() / seconds:,.0f} tokens/s, "
        return judge(f"train.py's model: {name}", f"{speed}peak {results[name][1] / 2**20:.1f} MiB", True)

    layouts = {"plain loop": None, names([first]): [first], names([first, first]): [first, first]}
    for name, devices in layouts.items():
        yield attempt(f"train.py's model: {name}", functools.partial(measure, name, devices))
    (seconds, peak), (own_seconds, own_peak) = results["plain loop"], results[names([first])]
    name = f"train.py's model: time of {names([first])} / plain loop"
    yield attempt(name, lambda: at_most(name, "ratio", own_seconds / seconds, SLOWER_LIMIT), machine.without_speed)
    yield at_most(f"train.py's model: peak of {names([first])} / plain loop", "ratio", own_peak / peak, PEAK_LIMIT)


def plain_step(net: nn.Module, batch: Batch, device: torch.device, kind: str) -> Callable[[], Any]:
    """Returns a step of the plain loop, with the loss on one device."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    precision = Precision(kind)

    def step() -> None:
        optimizer.zero_grad()
        with precision.autocast([device]):
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step
