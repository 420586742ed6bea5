"""Functions of ``balanced_parallel.savings`` in a trace: they change the fake copies, never the objects of the caller."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...savings.checkpointing import checkpoint_activations
from ...savings.gradient_release import release_gradients_in_backward
from ...savings.language_model_heads import replace_lm_head
from .traced_offload import offloading

__all__: list[str] = []

# in the order in which they are applied
SAVINGS = (
    "replace_lm_head",
    "checkpoint_activations",
    "inplace_activations",
    "offload_activations",
    "release_gradients_in_backward",
)


def check_savings(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the order in which they are applied.

    Raises:
        ValueError: a name is not that of a saving.
    """
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in SAVINGS:
            raise ValueError(f"savings has {name!r}, expected functions of balanced_parallel.savings: {', '.join(SAVINGS)}")
    return tuple(name for name in SAVINGS if name in given)


def change_module(module: nn.Module, names: Iterable[str]) -> None:
    """Applies the savings that change a module."""
    if "replace_lm_head" in names:
        replace_lm_head(module)
    if "checkpoint_activations" in names:
        checkpoint_activations(module)


def set_inplace(module: nn.Module, names: Iterable[str]) -> None:
    """Sets ``inplace=True`` on submodules."""
    for name in names:
        module.get_submodule(name).inplace = True  # type: ignore[assignment]


def change_optimizers(optimizer: Any, names: Iterable[str]) -> None:
    """Applies the savings that change optimizers."""
    if "release_gradients_in_backward" in names:
        for one in getattr(optimizer, "optimizers", [optimizer]):
            release_gradients_in_backward(one)


def around_update(names: Iterable[str], host: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns the context of the savings that surround an update.

    Args:
        host: the fake device of the host.
    """
    return offloading(host) if "offload_activations" in names else contextlib.nullcontext()
