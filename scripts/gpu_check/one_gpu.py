"""Checks for a machine with one GPU. The same GPU is listed twice, and the CPU beside it is a second device.

Replicas on one device share its parameters. ``[0, 0]`` therefore reaches the split, the workers and the sums of gradients, but
neither broadcasts, nor copies between devices, nor several owners of optimizer state. ``["cuda:0", "cpu"]`` reaches these, and
its reverse reaches them with the parameters on the host. Transport between two GPUs is for the other part.
"""

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from asynchrony import check_bits, check_races, check_waits
from machine import Machine, NotPossible, names
from memory import check_memory
from ranks import check_group_of_one
from speed import check_plans, check_tokens
from steps import LOSS_LIMIT, Devices, compare_devices, labels, make_step, networks, on_each, parameters_of, relative_error
from table import Check, Row, at_most, attempt, judge
from torch import Tensor, nn

from balanced_parallel import DataParallelModel, Precision, TrainStep

CPU = torch.device("cpu")
UPDATES = 3  # of a run that is out of memory


def layouts(machine: Machine) -> list[list[torch.device]]:
    """Returns the lists of devices that one GPU allows, besides itself."""
    first = machine.devices[0]
    return [[first, first], [first, CPU], [CPU, first]]


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


def check_recovery(machine: Machine) -> Iterator[Row]:
    """Compares the losses of a run that is out of memory with those of one that has enough."""
    first = machine.devices[0]
    width, rows = machine.size(4096, 64), machine.size(16384, 64)
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Dropout(0.0), nn.GELU())]
    net, inputs = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10)), torch.randn(rows, 64)

    def train(devices: Devices, bytes_of_activations: int | None) -> tuple[Tensor, int | None, int]:
        step = make_step(net, devices, micro_batch_size="auto", optimizer=torch.optim.AdamW, lr=1e-3)
        losses = [step(inputs[:2], labels(2)).cpu()]  # libraries take their workspaces, the optimizer makes its state
        machine.release()
        torch.accelerator.reset_peak_memory_stats(first)
        before = torch.accelerator.memory_allocated(first)
        with contextlib.nullcontext() if bytes_of_activations is None else _limited(machine, bytes_of_activations):
            losses += [step(inputs, labels(rows)).cpu() for _ in range(UPDATES)]
        return torch.stack(losses), step.micro_batch_size, torch.accelerator.max_memory_allocated(first) - before

    for devices in ([first], [first, first]):
        name = f"{names(devices)}: out of memory"

        def run(devices: Devices = devices, name: str = name) -> Row:
            expected, _, needed = train(devices, None)
            found, size, _ = train(devices, needed * 2 // 3)
            error = relative_error(found, expected)
            text = f"settled on {size} of {rows // len(devices)} rows, relative error of the losses {error:.1e}"
            return judge(name, text, size is not None and error <= LOSS_LIMIT["fp32"])

        yield attempt(name, run)


@contextlib.contextmanager
def _limited(machine: Machine, more: int) -> Iterator[None]:
    """Leaves ``more`` bytes above those in use to the allocator of the first device."""
    if machine.cluster is not None:
        machine.cluster.fail_allocation(20)
        yield
        return
    device = machine.devices[0]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def check_compile(machine: Machine) -> Iterator[Row]:
    """Runs a compiled module on one replica, and on two."""
    net, inputs = networks(machine)["mlp"]
    if not machine.simulated and importlib.util.find_spec("triton") is None:
        raise NotPossible("triton is not installed")
    backend = "eager" if machine.simulated else "inductor"
    first = machine.devices[:1]

    def run(devices: list[torch.device]) -> Row:
        compiled: Any = torch.compile(copy.deepcopy(net).to(first[0]), backend=backend)
        found = DataParallelModel(compiled, devices)(inputs).gather("cpu")
        expected = DataParallelModel(copy.deepcopy(net), first)(inputs).gather("cpu")
        return at_most(f"{names(devices)}: torch.compile, {backend}", "relative error", relative_error(found, expected), 1e-4)

    for devices in (first, first * 2):
        yield attempt(f"{names(devices)}: torch.compile, {backend}", functools.partial(run, devices))


CHECKS: dict[str, Check] = {
    "memory": check_memory,  # first: memory that others leave behind would be counted
    "layouts": lambda machine: on_each(compare_devices, machine, layouts(machine)),
    "reach": check_reach,
    "ranks": check_group_of_one,
    "waits": lambda machine: on_each(check_waits, machine, [machine.devices[:1], layouts(machine)[0]]),
    "races": lambda machine: on_each(check_races, machine, layouts(machine)),
    "bits": lambda machine: check_bits(machine, layouts(machine)[0]),
    "overflow": check_overflow,
    "out of memory": check_recovery,
    "compile": check_compile,
    "plans": lambda machine: check_plans(machine, layouts(machine)[0]),
    "tokens": check_tokens,
}
