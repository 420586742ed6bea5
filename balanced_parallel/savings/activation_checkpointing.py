"""The repeated blocks of a network, and activation checkpointing of modules by a change of their class."""

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from .recomputation import run_checkpointed

__all__: list[str] = []


class Segment(NamedTuple):
    """A run of the modules of an ``nn.Sequential``, from ``start`` to before ``end``, or all of a module."""

    start: int = 0
    end: int | None = None
    recomputed: bool = True
    selective: bool = False


# Runs a segment instead of checkpointing it: ``run(module, segment, function, args, kwargs)``.
Runner = Callable[[nn.Module, Segment, Callable[..., Any], Any, Any], Any]
runner: ContextVar[Runner | None] = ContextVar("runner", default=None)


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the repeated blocks of a network.

    Blocks are two or more modules of one class in an ``nn.ModuleList`` or an ``nn.Sequential``, with parameters and children.
    The outermost such modules count. If there are none, any two or more children of one class count.

    Example:
        >>> find_blocks(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]))
        ('0', '1')
    """
    for containers in ((nn.ModuleList, nn.Sequential), (nn.Module,)):
        if found := _blocks_under(module, "", containers):
            return tuple(found)
    return ()


def _blocks_under(parent: nn.Module, prefix: str, containers: tuple[type[nn.Module], ...]) -> list[str]:
    children = {name: child for name, child in parent.named_children() if next(child.parameters(), None) is not None}
    kinds = [_kind(child) for child in children.values()]
    found = []
    for name, child in children.items():
        repeats = isinstance(parent, containers) and kinds.count(_kind(child)) > 1 and next(child.children(), None) is not None
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        within = [] if repeats and not isinstance(child, nn.Sequential) else _blocks_under(child, f"{prefix}{name}.", containers)
        found += within or ([f"{prefix}{name}"] if repeats and not is_list else [])
    return found


def checkpoint_blocks(module: nn.Module, names: Iterable[str]) -> None:
    """Checkpoints each named module in place: it saves its inputs only, and recomputes the rest in the backward.

    Raises:
        ValueError: there is no module of that name.
    """
    for name in names:
        block = find_module(module, name)
        if not isinstance(block, Checkpointed):
            checkpoint_module(block, (Segment(),))


def find_module(module: nn.Module, name: str) -> nn.Module:
    """Returns the submodule of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"there is no module {name!r} to checkpoint, expected names of named_modules()") from error


def checkpoint_module(module: nn.Module, segments: tuple[Segment, ...]) -> None:
    """Checkpoints a module in place, as one segment or, an ``nn.Sequential``, as several."""
    module.__class__ = _checkpointed(_kind(module), segments)


def restore_module(module: nn.Module) -> None:
    """Undoes :func:`checkpoint_module`."""
    module.__class__ = _kind(module)


def _kind(module: Any) -> Any:
    return module.made_from[0] if isinstance(module, Checkpointed) else type(module)


class Checkpointed:
    """A base class of checkpointed modules, besides their own class.

    Attributes:
        made_from: the class of the module, and its segments.
    """

    made_from: tuple[Any, tuple[Segment, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns the parts for ``pickle`` and ``copy``, which do not find a class that was made at run time."""
        parts: Any = super().__reduce_ex__(protocol)
        return _new, self.made_from, *parts[2:]


def _new(kind: Any, segments: tuple[Segment, ...]) -> Any:
    made = _checkpointed(kind, segments)
    return made.__new__(made)


@functools.cache
def _checkpointed(kind: Any, segments: tuple[Segment, ...]) -> Any:
    """Returns a checkpointed subclass. A ``forward`` set on the instance would still run the original after a copy."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(segments) == 1:
            return _run(self, segments[0], [self], functools.partial(kind.forward, self), args, kwargs)
        for segment in segments:
            layers = list(self)[segment.start : segment.end]
            args = (_run(self, segment, layers, functools.partial(_run_layers, layers), args, kwargs),)
        return args[0]

    return type(
        kind.__name__, (Checkpointed, kind), {"forward": forward, "__module__": kind.__module__, "made_from": (kind, segments)}
    )


def _run(
    module: nn.Module, segment: Segment, layers: list[nn.Module], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if not torch.compiler.is_compiling() and (run := runner.get()) is not None:
        return run(module, segment, function, args, kwargs)
    if not segment.recomputed:
        return function(*args, **kwargs)
    return run_checkpointed(layers, function, args, kwargs, name=_kind(module).__name__, selective=segment.selective)


def _run_layers(layers: Iterable[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value
