"""Predicted and used memory of real models: ``memory.estimate`` beside active and reserved bytes of a GPU's allocator."""

import copy
import functools
from collections.abc import Callable, Iterator

import torch
from check_machine import Machine
from check_table import Row, attempt, judge
from torch import Tensor, nn

from balanced_parallel import Precision, memory

PEAK_LIMIT = 0.1  # relative; cuDNN's workspaces are not predicted
RESERVED_LIMIT = 0.2

Model = tuple[Callable[[], nn.Module], Tensor, Tensor]


def models(words: int = 200_000) -> dict[str, Model]:
    """Returns seven models with a batch each, large enough to make constants negligible.

    Args:
        words: rows of the embedding in the smallest of them.
    """
    torch.manual_seed(0)

    def encoder(dropout: float) -> nn.Module:
        layers = [nn.TransformerEncoderLayer(512, 8, 2048, dropout, batch_first=True) for _ in range(6)]
        return nn.Sequential(nn.Embedding(8192, 512), *layers, nn.Linear(512, 8192), nn.Flatten(0, 1))

    def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), norm(64), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(512, 512, num_layers=3, batch_first=True)
            self.output = nn.Linear(512, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.output(self.layers(inputs)[0][:, -1])
            return logits

    def wide() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.GELU())], nn.Linear(4096, 10))

    tokens, images, zeros = torch.randint(8192, (16, 256)), torch.randn(32, 3, 224, 224), torch.zeros(8192, dtype=torch.int64)
    return {
        "perceptron": (wide, torch.randn(8192, 4096), zeros),
        "encoder": (lambda: encoder(0.0), tokens, tokens.flatten()),
        "encoder with dropout": (lambda: encoder(0.1), tokens, tokens.flatten()),
        "batch norm": (lambda: convolutions(nn.BatchNorm2d), images, zeros[:32]),
        "group norm": (lambda: convolutions(lambda channels: nn.GroupNorm(8, channels)), images, zeros[:32]),
        "recurrent": (Recurrent, torch.randn(64, 256, 512), zeros[:64]),
        "embedding": (lambda: nn.Sequential(nn.EmbeddingBag(words, 256), nn.Linear(256, 10)), tokens, zeros[:16]),
    }


def check_memory(machine: Machine, only: str | None = None) -> Iterator[Row]:
    """Compares predicted, active and reserved bytes of the second of two AdamW steps.

    Args:
        machine: its first device is used.
        only: one of the models. On simulated devices the small one is the only one by default.
    """
    only = only or ("embedding" if machine.simulated else None)
    for model, (build, inputs, targets) in models(machine.size(200_000, 10_000)).items():
        if model == (only or model):
            net = build()
            for precision in ("fp32", "bf16"):
                name = f"estimate of {model}, {precision}"

                yield attempt(name, functools.partial(_compare, machine, name, net, (inputs, targets), precision))


def _compare(machine: Machine, name: str, net: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> Row:
    report = memory.estimate(net, nn.CrossEntropyLoss(), *batch, precision=precision)
    constants = report.parts[0]["context"]  # outside of the allocator
    machine.release()
    active, reserved = _used(machine.devices[0], net, batch, precision)
    predicted, segments = report.peak[0] - constants, report.reserved[0] - constants
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
