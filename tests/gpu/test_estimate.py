"""Predicted and used memory of seven models. It is the first file: workspaces that other tests leave would be counted."""

import copy

import pytest
import torch
from helpers.gpu import on
from torch import nn

from balanced_parallel import Precision, memory

ACTIVE_LIMIT = 0.1  # relative; cuDNN's workspaces are not predicted
RESERVED_LIMIT = 0.2


class Recurrent(nn.LSTM):
    """Layers of LSTM. Returns the outputs of the last position."""

    def forward(self, inputs):
        return super().forward(inputs)[0][:, -1]


def perceptron(size):
    width = size(4096, 16)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(size(8192, 32), width)


def encoder(size, dropout=0.0):
    width, words = size(512, 16), size(8192, 64)
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, dropout, batch_first=True) for _ in range(size(6, 2))]
    net = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, words), nn.Flatten(0, 1))
    return net, torch.randint(words, (size(16, 4), size(256, 8)))


def encoder_with_dropout(size):
    return encoder(size, dropout=0.1)


def convolutions(size, norm=nn.BatchNorm2d):
    channels, pixels = size(64, 8), size(224, 16)
    layers = [nn.Conv2d(3, channels, 7, 2, 3), norm(channels), nn.ReLU()]
    for _ in range(size(6, 2)):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, size(1000, 10)))
    return net, torch.randn(size(32, 4), 3, pixels, pixels)


def convolutions_with_group_norm(size):
    return convolutions(size, lambda channels: nn.GroupNorm(8, channels))


def recurrent(size):
    width = size(512, 16)
    net = nn.Sequential(Recurrent(width, width, num_layers=3, batch_first=True), nn.Linear(width, 10))
    return net, torch.randn(size(64, 4), size(256, 8), width)


def embedding(size):
    words = size(200_000, 2_000)
    return nn.Sequential(nn.EmbeddingBag(words, 256), nn.Linear(256, 10)), torch.randint(words, (16, 256))


@on("one")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "build",
    [perceptron, encoder, encoder_with_dropout, convolutions, convolutions_with_group_norm, recurrent, embedding],
)
def test_predicted_bytes_are_those_of_the_allocator(machine, build, precision, at_most):
    if build is recurrent and machine.cluster:
        pytest.skip("no estimate knows the operators of an LSTM on simulated devices")
    net, inputs = build(machine.size)
    targets = inputs.flatten() if "encoder" in build.__name__ else torch.zeros(len(inputs), dtype=torch.int64)
    report = memory.estimate(net, nn.CrossEntropyLoss(), inputs, targets, precision=precision)
    machine.release()
    active, reserved = used_bytes(machine.first, net, inputs, targets, precision)
    for text, predicted, used, limit in (
        ("active", report.allocated[0], active, ACTIVE_LIMIT),
        ("reserved", report.reserved[0], reserved, RESERVED_LIMIT),
    ):
        at_most(f"{text} {used / 2**20:.1f} MiB, error of the prediction", abs(predicted / used - 1), limit)


def used_bytes(device, net, inputs, targets, precision):
    """Returns active and reserved bytes at the peak of the second update of the plain loop."""
    net, inputs, targets = copy.deepcopy(net).to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        with Precision(precision).autocast([device]):
            loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        del loss
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
