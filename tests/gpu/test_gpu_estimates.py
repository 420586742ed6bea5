"""Predicted and used memory of seven models. It is the first file: workspaces that other tests leave would be counted."""

import copy

import pytest
import torch
from helpers.benchmarks import load
from helpers.gpu import on
from helpers.slow import slow_but
from torch import nn

from balanced_parallel import Precision, memory

ACTIVE_LIMIT = 0.1  # relative; cuDNN's workspaces are not predicted
RESERVED_LIMIT = 0.2
MODELS = [
    "perceptron",
    "GPT",
    "encoder with dropout",
    "batch norm",
    "layer norm",
    "LSTM",
    "embedding",
]


def build(name, size):
    """Returns a model of the benchmark of estimates, or an embedding, large enough on a GPU to make constants negligible."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models = load("estimate", monkeypatch, "models")
    if name == "embedding":
        words = size(200_000, 2_000)
        net = nn.Sequential(nn.EmbeddingBag(words, 256), nn.Linear(256, 10))
        batch = torch.randint(words, (16, 256)), torch.zeros(16, dtype=torch.int64)
        return models.Problem(net, nn.CrossEntropyLoss(), *batch)
    return {
        "perceptron": lambda: models.mlp(size(8192, 32), size(4096, 16)),
        "GPT": lambda: models.plain_gpt(size(64, 2)),
        "encoder with dropout": lambda: models.encoder(size(64, 2)),
        "batch norm": lambda: models.resnet18(size(256, 2)),
        "layer norm": lambda: models.convnext(size(1024, 2)),
        "LSTM": lambda: models.recurrent(nn.LSTM, size(256, 4), size(256, 8)),
    }[name]()


@on("one")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", slow_but(MODELS, "perceptron"))
def test_predicted_bytes_are_those_of_the_allocator(machine, name, precision, at_most):
    if name == "LSTM" and machine.cluster:
        pytest.skip("no estimate knows the operators of an LSTM on simulated devices")
    problem = build(name, machine.size)
    arguments = problem.module, problem.criterion, problem.inputs, problem.targets
    report = memory.estimate(*arguments, precision=precision, keeps_gradients=False)
    machine.release()
    active, reserved = used_bytes(machine.first, problem, precision)
    for text, predicted, used, limit in (
        ("active", report.allocated[0], active, ACTIVE_LIMIT),
        ("reserved", report.reserved[0], reserved, RESERVED_LIMIT),
    ):
        at_most(
            f"{text} {used / 2**20:.1f} MiB, error of the prediction",
            abs(predicted / used - 1),
            limit,
        )


def used_bytes(device, problem, precision):
    """Returns active and reserved bytes at the peak of the second update of the plain loop."""
    net = copy.deepcopy(problem.module).to(device)
    inputs = problem.inputs.to(device)
    targets = problem.targets.to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        with Precision(precision).autocast([device]):
            loss = problem.criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        del loss
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(
        device
    )
