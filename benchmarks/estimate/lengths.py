"""Rows of other lengths than the traced ones, compared with the CPU's allocator."""

import dataclasses
from collections.abc import Callable

import torch
from models import Problem
from truth import allocator_peak

from balanced_parallel import memory

NAMES = "GPT", "BERT (transformers)", "Llama (transformers)"
TRACED = 2, 128  # rows and longest length of the report
SIZES = ((1, 7), (3, 100), (16, 24))  # rows and lengths


def of_size(problem: Problem, rows: int, length: int) -> Problem:
    """Returns the problem with a batch of ``rows`` rows of ``length`` words."""
    words = torch.randint(100, (rows, length))
    targets = torch.randint(2, (rows,)) if problem.targets.dim() == 1 else words
    return dataclasses.replace(problem, inputs=words, targets=targets)


def length_errors(problem: Problem, precision: str) -> list[tuple[int, float]]:
    """Returns the bytes used, and the relative error of the prediction, for each of ``SIZES``."""
    first = of_size(problem, *TRACED)
    settings = {"device_kind": "cpu", "precision": precision, "lengths": (1, TRACED[1])}
    report = memory.estimate(first.module, first.criterion, first.inputs, first.targets, **settings)  # type: ignore[arg-type]
    used = [allocator_peak(of_size(problem, *size), precision) for size in SIZES]
    return [(peak, report.at(*size)[0] / peak - 1) for size, peak in zip(SIZES, used, strict=True)]


def length_rows(build: Callable[[str], Problem]) -> list[list[object]]:
    """Returns the rows of the table."""
    return [
        [name, precision, *(f"{error:+.3%}" for _, error in length_errors(build(name), precision))]
        for name in NAMES
        for precision in ("fp32", "bf16")
    ]


HEADERS = ("model", "precision", *(f"{rows} rows of {length}" for rows, length in SIZES))
