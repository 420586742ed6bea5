"""What will break or unbalance when a model runs as replicas, read from the model and its sources. Nothing runs."""

import ast
import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..loss.rules import is_known, refuse_coupled
from ..loss.sum_detection import is_sum, read_source
from ..replicas.module_tree import refuse_compiled
from ..replicas.sync_batchnorm import AllRowsBatchNorm
from .mismatch import fixed_devices

__all__: list[str] = []

_KNOWN = ("torch.", "balanced_parallel.")  # whose modules are known to run as replicas
_CHANGES = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_LOST = "replicas but the first lose it: return it, or write it outside"
_REGISTERED = {
    nn.Parameter: "holds parameters that the model does not know: make it an nn.ParameterList or an nn.ParameterDict",
    Tensor: "holds tensors, which stay on the first device: use register_buffer",
    nn.Module: "holds modules that the model does not know: make it an nn.ModuleList or an nn.ModuleDict",
}
_REGISTERS = frozenset(("add_module", "register_buffer", "register_module", "register_parameter"))


def examine(module: nn.Module, criterion: Callable[..., Any] | None = None) -> tuple[str, ...]:
    """One line for each thing found: where it is, and what to do. Those of :func:`is_note` ask for nothing.

    State that forward writes is looked for in its source and in that of the methods that it calls on ``self``.

    Args:
        module: on any device, ``meta`` included. Neither it nor its forward runs.
        criterion: a module or a function of output and targets; ``None`` is not looked at.
    """
    return (
        *_weights_that_cannot_be_copied(module),
        *_tensors_that_stay(module),
        *_batch_norms(module),
        *_written_state(module),
        *fixed_devices(module),
        *_coupled_rows(criterion),
        *_recurrent_layers(module),
    )


def is_note(finding: str) -> bool:
    """Whether a line of :func:`examine` is about something that replicas leave as it is."""
    return finding.startswith("note: ")


def _called(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})" if name else type(layer).__name__


def _weights_that_cannot_be_copied(module: nn.Module) -> Iterator[str]:
    refused = None
    for name, layer in module.named_modules():
        if refused is None or not name.startswith(refused):  # a script's parts are scripts
            try:
                refuse_compiled(layer)
            except TypeError as error:
                refused = f"{name}." if name else ""
                yield f"weights: {name or 'the model'}: {error}"
        for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if nn.parameter.is_lazy(tensor):
                yield f"weights: {key} of {_called(name, layer)} is not initialised yet: run the model once on a few rows first"
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type != "meta"}
    if len(places) > 1:
        shown = ", ".join(sorted(map(str, places)))
        yield f"weights: they are on {shown}: move the model to one device, of which every replica has a copy"


def _tensors_that_stay(module: nn.Module) -> Iterator[str]:
    """Plain attributes: a replica shares them with the first, wherever it is."""
    known = {id(held) for held in (*module.parameters(), *module.buffers(), *module.modules())}
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith(_KNOWN):
            continue
        for key, value in layer.__dict__.items():
            held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            apart = [] if key.startswith("_") else [one for one in held if id(one) not in known]
            for wanted, what in _REGISTERED.items():
                if any(isinstance(one, wanted) for one in apart):
                    yield f"unregistered: {key} of {_called(name, layer)} {what}"
                    break


def batch_norms(module: nn.Module, *, over_all_rows: bool) -> list[str]:
    """The names of the layers that normalise by the rows they see: of those over all rows in flight, or of the plain ones."""
    return [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        and isinstance(layer, AllRowsBatchNorm) == over_all_rows
        and (layer.training or layer.running_mean is None)
    ]


def _batch_norms(module: nn.Module) -> Iterator[str]:
    names = batch_norms(module, over_all_rows=False)
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"batch norm: {', '.join(names[:3])}{more}: statistics would be those of each replica's rows, and a single row has "
            "none: use convert_sync_batchnorm(module), or a norm that mixes no rows"
        )


def _written_state(module: nn.Module) -> Iterator[str]:
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith(_KNOWN):
            continue
        seen.add(kind)
        for method in _methods_of_forward(kind):
            own = _first_argument(method)
            for node in ast.walk(method):
                for target in _writes(node, own):
                    called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                    if (loss := _loss_of(target, own, layer, called)) is not None:
                        what = f"{ast.unparse(node)} in {method.name} of {_called(name, layer)}"
                        yield f"state written in forward: {what}; {loss}"


def _methods_of_forward(kind: type) -> Iterator[ast.FunctionDef]:
    """``forward``, and the methods of a class that it calls on ``self``."""
    names, done = ["forward"], {"forward"}
    while names:
        function = getattr(kind, names.pop(), None)
        tree = None if getattr(function, "__module__", "torch.").startswith("torch.") else read_source(function)
        if tree is None or not isinstance(method := tree.body[0], ast.FunctionDef) or not method.args.args:
            continue
        yield method
        own = _first_argument(method)
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_name(node.func.value, own):
                names += {node.func.attr} - done
                done.add(node.func.attr)


def _first_argument(method: ast.FunctionDef) -> str:
    return method.args.args[0].arg


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _attribute_of(node: ast.AST | None, own: str) -> str | None:
    """The ``x`` of ``self.x``, ``self.x[i]``, ``self.x.y``; ``None`` for what is not reached through attributes of ``self``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(node, ast.Attribute) and _is_name(node.value, own):
            return node.attr
        node = node.value
    return None


def _writes(node: ast.AST, own: str) -> list[ast.expr]:
    """What a statement or a call writes to."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [part for target in node.targets for part in getattr(target, "elts", [target])]
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        return [node.target]
    if not isinstance(node, ast.Call):
        return []
    targets = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(node.args) > 1:
        targets.append(ast.Attribute(node.args[0], ast.unparse(node.args[1])))
    if isinstance(node.func, ast.Attribute) and node.func.attr in _REGISTERS and _is_name(node.func.value, own):
        targets.append(ast.Attribute(node.func.value, node.func.attr))
    elif isinstance(node.func, ast.Attribute) and (node.func.attr in _CHANGES or _IN_PLACE.fullmatch(node.func.attr)):
        targets.append(ast.Subscript(node.func.value, node.func))  # as x.append(1) writes to a part of x
    return targets


def _loss_of(target: ast.expr, own: str, layer: nn.Module, call: str) -> str | None:
    """What becomes of a write to ``target``; ``None`` where replicas have no attribute of ``self`` in it."""
    name = _attribute_of(target, own)
    if name is None:
        return None
    if isinstance(target, ast.Attribute) and _is_name(target.value, own):
        return _LOST
    held = getattr(layer, name, None)
    if isinstance(held, (Tensor, nn.Module)):
        return None if call in _CHANGES else _LOST  # add() of a tensor gives another
    if isinstance(held, (list, dict, set, collections.deque)):
        return "all replicas write to the same one, in any order: return it, or write it outside"
    return _LOST if held is None else None  # an object that replicas share, such as a config, is written for all of them


def _coupled_rows(criterion: Any) -> Iterator[str]:
    if criterion is None:
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
        yield f'the loss: {name} is a sum: give DataParallelCriterion reduction="sum", else it is taken for a mean'
    else:
        yield (
            f"the loss: what {name} divides its mean by is not known: give DataParallelCriterion weight=, a function "
            "(output, *targets) -> scalar; if its rows depend on each other, compute criterion(gather(outputs), targets)"
        )


def _recurrent_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.LSTM, nn.GRU)):
            yield (
                f"note: {_called(name, layer)} runs as replicas; memory.estimate assumes what cuDNN takes for it on a GPU, and "
                "has no estimate on simulated devices"
            )
