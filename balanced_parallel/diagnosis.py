"""Why a split program may differ from the plain one: the known reasons, looked for in a model, a criterion and a batch."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .batchnorm import AllRowsBatchNorm
from .criterion import DataParallelCriterion
from .nesting import first_tensor, is_plain, spread
from .rows import count_rows, cut, move_leaves
from .scattering import split_sizes
from .terms import Criterion
from .weighting import Weight, divide_once

__all__: list[str] = []

_FACTORIES = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
)


def find_reasons(
    ran: nn.Module,
    output: Any,
    untouched: nn.Module,
    criterion: Criterion,
    weight: Callable[..., Weight] | None,
    targets: Any,
    shards: int,
) -> tuple[str, ...]:
    """The reasons that apply.

    Args:
        ran: a copy of the model after one forward, whose ``output`` this is.
        untouched: the model as it was before.
        criterion, weight, targets: what the output was given to.
        shards: into how many parts the batch was cut.
    """
    return (
        *_mixing_layers(untouched, shards),
        *_random_layers(untouched),
        *_coupled_loss(output, criterion, weight, targets),
        *_written_state(untouched, ran),
        *fixed_devices(untouched),
    )


def _mixing_layers(module: nn.Module, shards: int) -> Iterator[str]:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and shards > 1 and (layer.training or layer.running_mean is None):
            how = (
                "uses the statistics of each micro-batch, not of the whole batch"
                if isinstance(layer, AllRowsBatchNorm)
                else "uses the statistics of its replica's rows: use convert_sync_batchnorm(module), or a norm that mixes no rows"
            )
            yield f"batch norm: {name or type(layer).__name__} {how}"


def _random_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
        if layer.training and isinstance(rate, float) and rate > 0:
            yield f"dropout: {name or type(layer).__name__} draws other random numbers for each shard: compare in eval mode"


def _coupled_loss(output: Any, criterion: Criterion, weight: Callable[..., Weight] | None, targets: Any) -> Iterator[str]:
    """Cuts the plain output in two, and compares the loss in parts with the loss of the whole."""
    tensor = first_tensor(output)
    if tensor is None or count_rows(targets) is None or tensor.dim() == 0 or tensor.size(0) < 2:
        return
    sizes = split_sizes(tensor.size(0), 2)
    outputs = cut(output, sizes)
    following = move_leaves(spread(targets), tensor.device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parts = DataParallelCriterion(criterion, weight=weight).terms(outputs, *following)
        except (ValueError, RuntimeError):  # outputs whose rows lie elsewhere: nothing can be said
            return
        whole = criterion(*spread(output), *following)
        whole = whole if isinstance(whole, Tensor) else whole.loss
    if not torch.allclose(divide_once(*parts, tensor.device).to(whole.dtype), whole, rtol=1e-4, equal_nan=True):
        yield (
            "the loss: in parts it is not the loss of the whole, so its rows depend on each other (compute it as "
            "criterion(gather(outputs), targets)), or its mean divides by something else (say weight=)"
        )


def _written_state(before: nn.Module, after: nn.Module) -> Iterator[str]:
    layers = dict(after.named_modules())
    for name, layer in before.named_modules():
        found = layers[name]
        where = f"{name}." if name else ""
        for key, value in found.__dict__.items():
            old = layer.__dict__.get(key)
            simple = is_plain(value) or isinstance(value, (Tensor, list)) or value is None
            if simple and not _same(old, value):
                yield f"state written in forward: {where}{key}; replicas but the first lose it"
        if not isinstance(layer, _BatchNorm):
            for key, buffer in layer.named_buffers(recurse=False):
                if not _same(buffer, found.get_buffer(key)):
                    yield f"state written in forward: buffer {where}{key}; replicas but the first lose it"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other):
        return False
    return bool(one == other) if is_plain(one) or one is None else True  # of other objects nothing is known


def fixed_devices(module: nn.Module) -> Iterator[str]:
    """What the sources of the forwards put on a device that is not the input's, once for each class."""
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith("torch."):
            continue
        seen.add(kind)
        tree = read_source(kind.forward)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Call) and (what := _fixes_device(node)):
                yield f"a fixed device in forward: {what} in {kind.__name__} ({name or 'the model'}): use the device of the input"


def read_source(function: Any) -> ast.Module | None:
    """The syntax tree of a function, or ``None`` where its source is not at hand."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _fixes_device(call: ast.Call) -> str | None:
    """What of a call in forward puts a tensor on a device that is not the input's."""
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
