"""Optimizers with less state than Adam's, which are alternatives in a plan: another optimizer makes another result."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from .trace.optimizer_choice import OptimizerChoice

__all__: list[str] = []

Make = Callable[..., torch.optim.Optimizer]


def AdamW8bit(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Makes the optimizer of torchao. It compiles its update; a trace runs the operators one by one, which need more memory."""
    made: torch.optim.Optimizer = importlib.import_module("torchao.optim").AdamW8bit(parameters, **settings)
    return made


def smaller_optimizers(given: OptimizerChoice) -> list[OptimizerChoice]:
    """Returns optimizers with less state than the given one, the smallest first.

    SGD has none. Adafactor has a row and a column for each matrix. The 8-bit AdamW of torchao, where that is installed, has two
    bytes per element.
    """
    known: list[Make] = [torch.optim.SGD, torch.optim.Adafactor]
    if importlib.util.find_spec("torchao") is not None:
        known.append(AdamW8bit)
    names = [getattr(make, "__name__", "") for make in known]
    if given.name == "SGD" and not given([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["momentum"]:
        return []
    if given.name in names[1:]:
        known = known[: names.index(given.name)]
    return [OptimizerChoice(make, given.foreach) for make in known]
