"""The repeated blocks of a network, and torch's activation checkpointing of them."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__: list[str] = []


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """The names of the repeated blocks: two or more modules of one class in an ``nn.ModuleList`` or an ``nn.Sequential``, the
    outermost, with parameters and children of their own. Where there are none, two or more such modules beside each other."""
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
    """Has the forward of each named module keep its inputs only, and compute the rest again in the backward.

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
    """What a checkpointed module is an instance of, beside its own class."""


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """A subclass, not another ``forward`` in the instance: copies of the module are checkpointed too, and run themselves."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(kind.forward, self), *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (Checkpointed, kind), {"forward": forward, "__module__": kind.__module__})
