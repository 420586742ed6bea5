"""Waits of the host inside a model and its criterion, found by a training step on simulated devices."""

import collections
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..loss.criterion import DataParallelCriterion
from ..replicas.model import DataParallelModel
from ..runtime.tensors import is_differentiable
from ..training.step import TrainStep

__all__: list[str] = []


def find_waits(
    simulate: Callable[[int], AbstractContextManager[Any]],
    module: nn.Module,
    inputs: Any,
    criterion: Callable[..., Any] | None = None,
    targets: Any = (),
    dim: int = 0,
) -> Iterator[str]:
    """Yields a note for each line whose call makes the host wait for a GPU. The step runs on the CPU, with the model's memory.

    Args:
        simulate: the function of this name.
        module, criterion: on any device, including ``meta``. They get small numbers as parameters and buffers. Without a
            criterion, the loss is the sum of all outputs.
        inputs, targets: a batch. Only shapes and dtypes matter.
        dim: the dimension of the rows.
    """
    for one in (module, criterion):
        if isinstance(one, nn.Module):
            one.to_empty(device="cpu")
            _fill([*one.parameters(), *one.buffers()])
    with warnings.catch_warnings(action="ignore"), simulate(2) as cluster:
        model = DataParallelModel(module, dim=dim)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = DataParallelCriterion(criterion or _sum, dim=dim, reduction=None if criterion else "sum")
        step = TrainStep(model, losses, optimizer)
        batch = nested.map_leaves(_pinned, (inputs, targets))
        for _ in range(2):  # the first step prepares replicas
            step(*batch)
        waits = [wait for wait in cluster.waits if wait.step == 2]
    places = collections.Counter((wait.kind, wait.file, wait.line, wait.advice) for wait in waits)
    for (kind, file, line, advice), count in places.items():
        times = f"{count} times in a step of two replicas"
        yield f"note: waits: {kind} in {file}:{line} makes the host wait for a GPU, {times}: {advice}"


def _sum(*outputs: Any) -> Any:
    tensors = [leaf for _, leaf in nested.leaves(outputs) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
    return functools.reduce(torch.add, [tensor.real.sum() for tensor in tensors])


@torch.no_grad()
def _fill(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(0.01 if tensor.is_floating_point() else 0)


def _pinned(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
    _fill([tensor])
    return tensor.pin_memory()
