"""Training within less memory than a batch needs: real ``torch.OutOfMemoryError``, on simulated devices one that is asked for."""

import contextlib
from collections.abc import Iterator

import torch
from machine import Machine, names
from steps import LOSS_LIMIT, Devices, labels, make_step, relative_error
from table import Row, attempt, judge
from torch import Tensor, nn

UPDATES = 3


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
