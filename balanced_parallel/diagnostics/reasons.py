"""Known reasons for a difference between the split and the plain program, which :func:`find_reasons` runs once more."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.containers import Dims, Nested, is_plain
from ..batch.outputs import join
from ..batch.rows import as_arguments, move_leaves, spread
from ..loss.copies import Criterion
from ..loss.criterion import DataParallelCriterion
from ..replicas.batchnorm import AllRowsBatchNorm, advice
from ..replicas.model import DataParallelModel
from ..runtime.torch_private import BatchNorm, Dropout, is_differentiable
from .recording import Difference, Program, copy_of, first_difference, loss_in_parts, relative_error, scalar_of, weight_in_parts

Wrap = Callable[[nn.Module], DataParallelModel]
_BY_ROW = "compare with reproducible=True"


def mixed_rows(module: nn.Module, wrap: Wrap, inputs: object, device: torch.device, limit: float) -> Iterator[str]:
    """Yields a reason if the halves of a batch have other outputs than the whole. The model draws no random numbers."""
    if batch_norms(module, over_all_rows=False):
        return  # they have a reason of their own
    plain, split = Program(module), Program(module)
    whole = plain.forward(inputs, device, 0)
    if output_error(whole, plain.forward(inputs, device, 0)) > limit:
        return  # written state changes the output, so each half changes that of the other
    model, arguments = wrap(split.module.to(device)), as_arguments(inputs)
    outputs = model(*arguments.inputs, **arguments.kwargs)
    joined = join(outputs, device, outputs.dim)  # gather refuses rows that may be in another order
    if output_error(whole, joined) <= limit:
        return
    root = Difference(f"the model ({type(module).__name__})", "", "the inputs")
    difference = first_difference(plain, split, model.dim, limit) or root
    if output_error(_sorted(whole, model.out_dims), _sorted(joined, model.out_dims)) <= limit:
        yield (
            f"the rows of the output are in another order than those of the inputs, from {difference.label} on: flatten the "
            "output in the criterion, not in forward; for rows in another dimension give dim="
        )
    else:
        yield (
            f"forward mixes rows, in {difference.place}: the output of a row depends on the other rows of its batch: move this "
            "part into the criterion, with whole=True; for a batch norm use convert_sync_batchnorm(module)"
        )


def _sorted(output: Nested, dims: Dims) -> Nested:
    dim = dims if isinstance(dims, int) else 0

    def sort(leaf: object) -> object:
        return leaf.sort(dim).values if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() else leaf

    return containers.map_leaves(sort, output)


def find_reasons(
    plain: Program,
    module: nn.Module,
    batch: tuple[object, object],
    model: DataParallelModel,
    losses: DataParallelCriterion,
    wrap: Wrap,
    micro_batches: int,
    limit: float,
    *,
    reproducible: bool,
) -> tuple[str, ...]:
    """Returns the reasons that apply, from the plain program after its steps, and the model and the loss before them."""
    inputs, targets = batch
    criterion, devices, device = losses.module, len(model.devices), model.devices[0]
    reasons = [*_mixing_layers(module, devices, micro_batches), *_random_layers(module)]
    reasons += without_errors(_reasons_of_forward(module, wrap, inputs, device, limit))
    loss = list(state_of_criterion(criterion, plain.criterion, devices))
    loss = loss or without_errors(loss_draws(criterion, plain.output, move_leaves(spread(targets), device), limit))
    if not loss and not losses.kind.couples_rows:
        loss = without_errors(weight_in_parts(plain.output, losses, targets, model.out_dims))
        loss += without_errors(loss_in_parts(plain.output, losses, targets, model.out_dims))
    reasons += [*loss, *state_of_model(module, plain.module, devices)]
    if reproducible:  # random numbers were the same
        reasons = [reason for reason in reasons if not reason.startswith(("dropout: ", "random numbers: "))]
    leaves = [leaf for _, leaf in containers.leaves(plain.output)]
    if not reasons and any(isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad for leaf in leaves):
        reasons.append(
            "the model computes its own loss, whose divisor is unknown or is not weight=: give DataParallelCriterion weight=, a "
            "function (output, *targets) -> scalar that returns the divisor of its mean, and pass the targets to the criterion "
            "too; compute a loss of several parts, such as one with a router loss, in the criterion (docs/huggingface.md)"
        )
    return tuple(reasons)


def without_errors(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons, or none if a model, a criterion or a weight function raises an error for a part of the batch."""
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            return list(reasons)
    except Exception:  # noqa: BLE001 - they may raise any error
        return []


def _reasons_of_forward(module: nn.Module, wrap: Wrap, inputs: object, device: torch.device, limit: float) -> Iterator[str]:
    evaluated, place = copy_of(module).eval(), random_place(module, inputs, device, limit)
    if place is not None and (place_in_eval := random_place(evaluated, inputs, device, limit)) is not None:
        yield f"random numbers: the model draws them, in eval mode too, in {place_in_eval}: {_BY_ROW}, or without them"
        return
    if place is not None and not any(_random_layers(module)):
        yield f"random numbers: the model draws them, in {place}: {_BY_ROW}, or in eval mode"
    is_evaluated = place is not None or bool(batch_norms(module, over_all_rows=False))
    yield from mixed_rows(evaluated if is_evaluated else module, wrap, inputs, device, limit)


def batch_norms(module: nn.Module, *, over_all_rows: bool) -> dict[str, BatchNorm]:
    """Returns the batch norms that use statistics of the batch, by name: those that are converted to use all rows, or others."""
    return {
        name or type(layer).__name__: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        and isinstance(layer, AllRowsBatchNorm) == over_all_rows
        and (layer.training or layer.running_mean is None)
    }


def _mixing_layers(module: nn.Module, devices: int, micro_batches: int) -> Iterator[str]:
    norms = batch_norms(module, over_all_rows=False)
    if devices > 1:
        for name, layer in norms.items():
            yield f"batch norm: {name} uses the statistics of the rows of each replica: {advice(layer)}"
        norms = {}
    if micro_batches > 1:
        for name in norms | batch_norms(module, over_all_rows=True):
            yield f"batch norm: {name} uses the statistics of each micro-batch, not of the whole batch"


def _random_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, Dropout) else getattr(layer, "dropout", 0)
        if layer.training and isinstance(rate, float) and rate > 0:
            yield f"dropout: {name or type(layer).__name__} draws different numbers for each shard: {_BY_ROW}, or in eval mode"


def random_place(module: nn.Module, inputs: object, device: torch.device, limit: float) -> str | None:
    """Returns the place in ``module`` that draws random numbers, or None if two seeds give the same output."""
    first, second = Program(module), Program(module)
    outputs = first.forward(inputs, device, 0), second.forward(inputs, device, 1)
    if (difference := first_difference(first, second, 0, limit)) is not None:
        return difference.place
    return f"the model ({type(module).__name__})" if output_error(*outputs) > limit else None


def output_error(expected: object, output: object) -> float:
    """Returns the largest relative error over the floating-point tensors of two outputs that have the same shape."""
    errors = [0.0]
    for (_, left), (_, right) in zip(containers.leaves(expected), containers.leaves(output), strict=False):
        if isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape and is_differentiable(left):
            errors.append(relative_error(right, left))
    return max(errors)


def loss_draws(criterion: Criterion, output: object, targets: tuple[object, ...], limit: float) -> Iterator[str]:
    """Yields a reason if the loss of the same output differs between two seeds."""
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(scalar_of(copy_of(criterion)(*spread(output), *targets)))
    if relative_error(losses[1], losses[0]) > limit:
        yield f"random numbers: the loss draws them, because the same output gives another loss: {_BY_ROW}, or without them"


class Change(NamedTuple):
    """An attribute, a buffer or a parameter with two different values."""

    name: str  # key path
    before: object
    after: object
    kind: str  # buffer or parameter; empty for others

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".lstrip()


def _changes(before: object, after: Any) -> Iterator[Change]:
    """Yields what differs between a module or another object and its copy. Statistics of batch norms are left out."""
    layers = [("", before)] if not isinstance(before, nn.Module) else before.named_modules()
    for name, layer in () if inspect.isroutine(before) else layers:
        other, prefix = after.get_submodule(name) if name else after, f"{name}." if name else ""
        values = getattr(layer, "__dict__", {})
        for key, value in getattr(other, "__dict__", {}).items():
            is_comparable = is_plain(value) or isinstance(value, (Tensor, list)) or value is None
            is_mapping = isinstance(value, dict) and not key.startswith("_")  # names with an underscore are those of nn.Module
            is_flag = value is True and key not in values  # Replicas without this flag of the first forward set up anew.
            if (is_comparable or is_mapping) and not is_flag and not _same(values.get(key), value):
                yield Change(f"{prefix}{key}", values.get(key), value, "")
        if isinstance(layer, nn.Module) and not isinstance(layer, BatchNorm):
            entries = [("buffer", *entry) for entry in layer.named_buffers(recurse=False)]
            entries += [("parameter", *entry) for entry in layer.named_parameters(recurse=False)]
            for kind, key, tensor in entries:
                if not _same(tensor, value := getattr(other, key, None)):
                    yield Change(f"{prefix}{key}", tensor, value, kind)


def _same(before: object, after: object) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and bool(torch.equal(before.cpu(), after.cpu()))
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if type(before) is not type(after):
        return False
    return bool(before == after) if is_plain(before) or before is None else True  # other objects are not compared


_EACH_MICRO_BATCH = "each micro-batch writes it, from its own rows"


def _effect(devices: int, value: object) -> str:
    if devices > 1 and isinstance(value, (dict, list)):
        return "all replicas write to the same object, in any order"
    return "all replicas but the first lose it" if devices > 1 else _EACH_MICRO_BATCH


def state_of_criterion(before: Criterion, after: Criterion, devices: int) -> Iterator[str]:
    """Yields a reason for each attribute and buffer that the criterion has written."""
    effect = "each replica writes its own state, from its own rows" if devices > 1 else _EACH_MICRO_BATCH
    for change in _changes(before, after):
        yield f"state written by the criterion: {change}; {effect}"


def state_of_model(before: nn.Module, after: nn.Module, devices: int) -> Iterator[str]:
    """Yields a reason for each attribute and buffer that the model has written in forward."""
    for change in _changes(before, after):
        yield f"state written in forward: {change}; {_effect(devices, change.after)}"


def compare_state(plain: Program, split: Program, devices: int, limit: float) -> tuple[dict[str, float], list[str]]:
    """Returns the relative error of each buffer and parameter that differs between two programs, and a line for each number."""
    errors, lines = {}, []
    changes = [("", change) for change in _changes(plain.module, split.module)]
    changes += [("criterion.", change) for change in _changes(plain.criterion, split.criterion)]
    for prefix, (name, before, after, kind) in changes:
        if kind:
            if isinstance(before, Tensor) and isinstance(after, Tensor) and after.shape == before.shape:
                errors[f"{prefix}{name}"] = relative_error(after, before)
            else:
                errors[f"{prefix}{name}"] = math.inf
        elif type(before) in (int, float) and type(after) in (int, float):
            text = f"{prefix}{name} is {after} after the split steps, {before} after the plain ones"
            lines.append(f"{text}: {_effect(devices, before)}")
    return {name: error for name, error in errors.items() if error > limit}, lines


_FINDINGS = (
    (nn.Parameter, "holds parameters that are not registered: make it an nn.ParameterList or an nn.ParameterDict"),
    (Tensor, "holds tensors, which every forward copies, but not those in lists and dictionaries: use register_buffer"),
    (nn.Module, "holds modules that are not registered: make it an nn.ModuleList or an nn.ModuleDict"),
)


def unregistered_tensors(module: nn.Module) -> Iterator[str]:
    """Yields plain attributes with tensors or modules. All replicas share them, whatever their device."""
    registered = {id(entry) for entry in (*module.parameters(), *module.buffers(), *module.modules())}
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith(("torch.", "balanced_parallel.")):  # they run as replicas
            continue
        for key, value in layer.__dict__.items():
            entries = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            unregistered = [] if key.startswith("_") else [entry for entry in entries if id(entry) not in registered]
            if finding := _finding(unregistered):
                yield f"unregistered: {key} of {described(name, layer)} {finding}"


def _finding(unregistered: Sequence[object]) -> str | None:
    """Returns what a plain attribute with these entries holds, and the way to register it."""
    plain = [entry for entry in unregistered if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter)]
    if any(entry.requires_grad and entry.is_leaf for entry in plain):
        return "holds tensors that require gradients: use nn.Parameter"
    for kind, finding in _FINDINGS:
        if any(isinstance(entry, kind) for entry in unregistered):
            return finding
    return None


def described(name: str, layer: nn.Module) -> str:
    """Returns the name and the type of a module."""
    return f"{name} ({type(layer).__name__})" if name else type(layer).__name__
