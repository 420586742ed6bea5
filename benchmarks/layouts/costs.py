"""Costs of `reproducible=True` on the host: updates with many draws, masks, attention, and the kernels that are replaced."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from networks import count_labels, make_bert, make_gpt2, token_loss
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep
from balanced_parallel.runtime.row_random import Draw, Forward, UpdateRandom

ROUNDS = 15
CPU = torch.device("cpu")


def seconds(*functions: Callable[[], Any], rounds: int = ROUNDS) -> list[float]:
    """Returns the median time of the processor for each function, on a machine that may be busy. They take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 2):
        for column, function in zip(times, functions, strict=True):
            started = time.process_time()
            function()
            column.append(time.process_time() - started)
    return [statistics.median(column[2:]) for column in times]


class Counting(UpdateRandom):
    """Runs functions whose draws are known, without the two small forwards."""

    def run(self, function: Callable[[], Any], rows: int, draws: list[Draw] | None = None) -> int:
        """Returns the number of draws of a function."""
        forward = Forward(self, range(rows), CPU, draws, {})
        with forward.drawing():
            function()
        return len(forward.drawn) - 1  # without the end


def make_step(module: nn.Module, devices: int, *, reproducible: bool) -> TrainStep:
    """Returns a step of text."""
    model, criterion = DataParallelModel(module, ["cpu"] * devices), DataParallelCriterion(token_loss, weight=count_labels)
    return TrainStep(model, criterion, torch.optim.SGD(module.parameters(), lr=1e-3), reproducible=reproducible)


def draw_costs() -> list[list[str]]:
    """Returns the time of updates of narrow models with 12 layers, most of which is that of the host."""
    torch.manual_seed(0)
    tokens, rows = torch.randint(0, 40, (4, 8)), []
    for name, make in (("GPT-2, 12 layers", make_gpt2), ("BERT, 12 layers", lambda layers: make_bert("eager", layers))):
        for devices in (1, 2):
            steps = [make_step(make(12), devices, reproducible=reproducible) for reproducible in (False, True)]
            net, update = make(12), Counting(0)
            draws = devices * update.run(lambda: net(tokens), 4)  # noqa: B023 - called at once
            update.end()
            without, by_row = seconds(*(lambda step=step: step(tokens, tokens) for step in steps))  # type: ignore[misc]
            times = f"{without * 1e3:.1f} ms", f"{by_row * 1e3:.1f} ms", f"{(by_row - without) / draws * 1e6:.0f} us"
            rows.append([f"{name}, {devices} replica{'s' if devices > 1 else ''}", str(draws), *times])
    return rows


def mask_costs() -> list[list[str]]:
    """Returns the time of dropout of large tensors, by torch and by row."""
    rows = []
    for shape in ((8, 512, 768), (8, 12, 256, 256), (8, 768)):
        x, update = torch.randn(shape), Counting(0)
        draws: list[Draw] = [("bernoulli_.float", shape, 0)]
        plain, by_row = seconds(lambda: F.dropout(x, 0.1), lambda: update.run(lambda: F.dropout(x, 0.1), 8, draws))  # noqa: B023
        update.end()
        rows.append([str(shape), f"{plain * 1e3:.2f} ms", f"{by_row * 1e3:.2f} ms", f"{by_row / plain:.1f}"])
    return rows


def attention_costs() -> list[list[str]]:
    """Returns the time of attention with dropout, forward and backward, by torch's own choice of a kernel and in parts."""
    rows = []
    for shape in ((4, 8, 128, 64), (4, 8, 512, 64)):
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        update = Counting(0)
        draws: list[Draw] = [("bernoulli_.float", shape, 0)]

        def attend(rate: float) -> None:
            F.scaled_dot_product_attention(query, key, value, dropout_p=rate).sum().backward()  # noqa: B023

        plain, by_row = seconds(lambda: attend(0.1), lambda: update.run(lambda: attend(0.1), shape[0], draws), rounds=7)  # noqa: B023
        update.end()
        matrix = 4 * shape[0] * shape[1] * shape[2] ** 2 / 2**20
        rows.append([str(shape), f"{plain * 1e3:.1f} ms", f"{by_row * 1e3:.1f} ms", f"{matrix:.0f} MiB"])
    return rows


def update_cost() -> str:
    """Returns the time in which kernels are replaced for an update, and torch's are put back."""
    (time_of_update,) = seconds(lambda: UpdateRandom(0).end(), rounds=50)
    return f"{time_of_update * 1e3:.2f} ms"
