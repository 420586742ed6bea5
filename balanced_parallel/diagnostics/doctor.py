"""Checks of a model before it trains as replicas. What only values show, such as written state, :func:`verify` finds."""

import collections
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import containers
from ..loss.coupled import AdditiveLoss
from ..loss.criterion import DataParallelCriterion
from ..loss.means import UnknownMeanError
from ..loss.rules import is_known, refuse_coupled
from ..replicas.batchnorm import advice
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import refuse_script
from ..runtime.torch_private import is_differentiable
from ..training.step import TrainStep
from .reasons import batch_norms, described, unregistered_tensors


def examine(module: nn.Module, criterion: Callable[..., Any] | None = None) -> tuple[str, ...]:
    """Returns one line per finding, with its place and a fix, except for notes. Runs nothing, so it works on ``meta``."""
    return (
        *_weights_without_copies(module),
        *unregistered_tensors(module),
        *_batch_norms(module),
        *_coupled_rows(criterion),
    )


def is_note(finding: str) -> bool:
    """Returns True if a line of :func:`examine` is information only."""
    return finding.startswith("note: ")


def _weights_without_copies(module: nn.Module) -> Iterator[str]:
    """Yields modules that cannot be replicated, uninitialized parameters, and weights on several devices."""
    refused = None
    for name, layer in module.named_modules():
        if refused is None or not name.startswith(refused):  # submodules of a script are scripts
            try:
                refuse_script(layer)
            except TypeError as error:
                refused = f"{name}." if name else ""
                yield f"weights: {name or 'the model'}: {error}"
        for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if nn.parameter.is_lazy(tensor):
                yield f"weights: {key} of {described(name, layer)} is not initialised yet: run the model once first"
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type != "meta"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        yield f"weights: they are on {names}: move the model to one device, from which all replicas are copied"


def _batch_norms(module: nn.Module) -> Iterator[str]:
    by_advice: dict[str, list[str]] = {}
    for name, layer in batch_norms(module, over_all_rows=False).items():
        by_advice.setdefault(advice(layer), []).append(name)
    for mend, names in by_advice.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"batch norm: {', '.join(names[:3])}{more}: each replica would use the statistics of its own rows, and a single row "
            f"has none: {mend}"
        )


def _coupled_rows(criterion: Any) -> Iterator[str]:
    if criterion is None or isinstance(criterion, AdditiveLoss):
        return
    name = getattr(criterion, "__name__", type(criterion).__name__)
    try:
        refuse_coupled(criterion)
    except TypeError as error:
        yield f"the loss: {error}"
        return
    if not is_known(criterion):
        yield (
            f"note: the loss: {name} is exact as it is if it is a sum of means, such as F.cross_entropy(output, target). Another "
            "loss raises an error in the first batch, and needs weight=, reduction='sum' or whole=True"
        )


def find_waits(
    simulate: Callable[[int], AbstractContextManager[Any]],
    module: nn.Module,
    inputs: Any,
    criterion: Callable[..., Any] | None = None,
    targets: Any = (),
    dim: int = 0,
) -> tuple[str, ...]:
    """Runs a step on simulated devices. Returns a note for each line whose call would make the host wait for a GPU.

    Parameters, buffers, inputs and targets get small numbers. Without a criterion, the loss is the sum of all outputs.
    """
    for part in (module, criterion):
        if isinstance(part, nn.Module):
            part.to_empty(device="cpu")
            for tensor in (*part.parameters(), *part.buffers()):
                _fill(tensor)
    try:
        with warnings.catch_warnings(action="ignore"), simulate(2) as cluster:
            model = DataParallelModel(module, dim=dim)
            losses = DataParallelCriterion(criterion or _sum, dim=dim, reduction=None if criterion else "sum")
            step = TrainStep(model, losses, torch.optim.SGD(model.parameters(), lr=0.0))
            batch = containers.map_leaves(_pinned, (inputs, targets))
            for _ in range(2):  # the first step prepares replicas
                step(*batch)
            waits = [wait for wait in cluster.waits if wait.step == 2]
    except UnknownMeanError as error:
        return (f"the loss: {error}",)
    except Exception as error:  # noqa: BLE001 - a model may raise anything on the small numbers that it is given
        return (f"note: waits: a step on simulated devices failed, so they are not known: {str(error).splitlines()[0]}",)
    places = collections.Counter((wait.kind, wait.file, wait.line, wait.advice) for wait in waits)
    return tuple(
        f"note: waits: {kind} in {file}:{line} makes the host wait for a GPU, {count} times in a step of two replicas: {hint}"
        for (kind, file, line, hint), count in places.items()
    )


def _sum(*outputs: Any) -> Any:
    tensors = [leaf for _, leaf in containers.leaves(outputs) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
    return functools.reduce(torch.add, [tensor.real.sum() for tensor in tensors])


def _fill(tensor: Tensor) -> Tensor:
    return tensor.detach().fill_(0.01 if tensor.is_floating_point() else 0)


def _pinned(leaf: Any) -> Any:
    return _fill(torch.empty(leaf.shape, dtype=leaf.dtype)).pin_memory() if isinstance(leaf, Tensor) else leaf
