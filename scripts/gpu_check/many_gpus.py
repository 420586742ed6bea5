"""Checks for a machine with two or more GPUs: races between devices, gradients, step times, ranks."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from asynchrony import check_bits, check_races, check_waits
from machine import Machine
from ranks import check_ranks
from speed import plain_step
from steps import Batch, Devices, compare_devices, language_model, make_step, on_each
from table import Check, Row, at_most, attempt, judge
from torch import nn

SLOWER_LIMIT = 1.1  # time of a step against nn.DataParallel
HOTTEST_LIMIT = 1.1  # largest peak over the mean of all devices


def counts(machine: Machine) -> list[int]:
    """Returns the numbers of GPUs that are compared."""
    return [number for number in (2, 4, 8) if number <= len(machine.devices)]


def check_step_times(machine: Machine) -> Iterator[Row]:
    """Compares the time and the peaks of a step on 2, 4 and 8 GPUs with ``nn.DataParallel``."""
    for count in counts(machine):
        devices = machine.devices[:count]
        net, batch = language_model(machine, machine.size(32, 2) * count)
        batch = batch[0].to(devices[0]), batch[1].to(devices[0])
        times: list[float] = []
        for name, build in (("nn.DataParallel", data_parallel_step), ("TrainStep", train_step)):
            make = functools.partial(build, net, devices, batch)
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


def data_parallel_step(net: nn.Module, devices: Devices, batch: Batch) -> Callable[[], Any]:
    """Returns a step of ``nn.DataParallel``, as its documentation shows it."""
    model = nn.DataParallel(copy.deepcopy(net).to(devices[0]), [device.index for device in devices])
    return plain_step(model, batch, devices[0], "fp32")


def train_step(net: nn.Module, devices: Devices, batch: Batch) -> Callable[[], Any]:
    """Returns a step of ``TrainStep`` with the optimizer spread over the devices."""
    return functools.partial(make_step(net, devices, optimizer=torch.optim.AdamW, lr=1e-4), *batch)


def _layouts(machine: Machine) -> list[list[torch.device]]:
    """Returns all GPUs, and all in the other order."""
    return [machine.devices, machine.devices[::-1]]


CHECKS: dict[str, Check] = {
    "gradients": lambda machine: on_each(compare_devices, machine, _layouts(machine)),
    "races": lambda machine: on_each(check_races, machine, _layouts(machine)),
    "waits": lambda machine: check_waits(machine, machine.devices),
    "bits": lambda machine: check_bits(machine, machine.devices),
    "times": check_step_times,
    "ranks": check_ranks,
}
