"""Static checks of a model before it runs as replicas: reads modules and their source code, and runs nothing.

Waits of the host inside a model and its criterion, found by a training step on simulated devices.
"""

import ast
import collections
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import containers
from ..loss.coupled import AdditiveLoss
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import is_known, refuse_coupled
from ..replicas.batchnorm import AllRowsBatchNorm, advice
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import refuse_compiled
from ..runtime.torch_private import BatchNorm, is_differentiable
from ..training.step import TrainStep
from .reasons import OWN_PACKAGES, described, fixed_devices, is_sum, read_source, unregistered_tensors

__all__: list[str] = []


_MUTATING_METHODS = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_LOST = "all replicas but the first lose it: return it, or write it outside of forward"
_REGISTER_METHODS = frozenset(("add_module", "register_buffer", "register_module", "register_parameter"))


def examine(module: nn.Module, criterion: Callable[..., Any] | None = None) -> tuple[str, ...]:
    """Returns one line per finding, with its place and a fix. Findings for which :func:`is_note` is True need no fix.

    State that is written in forward is found in the source of ``forward`` and of the methods that it calls on ``self``.

    Args:
        module: a module on any device, including ``meta``. Its forward does not run.
        criterion: a module or a function of output and targets, or ``None``.
    """
    return (
        *_weights_without_copies(module),
        *unregistered_tensors(module),
        *_batch_norms(module),
        *_written_state(module),
        *fixed_devices(module),
        *_coupled_rows(criterion),
        *_recurrent_layers(module),
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
                refuse_compiled(layer)
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


def batch_norms(module: nn.Module, *, over_all_rows: bool) -> list[str]:
    """Returns the names of the batch norms that use statistics of the batch.

    Args:
        module: the model.
        over_all_rows: if True, those that :func:`convert_sync_batchnorm` has converted, else the others.
    """
    return [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        and isinstance(layer, AllRowsBatchNorm) == over_all_rows
        and (layer.training or layer.running_mean is None)
    ]


def _batch_norms(module: nn.Module) -> Iterator[str]:
    layers, by_advice = {name or type(layer).__name__: layer for name, layer in module.named_modules()}, dict[str, list[str]]()
    for name in batch_norms(module, over_all_rows=False):
        by_advice.setdefault(advice(layers[name]), []).append(name)
    for mend, names in by_advice.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"batch norm: {', '.join(names[:3])}{more}: each replica would use the statistics of its own rows, and a single row "
            f"has none: {mend}"
        )


def _written_state(module: nn.Module) -> Iterator[str]:
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith(OWN_PACKAGES):
            continue
        seen.add(kind)
        for method in _methods_of_forward(kind):
            self_name = _first_argument(method)
            for node in ast.walk(method):
                for target in _written_targets(node, self_name):
                    called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                    if (effect := _effect_of_write(target, self_name, layer, called)) is not None:
                        code = f"{ast.unparse(node)} in {method.name} of {described(name, layer)}"
                        yield f"state written in forward: {code}; {effect}"


def _methods_of_forward(kind: type) -> Iterator[ast.FunctionDef]:
    """Yields ``forward``, and the methods that it calls on ``self``, directly or indirectly."""
    names, done = ["forward"], {"forward"}
    while names:
        function = getattr(kind, names.pop(), None)
        tree = None if getattr(function, "__module__", "torch.").startswith("torch.") else read_source(function)
        if tree is None or not isinstance(method := tree.body[0], ast.FunctionDef) or not method.args.args:
            continue
        yield method
        self_name = _first_argument(method)
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_name(node.func.value, self_name):
                names += {node.func.attr} - done
                done.add(node.func.attr)


def _first_argument(method: ast.FunctionDef) -> str:
    return method.args.args[0].arg


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _attribute_of(node: ast.AST | None, self_name: str) -> str | None:
    """Returns ``x`` for ``self.x``, ``self.x[i]`` and ``self.x.y``, and None for expressions without ``self``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(node, ast.Attribute) and _is_name(node.value, self_name):
            return node.attr
        node = node.value
    return None


def _written_targets(node: ast.AST, self_name: str) -> list[ast.expr]:
    """Returns the expressions that a statement or a call writes to."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [part for target in node.targets for part in getattr(target, "elts", [target])]
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        return [node.target]
    if not isinstance(node, ast.Call):
        return []
    targets = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(node.args) > 1:
        targets.append(ast.Attribute(node.args[0], ast.unparse(node.args[1])))
    if isinstance(node.func, ast.Attribute) and node.func.attr in _REGISTER_METHODS and _is_name(node.func.value, self_name):
        targets.append(ast.Attribute(node.func.value, node.func.attr))
    elif isinstance(node.func, ast.Attribute) and (node.func.attr in _MUTATING_METHODS or _IN_PLACE.fullmatch(node.func.attr)):
        targets.append(ast.Subscript(node.func.value, node.func))  # x.append(1) writes to an entry of x
    return targets


def _effect_of_write(target: ast.expr, self_name: str, layer: nn.Module, call: str) -> str | None:
    """Returns the effect of a write to ``target`` in replicas, or None if ``target`` is not state of a replica."""
    name = _attribute_of(target, self_name)
    if name is None:
        return None
    if isinstance(target, ast.Attribute) and _is_name(target.value, self_name):
        return _LOST
    value = getattr(layer, name, None)
    if isinstance(value, (Tensor, nn.Module)):
        return None if call in _MUTATING_METHODS else _LOST  # add() of a tensor returns another tensor
    if isinstance(value, (list, dict, set, collections.deque)):
        return "all replicas write to the same object, in any order: return it, or write it outside of forward"
    return _LOST if value is None else None  # replicas share other objects, such as a config, so writes are kept


def _coupled_rows(criterion: Any) -> Iterator[str]:
    if criterion is None or isinstance(criterion, AdditiveLoss):
        return
    name = getattr(criterion, "__name__", type(criterion).__name__)
    try:
        refuse_coupled(criterion)
    except TypeError as error:
        yield f"the loss: {error}"
        return
    if is_known(criterion):
        return
    if is_sum(criterion):
        yield f'the loss: {name} is a sum: give DataParallelCriterion reduction="sum", otherwise it is treated as a mean'
    else:
        yield (
            f"the loss: the divisor of the mean of {name} is unknown: give DataParallelCriterion weight=, a function "
            "(output, *targets) -> scalar; whole=True, which is criterion(gather(outputs), targets), if its rows couple"
        )


def _recurrent_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.LSTM, nn.GRU)):
            yield (
                f"note: {described(name, layer)} runs as replicas; memory.estimate assumes the memory of cuDNN on a GPU, and "
                "has no estimate for simulated devices"
            )


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
        batch = containers.map_leaves(_pinned, (inputs, targets))
        for _ in range(2):  # the first step prepares replicas
            step(*batch)
        waits = [wait for wait in cluster.waits if wait.step == 2]
    places = collections.Counter((wait.kind, wait.file, wait.line, wait.advice) for wait in waits)
    for (kind, file, line, hint), count in places.items():
        times = f"{count} times in a step of two replicas"
        yield f"note: waits: {kind} in {file}:{line} makes the host wait for a GPU, {times}: {hint}"


def _sum(*outputs: Any) -> Any:
    tensors = [leaf for _, leaf in containers.leaves(outputs) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
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
