"""Checks for a machine with one GPU. The same GPU is listed twice, and the CPU beside it is a second device.

Replicas on one device share its parameters. ``[0, 0]`` therefore reaches the split, the workers and the sums of gradients, but
neither broadcasts, nor copies between devices, nor several owners of optimizer state. ``["cuda:0", "cpu"]`` reaches these, and
its reverse reaches them with the parameters on the host. Transport between two GPUs is for the other part.
"""

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from asynchrony import check_bits, check_races, check_waits
from machine import Machine, NotPossible, names
from memory import check_memory
from ranks import check_group_of_one
from recovery import check_recovery
from speed import check_plans, check_tokens
from steps import LOSS_LIMIT, Devices, compare_devices, labels, make_step, networks, parameters_of, relative_error
from table import Check, Row, at_most, attempt, judge
from torch import Tensor, nn

from balanced_parallel import DataParallelModel, Precision, TrainStep

CPU = torch.device("cpu")


def layouts(machine: Machine) -> list[list[torch.device]]:
    """Returns the lists of devices that one GPU allows, besides itself."""
    first = machine.devices[0]
    return [[first, first], [first, CPU], [CPU, first]]


def check_layouts(machine: Machine) -> Iterator[Row]:
    """Compares losses and gradients of each layout with those of the GPU alone."""
    for devices in layouts(machine):
        yield from compare_devices(machine, devices)


def check_reach(machine: Machine) -> Iterator[Row]:
    """Measures which layouts have copies of parameters, and several owners of optimizer state."""
    first = machine.devices[0]
    bytes_on_gpu: dict[str, int] = {}

    def measure(devices: Devices) -> int:
        machine.release()
        before = torch.accelerator.memory_allocated(first)
        width = machine.size(4096, 64)
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)], nn.Linear(width, 10))
        step = make_step(net, devices, optimizer=torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            step(torch.randn(8, width), labels(8))
        machine.release()
        return torch.accelerator.memory_allocated(first) - before

    measure([first])  # libraries take their workspaces
    for devices in ([first], *layouts(machine)[:2]):
        bytes_on_gpu[names(devices)] = measure(devices)
    whole = bytes_on_gpu[names([first])]
    for devices, low, high, meaning in (
        (layouts(machine)[0], 0.95, 1.15, "one copy of the parameters, one owner"),
        (layouts(machine)[1], 0.45, 0.75, "half of the optimizer state"),
    ):
        ratio = bytes_on_gpu[names(devices)] / whole
        text = f"bytes on {first} / alone: {ratio:.2f} (expected {low} to {high}: {meaning})"
        yield judge(f"{names(devices)}: reach", text, low <= ratio <= high)


def check_overflow(machine: Machine) -> Iterator[Row]:
    """Runs an update of fp16 whose gradients overflow, and one after it."""
    net, inputs = networks(machine)["mlp"]
    for devices in ([machine.devices[0]], layouts(machine)[0]):
        name = f"{names(devices)}: fp16 overflow"

        def run(devices: Devices = devices, name: str = name) -> Row:
            scaler = torch.amp.GradScaler(machine.devices[0].type, init_scale=2.0**60)
            step = make_step(net, devices, Precision("fp16", scaler))
            before = _parameters(step)
            step(inputs, labels(len(inputs)))
            skipped, scale = torch.equal(before, _parameters(step)), scaler.get_scale()
            scaler.update(new_scale=2.0**10)
            loss = step(inputs, labels(len(inputs))).cpu()
            updated = not torch.equal(before, _parameters(step)) and bool(_parameters(step).isfinite().all())
            error = relative_error(loss, make_step(net, devices)(inputs, labels(len(inputs))).cpu())
            text = f"first update skipped: {skipped}, scale halved: {scale == 2.0**59}; second made: {updated}, error {error:.1e}"
            return judge(name, text, skipped and scale == 2.0**59 and updated and error <= LOSS_LIMIT["fp16"])

        yield attempt(name, run)


def _parameters(step: TrainStep) -> Tensor:
    return torch.cat([parameter.flatten().cpu() for parameter in parameters_of(step)])


def check_compile(machine: Machine) -> Iterator[Row]:
    """Runs a compiled module on one replica, and expects an error for two."""
    net, inputs = networks(machine)["mlp"]
    if not machine.simulated and importlib.util.find_spec("triton") is None:
        raise NotPossible("triton is not installed")
    backend = "eager" if machine.simulated else "inductor"
    first = machine.devices[:1]

    def alone() -> Row:
        compiled: Any = torch.compile(copy.deepcopy(net).to(first[0]), backend=backend)
        found = DataParallelModel(compiled, first)(inputs).gather("cpu")
        expected = DataParallelModel(copy.deepcopy(net), first)(inputs).gather("cpu")
        return at_most(f"{names(first)}: torch.compile, {backend}", "relative error", relative_error(found, expected), 1e-4)

    def twice() -> Row:
        compiled: Any = torch.compile(copy.deepcopy(net), backend=backend)
        try:
            DataParallelModel(compiled, first * 2)(inputs)
        except TypeError as error:
            return judge(f"{names(first * 2)}: torch.compile", f"refused: {str(error)[:80]}", "compiled" in str(error))
        return judge(f"{names(first * 2)}: torch.compile", "was not refused", False)

    yield attempt(f"{names(first)}: torch.compile, {backend}", alone)
    yield attempt(f"{names(first * 2)}: torch.compile", twice)


def _waits(machine: Machine) -> Iterator[Row]:
    for devices in ([machine.devices[0]], layouts(machine)[0]):
        yield from check_waits(machine, devices)


def _races(machine: Machine) -> Iterator[Row]:
    for devices in layouts(machine):
        yield from check_races(machine, devices)


CHECKS: dict[str, Check] = {
    "memory": check_memory,  # first: memory that others leave behind would be counted
    "layouts": check_layouts,
    "reach": check_reach,
    "ranks": check_group_of_one,
    "waits": _waits,
    "races": _races,
    "bits": lambda machine: check_bits(machine, layouts(machine)[0]),
    "overflow": check_overflow,
    "out of memory": check_recovery,
    "compile": check_compile,
    "plans": lambda machine: check_plans(machine, layouts(machine)[0]),
    "tokens": check_tokens,
}
