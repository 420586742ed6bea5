"""Evaluation without activations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..replicas.replicas import window
from ..runtime import values


@contextmanager
@values.naming_arguments
def inference(*modules: nn.Module) -> Iterator[None]:
    """Keeps no activations in this block, and puts modules in evaluation mode until its end.

    Afterwards each submodule is in the mode that it had before, so a frozen batch norm stays
    frozen. Replicas of a :class:`DataParallelModel` get the parameters once; after a write through
    ``.data`` in this block, call ``model.refresh_replicas()``. Results are inference tensors, and
    cannot be part of a later graph. It is also a decorator.

    Args:
        modules: models and criteria, in :class:`DataParallelModel` and so on or not.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> with savings.inference(model):
        ...     output = gather(model(torch.zeros(3, 4)))
        >>> output.requires_grad, net.training
        (False, True)
    """
    before = [
        (submodule, submodule.training) for module in modules for submodule in module.modules()
    ]
    try:
        for module in modules:
            module.eval()
        with window(*(submodule for submodule, _ in before)), torch.inference_mode():
            yield
    finally:
        for submodule, training in before:
            submodule.training = training
