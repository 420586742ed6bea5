"""Known reasons for a difference between the split and the plain program, found in a model, a criterion and a batch."""

import ast
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.rows import move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion
from ..loss.sum_detection import read_source
from ..replicas.model import DataParallelModel
from ..replicas.sync_batchnorm import AllRowsBatchNorm, advice
from ..runtime.modules import BatchNorm, Dropout
from .loss_parts import copy_of, loss_in_parts, weight_in_parts
from .module_recording import Program
from .random_draws import loss_draws, random_place
from .row_mixing import Wrap, mixed_rows
from .written_state import state_of_criterion, state_of_model

__all__: list[str] = []

_FACTORIES = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
)


def find_reasons(
    plain: Program,
    untouched: tuple[nn.Module, Criterion],
    batch: tuple[Any, Any],
    model: DataParallelModel,
    losses: DataParallelCriterion,
    wrap: Wrap,
    micro_batches: int,
    limit: float,
) -> tuple[str, ...]:
    """Returns the reasons that apply.

    Args:
        plain: the plain program after its steps.
        untouched: model and criterion before their steps.
        batch: inputs and targets.
        model: model of the split program.
        losses: a copy of the criterion of the split program.
        wrap: function that makes two replicas of a module.
        micro_batches: number of micro-batches.
        limit: largest relative error that counts as equal.
    """
    (module, criterion), (inputs, targets) = untouched, batch
    devices, device = len(model.devices), model.devices[0]
    following = move_leaves(nested.spread(targets), device)
    reasons = [*_mixing_layers(module, devices, micro_batches), *_random_layers(module)]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        reasons += _without_errors(_reasons_of_forward(module, wrap, inputs, device, limit))
        loss = list(state_of_criterion(criterion, plain.criterion, devices))
        loss = loss or _without_errors(loss_draws(criterion, plain.output, following, limit))
    if not loss and not losses.is_coupled:  # a coupled loss is computed from all rows, in one piece
        loss = [*weight_in_parts(plain.output, losses, targets, model.out_dims)]
        loss += loss_in_parts(plain.output, criterion, losses, targets, model.out_dims)
    found = (*reasons, *loss, *state_of_model(module, plain.module, devices), *fixed_devices(module))
    return found or tuple(_own_loss(plain.output, is_weighted=losses.weight is not None))


def _own_loss(output: Any, is_weighted: bool) -> Iterator[str]:
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad for _, leaf in nested.leaves(output)):
        yield "the model computes its own loss" + (
            ", and a part of it is no mean over what weight= counts: weight= counts something else, or the loss has another "
            "part, such as a router loss or a second mean: compute the parts in the criterion (docs/huggingface.md)"
            if is_weighted
            else ": give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the divisor of its "
            "mean, and pass the targets to the criterion too"
        )


def _without_errors(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons, or none if a model or a criterion raises an error for a part of the batch."""
    try:
        return list(reasons)
    except Exception:  # noqa: BLE001 - they may raise any error
        return []


def _reasons_of_forward(module: nn.Module, wrap: Wrap, inputs: Any, device: torch.device, limit: float) -> Iterator[str]:
    evaluated = copy_of(module).eval()
    place = random_place(module, inputs, device, limit)
    if place is not None:
        if (place_in_eval := random_place(evaluated, inputs, device, limit)) is not None:
            yield f"random numbers: the model draws them, in eval mode too, in {place_in_eval}: compare without them"
            return
        if not any(_random_layers(module)):
            yield f"random numbers: the model draws them, in {place}: compare in eval mode, or without them"
    is_evaluated = place is not None or any(_mixing_layers(module, 2, 1))
    yield from mixed_rows(evaluated if is_evaluated else module, wrap, inputs, device, limit)


def _mixing_layers(module: nn.Module, devices: int, micro_batches: int) -> Iterator[str]:
    for name, layer in module.named_modules():
        if not isinstance(layer, BatchNorm) or not (layer.training or layer.running_mean is None):
            continue
        is_synchronized = isinstance(layer, AllRowsBatchNorm)
        if devices > 1 and not is_synchronized:
            reason = f"uses the statistics of the rows of each replica: {advice(layer)}"
        elif micro_batches > 1:
            reason = "uses the statistics of each micro-batch, not of the whole batch"
        else:
            continue
        yield f"batch norm: {name or type(layer).__name__} {reason}"


def _random_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, Dropout) else getattr(layer, "dropout", 0)
        if layer.training and isinstance(rate, float) and rate > 0:
            yield f"dropout: {name or type(layer).__name__} draws different random numbers for each shard: compare in eval mode"


def fixed_devices(module: nn.Module) -> Iterator[str]:
    """Yields calls in the source of ``forward`` that put a tensor on a fixed device, once per class."""
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith("torch."):
            continue
        seen.add(kind)
        tree = read_source(kind.forward)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Call) and (code := _fixed_device(node)):
                yield f"a fixed device in forward: {code} in {kind.__name__} ({name or 'the model'}): use the device of the input"


def _fixed_device(call: ast.Call) -> str | None:
    """Returns the code of a call that puts a tensor on a fixed device, or None."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    of_torch = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    device = next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)
    first = call.args[0] if call.args else None
    named = name in ("to", "device") and isinstance(first, ast.Constant) and isinstance(first.value, str)
    if name == "cuda" or named or isinstance(device, ast.Constant):
        return ast.unparse(call)
    if of_torch and name in _FACTORIES and device is None:
        return f"{ast.unparse(call)} without device="
    return None
