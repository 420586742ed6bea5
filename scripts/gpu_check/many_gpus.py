"""Checks for a machine with two or more GPUs: transport, races between devices, gradients, step times, ranks."""

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from asynchrony import check_bits, check_races, check_waits
from machine import Machine
from ranks import check_ranks, language_model, rows_per_device
from steps import Devices, compare_devices, make_step
from table import Check, Row, at_most, attempt, judge
from torch import Tensor, nn
from torch.cuda import comm

from balanced_parallel import DataParallelCriterion, DataParallelModel

TRANSPORT_LIMIT = 1.5  # time of the package's broadcast or reduction against torch.cuda.comm
SLOWER_LIMIT = 1.1  # time of a step against nn.DataParallel
HOTTEST_LIMIT = 1.1  # largest peak over the mean of all devices


def counts(machine: Machine) -> list[int]:
    """Returns the numbers of GPUs that are compared."""
    return [number for number in (2, 4, 8) if number <= len(machine.devices)]


def check_transport(machine: Machine) -> Iterator[Row]:
    """Measures the bandwidth of a broadcast and a reduction of 256 MiB, by torch and by the package."""
    width = machine.size(8192, 64)  # of a square matrix of float32
    for count in counts(machine):
        devices = machine.devices[:count]
        for kind, by_torch, by_package in (
            ("broadcast", torch_broadcast_seconds, broadcast_seconds),
            ("reduction", torch_reduction_seconds, reduction_seconds),
        ):
            name = f"{count} devices: {kind}"
            yield attempt(
                name, functools.partial(_transport, name, machine, devices, width, by_torch, by_package), machine.without_speed
            )
            machine.release()


Seconds = Callable[[Machine, Devices, int], float]


def _transport(name: str, machine: Machine, devices: Devices, width: int, by_torch: Seconds, by_package: Seconds) -> Row:
    size = 4 * width * width * (len(devices) - 1)  # bytes that have to arrive, or to be added
    theirs = by_torch(machine, devices, width)
    machine.release()
    own = by_package(machine, devices, width)
    speeds = [f"{size / max(seconds, 1e-9) / 1e9:.1f} GB/s" for seconds in (own, theirs)]
    return at_most(name, f"{speeds[0]}, torch.cuda.comm {speeds[1]}; time ratio", own / theirs, TRANSPORT_LIMIT)


def torch_broadcast_seconds(machine: Machine, devices: Devices, width: int) -> float:
    """Returns the time of ``torch.cuda.comm.broadcast``."""
    tensor = torch.randn(width, width, device=devices[0])
    indices = [device.index for device in devices]
    return machine.median_seconds(lambda: comm.broadcast(tensor, indices), machine.size(10, 1))


def torch_reduction_seconds(machine: Machine, devices: Devices, width: int) -> float:
    """Returns the time of ``torch.cuda.comm.reduce_add``."""
    copies = [torch.randn(width, width, device=device) for device in devices]
    return machine.median_seconds(lambda: comm.reduce_add(copies, devices[0].index), machine.size(10, 1))


def broadcast_seconds(machine: Machine, devices: Devices, width: int) -> float:
    """Returns the time by which a forward is longer if the parameters have to be copied before."""
    model = DataParallelModel(nn.Linear(width, width, bias=False), list(devices))
    inputs = torch.randn(len(devices), width, device=devices[0])

    def refreshed() -> None:
        model.refresh_replicas()
        model(inputs)

    with torch.no_grad():
        times = machine.size(10, 1)
        return machine.median_seconds(refreshed, times) - machine.median_seconds(lambda: model(inputs), times)


def reduction_seconds(machine: Machine, devices: Devices, width: int) -> float:
    """Returns the time to sum the gradients that have accumulated on the replicas."""
    model = DataParallelModel(nn.Linear(width, width, bias=False), list(devices))
    criterion = DataParallelCriterion(nn.MSELoss())
    inputs = torch.randn(len(devices), width, device=devices[0])
    times = []
    for _ in range(machine.size(12, 3)):
        model.zero_grad()
        with model.no_sync():
            criterion(model(inputs), inputs).backward()
        machine.synchronize()
        started = time.perf_counter()
        model.reduce_gradients()
        machine.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def check_step_times(machine: Machine) -> Iterator[Row]:
    """Compares the time and the peaks of a step on 2, 4 and 8 GPUs with ``nn.DataParallel``."""
    for count in counts(machine):
        devices = machine.devices[:count]
        net, batch = language_model(machine, rows_per_device(machine) * count)
        inputs, targets = batch[0].to(devices[0]), batch[1].to(devices[0])
        times: list[float] = []
        for name, build in (("nn.DataParallel", data_parallel_step), ("TrainStep", train_step)):
            make = functools.partial(build, net, devices, inputs, targets)
            yield attempt(f"{count} devices: {name}", functools.partial(_step_time, name, machine, devices, make, times))
            machine.release()
        name = f"{count} devices: TrainStep / nn.DataParallel"
        yield attempt(name, functools.partial(_ratio, name, times), machine.without_speed)


def _step_time(name: str, machine: Machine, devices: Devices, make: Callable[[], Callable[[], Any]], times: list[float]) -> Row:
    """Appends the time of a step to ``times``. The balance of its peaks is judged for ``TrainStep``."""
    step = make()
    step()
    machine.synchronize()
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    times.append(machine.median_seconds(step, machine.size(10, 1)))
    peaks = [torch.accelerator.max_memory_allocated(device) for device in devices]
    hottest = max(peaks) * len(peaks) / sum(peaks)
    time_text = "" if machine.simulated else f"{times[-1] * 1e3:.1f} ms, "
    text = f"{time_text}hottest peak / mean {hottest:.2f}"
    return judge(f"{len(devices)} devices: {name}", text, name != "TrainStep" or hottest <= HOTTEST_LIMIT)


def _ratio(name: str, times: list[float]) -> Row:
    theirs, own = times
    return at_most(name, "time ratio", own / theirs, SLOWER_LIMIT)


def train_step(net: nn.Module, devices: Devices, inputs: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Returns a step of ``TrainStep`` with the optimizer spread over the devices."""
    step = make_step(net, devices, optimizer=torch.optim.AdamW, lr=1e-4)
    return lambda: step(inputs, targets)


def data_parallel_step(net: nn.Module, devices: Devices, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """Returns a step of ``nn.DataParallel``, as its documentation shows it."""
    model = nn.DataParallel(copy.deepcopy(net).to(devices[0]), [device.index for device in devices])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _layouts(machine: Machine) -> list[list[torch.device]]:
    """Returns all GPUs, and all in the other order."""
    return [machine.devices, machine.devices[::-1]]


def _gradients(machine: Machine) -> Iterator[Row]:
    for devices in _layouts(machine):
        yield from compare_devices(machine, devices)


def _races(machine: Machine) -> Iterator[Row]:
    for devices in _layouts(machine):
        yield from check_races(machine, devices)


CHECKS: dict[str, Check] = {
    "transport": check_transport,
    "gradients": _gradients,
    "races": _races,
    "waits": lambda machine: check_waits(machine, machine.devices),
    "bits": lambda machine: check_bits(machine, machine.devices),
    "times": check_step_times,
    "ranks": check_ranks,
}
