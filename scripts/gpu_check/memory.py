"""Predicted and used memory of real models: ``memory.estimate`` beside active and reserved bytes of a GPU's allocator."""

import copy
import functools
from collections.abc import Callable, Iterator

import torch
from machine import Machine
from table import Row, attempt, judge
from torch import Tensor, nn

from balanced_parallel import Precision, memory

PEAK_LIMIT = 0.1  # relative; cuDNN's workspaces are not predicted
RESERVED_LIMIT = 0.2

Problem = tuple[nn.Module, Tensor, Tensor]  # a model, its inputs and its targets


class Recurrent(nn.Module):
    """Three layers of LSTM, and a classifier of their last outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(512, 512, num_layers=3, batch_first=True)
        self.output = nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the logits of ``inputs`` [rows, positions, 512]."""
        logits: Tensor = self.output(self.layers(inputs)[0][:, -1])
        return logits


def _perceptron() -> Problem:
    layers = [layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10)), torch.randn(8192, 4096), torch.zeros(8192, dtype=torch.int64)


def _encoder(dropout: float) -> Problem:
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, dropout, batch_first=True) for _ in range(6)]
    net = nn.Sequential(nn.Embedding(8192, 512), *layers, nn.Linear(512, 8192), nn.Flatten(0, 1))
    tokens = torch.randint(8192, (16, 256))
    return net, tokens, tokens.flatten()


def _convolutions(norm: Callable[[int], nn.Module]) -> Problem:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), norm(64), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))
    return net, torch.randn(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)


def _recurrent() -> Problem:
    return Recurrent(), torch.randn(64, 256, 512), torch.zeros(64, dtype=torch.int64)


def _embedding(words: int) -> Problem:
    net = nn.Sequential(nn.EmbeddingBag(words, 256), nn.Linear(256, 10))
    return net, torch.randint(words, (16, 256)), torch.zeros(16, dtype=torch.int64)


def models(words: int = 200_000) -> dict[str, Callable[[], Problem]]:
    """Returns functions that build seven models with a batch each, large enough to make constants negligible.

    Args:
        words: rows of the embedding of the last of them.
    """
    return {
        "perceptron": _perceptron,
        "encoder": lambda: _encoder(0.0),
        "encoder with dropout": lambda: _encoder(0.1),
        "batch norm": lambda: _convolutions(nn.BatchNorm2d),
        "group norm": lambda: _convolutions(lambda channels: nn.GroupNorm(8, channels)),
        "recurrent": _recurrent,
        "embedding": lambda: _embedding(words),
    }


def check_memory(machine: Machine, only: str | None = None) -> Iterator[Row]:
    """Compares predicted, active and reserved bytes of the second of two AdamW steps.

    Args:
        machine: its first device is used.
        only: one of the models. On simulated devices the small one is the only one by default.
    """
    only = only or ("embedding" if machine.simulated else None)
    for model, build in models(machine.size(200_000, 2_000)).items():
        if model == (only or model):
            torch.manual_seed(0)
            net, *batch = build()
            for precision in ("fp32", "bf16"):
                name = f"estimate of {model}, {precision}"
                yield attempt(name, functools.partial(_compare, machine, name, net, (batch[0], batch[1]), precision))


def _compare(machine: Machine, name: str, net: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> Row:
    report = memory.estimate(net, nn.CrossEntropyLoss(), *batch, precision=precision)
    machine.release()
    active, reserved = _used(machine.devices[0], net, batch, precision)
    predicted, segments = report.allocated[0], report.reserved[0]
    errors = predicted / active - 1, segments / reserved - 1
    measured = (
        f"predicted {predicted / 2**20:.1f} MiB, active {active / 2**20:.1f}: {errors[0]:+.2%}; "
        f"predicted reserved {segments / 2**20:.1f}, reserved {reserved / 2**20:.1f}: {errors[1]:+.2%}"
    )
    return judge(name, measured, abs(errors[0]) <= PEAK_LIMIT and abs(errors[1]) <= RESERVED_LIMIT)


def _used(device: torch.device, net: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> tuple[int, int]:
    """Returns active and reserved bytes at the peak of the second update of the plain loop.

    Workspaces that libraries keep are part of both, so no other check may have left memory behind.
    """
    copied = copy.deepcopy(net).to(device)
    inputs, targets = batch[0].to(device), batch[1].to(device)
    optimizer = torch.optim.AdamW(copied.parameters())
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        with Precision(precision).autocast([device]):
            loss = nn.functional.cross_entropy(copied(inputs), targets)
        loss.backward()
        optimizer.step()
        del loss
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
