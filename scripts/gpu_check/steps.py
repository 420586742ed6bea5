"""Small networks, and the training steps in which checks compare lists of devices."""

import copy
import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from machine import Machine, names
from table import Row, at_most, attempt
from tasks import CONTEXT, LanguageModel
from torch import Tensor, nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, Precision, TrainStep

Devices = Sequence[torch.device]
Batch = tuple[Tensor, Tensor]
LOSS_LIMIT = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # relative, over the updates
GRADIENT_LIMIT = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}  # relative, of the norm of all gradients


def networks(machine: Machine) -> dict[str, tuple[nn.Module, Tensor]]:
    """Returns small networks by name, each with a batch of inputs. On GPUs, the gradients of one fill several buckets."""
    torch.manual_seed(0)
    rows, width = machine.size(37, 13), 2600
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    conv = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    nets: dict[str, tuple[nn.Module, Tensor]] = {
        "mlp": (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)), torch.randn(rows, 64)),
        "conv": (nn.Sequential(*conv, nn.Flatten(), nn.Linear(32, 10)), torch.randn(rows, 3, 16, 16)),
        "attention": (nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 8, 10)), torch.randn(rows, 8, 64)),
    }
    if not machine.simulated:
        wide = nn.Sequential(nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10))
        nets["several buckets"] = wide, torch.randn(rows, 64)
    return nets


def language_model(
    machine: Machine, rows: int, seed: int = 0, words: int = 8192, width: int = 512, layers: int = 4
) -> tuple[LanguageModel, Batch]:
    """Returns the model of train.py, by default with 20 million parameters, and a batch on the host. Simulated ones are small."""
    torch.manual_seed(0)
    words, width = machine.size(words, 64), machine.size(width, 32)
    model = LanguageModel(words, width, layers=machine.size(layers, 1), heads=machine.size(width // 64, 2))
    tokens = torch.randint(words, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def labels(rows: int) -> Tensor:
    """Returns the targets of a batch. One label in three is ignored."""
    targets = torch.arange(rows) % 10
    targets[::3] = -100
    return targets


def make_step(
    net: nn.Module,
    devices: Devices,
    precision: str | Precision = "fp32",
    micro_batch_size: int | Literal["auto"] | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.1,
) -> TrainStep:
    """Returns a step of a copy of ``net``, clipped, with the optimizer spread over the devices."""
    model = DataParallelModel(copy.deepcopy(net), list(devices))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    balanced = BalancedOptimizer(model, optimizer, lr=lr)
    return TrainStep(model, criterion, balanced, micro_batch_size=micro_batch_size, precision=precision, max_grad_norm=1.0)


def parameters_of(step: TrainStep) -> list[Tensor]:
    """Returns the parameters that a step trains, without their gradients."""
    assert isinstance(step.model, nn.Module)
    return [parameter.detach() for parameter in step.model.parameters()]


def train(net: nn.Module, inputs: Tensor, devices: Devices, precision: str, micro_batch_size: int | None, updates: int) -> Tensor:
    """Returns the losses of some updates."""
    step = make_step(net, devices, precision, micro_batch_size)
    return torch.stack([step(inputs, labels(len(inputs))).cpu() for _ in range(updates)])


def gradients(net: nn.Module, inputs: Tensor, devices: Devices, precision: str) -> Tensor:
    """Returns the gradients of one backward, flat and on the host."""
    model = DataParallelModel(copy.deepcopy(net), list(devices), precision=precision)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), precision=precision)
    criterion(model(inputs), labels(len(inputs))).backward()
    return torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters() if parameter.grad is not None])


def on_each(check: Callable[[Machine, Devices], Iterator[Row]], machine: Machine, layouts: Sequence[Devices]) -> Iterator[Row]:
    """Runs a check on each list of devices."""
    for devices in layouts:
        yield from check(machine, devices)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of ``expected``. It is nan if one of them is not finite."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def compare_devices(machine: Machine, devices: Devices) -> Iterator[Row]:
    """Compares losses and gradients on ``devices`` with those on the first GPU, in two rows per precision."""
    one, updates = machine.devices[:1], machine.size(4, 2)
    nets = networks(machine)

    def losses(name: str, precision: str) -> Row:
        errors = {}
        for net_name, (net, inputs) in nets.items():
            found = train(net, inputs, devices, precision, 5, updates)
            errors[net_name] = relative_error(found, train(net, inputs, one, precision, None, updates))
        return _largest(name, errors, LOSS_LIMIT[precision])

    def backward(name: str, precision: str) -> Row:
        errors = {}
        for net_name, (net, inputs) in nets.items():
            found = gradients(net, inputs, devices, precision)
            errors[net_name] = relative_error(found, gradients(net, inputs, one, precision))
        return _largest(name, errors, GRADIENT_LIMIT[precision])

    for precision in LOSS_LIMIT:
        for kind, measure in (("losses", losses), ("gradients", backward)):
            name = f"{names(devices)}: {kind}, {precision}"
            yield attempt(name, functools.partial(measure, name, precision))


def _largest(name: str, errors: dict[str, float], limit: float) -> Row:
    """Returns a row about the largest error. A nan is larger than all numbers."""
    worst = max(errors, key=lambda net: float("inf") if math.isnan(errors[net]) else errors[net])
    return at_most(name, f"largest relative error of {len(errors)} networks ({worst})", errors[worst], limit)


def digest(machine: Machine, devices: Devices) -> str:
    """Returns a checksum of all bits of the parameters after three updates of each network."""
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - it would hide early reads; mypy does not know it
    try:
        sums = hashlib.sha256()
        for net, inputs in networks(machine).values():
            step = make_step(net, devices)
            for _ in range(3):
                step(inputs, labels(len(inputs)))
            for parameter in parameters_of(step):
                on_host = parameter.cpu().contiguous()
                sums.update(ctypes.string_at(on_host.data_ptr(), on_host.nbytes))
        return sums.hexdigest()
    finally:
        torch.use_deterministic_algorithms(False)
