"""Batches of few long and of many short rows, compared with the CPU's allocator."""

import dataclasses
from collections.abc import Callable

import torch
from models import Problem
from truth import allocator_peak

from balanced_parallel import memory

NAMES = "GPT", "BERT (transformers)", "Llama (transformers)"
SIZES = ((1, 7), (3, 100), (16, 24))  # rows and lengths


def of_size(problem: Problem, rows: int, length: int) -> Problem:
    """Returns the problem with a batch of ``rows`` rows of ``length`` words."""
    words = torch.randint(100, (rows, length))
    targets = torch.randint(2, (rows,)) if problem.targets.dim() == 1 else words
    return dataclasses.replace(problem, inputs=words, targets=targets)


def length_errors(problem: Problem, precision: str) -> list[tuple[int, float]]:
    """Returns the bytes used, and the relative error of the prediction, for each of ``SIZES``."""
    errors = []
    for size in SIZES:
        batch = of_size(problem, *size)
        settings = {"device_kind": "cpu", "precision": precision}
        report = memory.estimate(batch.module, batch.criterion, batch.inputs, batch.targets, **settings)  # type: ignore[arg-type]
        used = allocator_peak(batch, precision)
        errors.append((used, report.allocated[0] / used - 1))
    return errors


def length_rows(build: Callable[[str], Problem]) -> list[list[object]]:
    """Returns the rows of the table."""
    return [
        [name, precision, *(f"{error:+.3%}" for _, error in length_errors(build(name), precision))]
        for name in NAMES
        for precision in ("fp32", "bf16")
    ]


HEADERS = ("model", "precision", *(f"{rows} rows of {length}" for rows, length in SIZES))
