"""Known reasons for a difference between the split and the plain program, which
:func:`find_reasons` runs once more.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .. import SumOverRows
from ..batch.containers import tensors_in
from ..batch.marks import Arguments
from ..batch.rows import Batch, move_arguments
from ..loss.entries import plain_loss
from ..replicas.batchnorm import AllRowsBatchNorm, advice
from ..runtime import torch_private
from .recording import (
    TOLERANCES,
    Comparison,
    Program,
    copy_of,
    errors_of_calls,
    first_difference,
    relative_error,
    weight_in_parts,
)

_LOSS = (
    "the loss differs, and outputs do not: its rows depend on each other, or weight= "
    "or reduction= is not that of the loss: give DataParallelCriterion neither for a loss of torch, reduction='sum' for a sum, "
    "weight='rows' for a mean over rows, weight=, a function (output, *targets) -> scalar that returns the divisor, for "
    "another mean, and whole=True or AdditiveLoss(statistics, finish) for any other loss"
)
_BY_ROW = "compare with reproducible=True"
_WRITTEN = (
    "each replica and micro-batch writes it, from its own rows, and that of the first replica is kept: compute it from "
    "the result of a SumOverRows, which adds up the rows of all replicas and ranks"
)
# float64 with a part in float32
_ROUNDING = TOLERANCES | {torch.float64: 1e-5, torch.float32: 1e-5}


def find_reasons(
    comparison: Comparison,
    errors: Mapping[str, float],
    state: Mapping[str, float],
    *,
    reproducible: bool,
) -> list[str]:
    """Returns the reasons that apply.

    ``errors`` has those of the gradients and, without a name, of the loss.
    """
    plain = comparison.plain
    limit = comparison.limit
    largest = max(errors.values())
    of_loss = list(_written("by the criterion", comparison.losses.module, plain.criterion))
    of_model = list(_written("in forward", comparison.module, plain.module))
    if largest <= limit:
        return [*of_loss, *of_model] if state else []
    if not state and largest <= _ROUNDING.get(plain.dtype, 0.0):
        dtype = str(plain.dtype).removeprefix("torch.")
        rounding = (
            f"rounding: the errors are within the rounding of {dtype}, or of a part that casts to float32: compare "
            "in float64 (model.double()), or give tolerance="
        )
        return [rounding, *of_loss, *of_model]
    of_loss = of_loss or without_errors(_reasons_of_loss(comparison))
    of_forward = without_errors(_reasons_of_forward(comparison))
    reasons = [*_mixing_layers(comparison), *of_forward, *of_loss, *of_model]
    if reproducible:
        reasons = [reason for reason in reasons if not reason.startswith("random numbers: ")]
    return reasons or _last_reasons(comparison, errors[""])


def _last_reasons(comparison: Comparison, error_of_loss: float) -> list[str]:
    """Returns a reason where no other applies."""
    plain = comparison.plain
    model = comparison.model
    limit = comparison.limit
    if any(tensor.dim() == 0 and tensor.requires_grad for tensor in tensors_in(plain.output)):
        return [
            "the model computes its own loss, whose divisor is not weight=: give DataParallelCriterion a function of the output "
            "alone, as lambda output: output.loss, without weight= and targets; or the divisor of its mean as weight=; compute a "
            "loss of several parts, as with a router loss, in the criterion (docs/recipes/transformers.md)"
        ]
    # The tolerance hides many a wrong loss, whose gradients are over it.
    is_half = plain.dtype.itemsize < 4
    difference = first_difference(plain.calls[0], comparison.split.calls, model.dim, limit)
    if difference is not None or is_half:
        return []
    if error_of_loss > limit:
        return [] if comparison.losses.kind.couples_rows else [_LOSS]
    functions = "".join(f", as {each}" for each in _autograd_functions(plain.output))
    reason = f"a hook or an autograd function changes gradients{functions} (docs/limits.md)"
    return [f"loss and outputs equal, gradients not: {reason}"]


def _autograd_functions(output: object) -> list[str]:
    """Returns the names of the custom autograd functions behind an output."""
    nodes = torch_private.nodes_behind(tensors_in(output))
    names = [type(node).__name__ for node in nodes if isinstance(node, BackwardCFunction)]
    return [*dict.fromkeys(name.removesuffix("Backward") for name in names)]


def without_errors(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons, or none if a model, a criterion or a weight function raises an error for
    a part of the batch.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            return list(reasons)
    except Exception:  # noqa: BLE001 - they may raise any error
        return []


def _reasons_of_forward(comparison: Comparison) -> Iterator[str]:
    module = comparison.module
    evaluated = copy_of(module).eval()
    if (place := _random_place(module, comparison)) is not None:
        is_random_in_eval = _random_place(evaluated, comparison) is not None
        other = "without them" if is_random_in_eval else "in eval mode"
        yield f"random numbers: the model draws them, in {place}: {_BY_ROW}, or {other}"
        if is_random_in_eval:
            return
    yield from _mixed_rows(
        evaluated if place is not None or batch_norms(module) else module, comparison
    )


def _random_place(module: nn.Module, comparison: Comparison) -> str | None:
    """Returns the place in ``module`` that draws random numbers, or None if two seeds give one
    output.
    """
    device = comparison.model.devices[0]
    first, second = (Program(module).forward(comparison.inputs, device, seed) for seed in range(2))
    difference = first_difference(first, [second], 0, comparison.limit)
    return None if difference is None else difference.place


def _mixed_rows(module: nn.Module, comparison: Comparison) -> Iterator[str]:
    """Yields a reason if the halves of a batch have other outputs than the whole.

    Nothing is random.
    """
    if batch_norms(module):
        return  # they have a reason of their own
    model = comparison.model
    limit = comparison.limit
    batch = Batch(comparison.inputs, dims=(model.dim, 0))
    whole = Program(module).forward(batch.inputs, model.devices[0])
    shards = batch.split(model.devices[:1] * 2, None)
    halves = [Program(module).forward(shard.inputs, shard.device) for shard in shards]
    *_, (_, error) = errors_of_calls(whole, halves, model.dim)
    difference = first_difference(whole, halves, model.dim, limit)
    if difference is not None and (error or 0.0) > limit:
        yield (
            f"forward mixes rows, in {difference.place}: the output of a row depends on the other rows of its "
            "batch, or rows are in another order: move this part into the criterion, with whole=True if rows are "
            "mixed; for a batch norm use convert_sync_batchnorm(module), unless it takes chunks of the rows (ghost batch norm), "
            "which depend on the layout; for rows in another dimension give DataParallelModel dim="
        )


def batch_norms(module: nn.Module) -> dict[str, torch_private.BatchNorm]:
    """Returns the batch norms that use statistics of the batch, by name."""
    return {
        name or type(layer).__name__: layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch_private.BatchNorm)
        and (layer.training or layer.running_mean is None)
    }


def statistics_of(module: nn.Module, devices: int, micro_batches: int) -> str | None:
    """Returns which rows the batch norms of ``module`` take statistics from; None for all rows of
    the batch.
    """
    norms = batch_norms(module)
    if devices > 1 and not all(isinstance(layer, AllRowsBatchNorm) for layer in norms.values()):
        return "replica"
    return "micro-batch" if micro_batches > 1 and norms else None


def _mixing_layers(comparison: Comparison) -> Iterator[str]:
    sums_rows = any(isinstance(layer, SumOverRows) for layer in comparison.module.modules())
    if comparison.split.rounds > 1 and sums_rows:
        yield "SumOverRows: each micro-batch has sums of its own rows, not of the whole batch"
    for name, layer in batch_norms(comparison.module).items():
        if len(comparison.model.devices) > 1 and not isinstance(layer, AllRowsBatchNorm):
            yield f"batch norm: {name} uses the statistics of the rows of each replica: {advice(layer)}"
        elif comparison.split.rounds > 1:
            yield f"batch norm: {name} uses the statistics of each micro-batch, not of the whole batch"


def _reasons_of_loss(comparison: Comparison) -> Iterator[str]:
    output = comparison.plain.output
    losses = comparison.losses
    values = []
    device = comparison.model.devices[0]
    targets, _ = move_arguments(Arguments(comparison.targets, {}), device)
    for seed in range(2):
        torch.manual_seed(seed)
        values.append(plain_loss(copy_of(losses.module), output, targets))
    if relative_error(values[0], values[1]) > comparison.limit:
        yield f"random numbers: the loss draws them, because the same output gives another loss: {_BY_ROW}, or without them"
    elif not losses.kind.couples_rows:
        yield from without_errors(weight_in_parts(comparison))


def _registered(part: object) -> dict[str, Tensor]:
    """Returns the buffers and parameters of a module by name, except those of batch norms."""
    return {
        f"{name}.{key}".lstrip("."): tensor
        for name, layer in (part.named_modules() if isinstance(part, nn.Module) else ())
        if not isinstance(layer, torch_private.BatchNorm)
        for key, tensor in (
            *layer.named_buffers(recurse=False),
            *layer.named_parameters(recurse=False),
        )
    }


def _written(where: str, before: object, after: object) -> Iterator[str]:
    """Yields a reason for each buffer and parameter that differs from its copy."""
    earlier = _registered(before)
    for name, tensor in _registered(after).items():
        value = earlier.get(name)
        if value is None or not torch.equal(value.cpu(), tensor.cpu()):
            yield f"state written {where}: {name}; {_WRITTEN}"


def _state_of(program: Program) -> dict[str, Tensor]:
    of_criterion = _registered(program.criterion)
    return {
        **_registered(program.module),
        **{f"criterion.{name}": tensor for name, tensor in of_criterion.items()},
    }


def errors_of_state(
    plain: Program,
    split: Program,
    limit: float,
    measure: Callable[[Tensor, Tensor], float] = relative_error,
) -> dict[str, float]:
    """Returns the error of each buffer and parameter that differs between two programs."""
    expected = _state_of(plain)
    errors = {}
    for name, tensor in _state_of(split).items():
        errors[name] = math.inf
        if name in expected and expected[name].shape == tensor.shape:
            errors[name] = measure(tensor, expected[name])
    return {name: error for name, error in errors.items() if error > limit}
