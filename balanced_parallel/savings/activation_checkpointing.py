"""The repeated blocks of a network, and torch's activation checkpointing of them."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__: list[str] = []


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
    kinds = [type(child) for child in children.values()]
    found = []
    for name, child in children.items():
        repeats = isinstance(parent, containers) and kinds.count(type(child)) > 1 and next(child.children(), None) is not None
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
        try:
            block = module.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"there is no module {name!r} to checkpoint, expected names of named_modules()") from error
        if not isinstance(block, Checkpointed):
            kind: Any = type(block)
            block.__class__ = _checkpointed(kind)


class Checkpointed:
    """A base class of checkpointed modules, besides their own class."""


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """Returns a checkpointed subclass. A ``forward`` set on the instance would still run the original after a copy."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(kind.forward, self), *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (Checkpointed, kind), {"forward": forward, "__module__": kind.__module__})
