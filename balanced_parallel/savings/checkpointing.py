"""``checkpoint_activations``: fewer activations are kept, and the backward computes the others again."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..runtime.argument_checks import check_number, check_type
from ..runtime.byte_sizes import format_bytes, parse_bytes
from ..runtime.modules import children_of
from .activation_bytes import Part, measure_saved_bytes
from .activation_checkpointing import Segment, checkpoint_module, find_blocks, find_module, restore_module

__all__: list[str] = []

EXPECTED = "expected names of named_modules(): blocks=['encoder', 'decoder']"


class CheckpointHandle:
    """The result of :func:`checkpoint_activations`.

    Attributes:
        parts: what is recomputed, as names of modules, ``"features[0:4]"`` for modules of an ``nn.Sequential``, and with
            ``" (selective)"`` behind a part whose expensive operators are not computed again.
        kept: bytes of activations that stay for the backward; None without ``budget``.
    """

    def __init__(self, modules: list[nn.Module], parts: tuple[str, ...], kept: int | None) -> None:
        self.parts = parts
        self.kept = kept
        self._modules = modules

    def remove(self) -> None:
        """Undoes the checkpointing, for graphs that are made from now on."""
        for module in self._modules:
            restore_module(module)

    def __repr__(self) -> str:
        kept = "" if self.kept is None else f", kept={format_bytes(self.kept)}"
        return f"{type(self).__name__}(parts={list(self.parts)}{kept})"


def checkpoint_activations(
    module: nn.Module,
    *,
    blocks: str | Iterable[str] = "auto",
    segments: int | None = None,
    budget: int | str | None = None,
    inputs: Any = None,
) -> CheckpointHandle:
    """Checkpoints parts of a module in place. Their activations are computed again in the backward instead of being kept.

    Loss and gradients stay the same. Random numbers are drawn again as they were, also by replicas on several devices at once,
    and running statistics of batch norms move once. A call replaces the checkpoints of an earlier call.

    Args:
        module: any module. Names of parameters, ``state_dict()`` and ``isinstance`` stay as they are.
        blocks: names of submodules (of the module itself: ``""``). ``"auto"`` takes the repeated blocks of the network, such as
            the layers of a transformer. If there are none, each outermost ``nn.Sequential`` is cut into segments.
        segments: number of segments of an ``nn.Sequential``. Default: the square root of its length. The last segment stays as
            it is, as in ``torch.utils.checkpoint.checkpoint_sequential``.
        budget: bytes of activations that may stay, such as ``"2GiB"``. As few blocks or segments as possible are recomputed. Of
            the last one, the outputs of matrix multiplications, convolutions and attention stay if the budget allows it.
            Default: all blocks are recomputed. In the backward, the activations of one block come on top.
        inputs: needed for ``budget``: a batch of as many rows as one device gets in one forward. It is a tensor, a tuple of
            positional arguments or a mapping of keyword arguments. Nothing is computed: a fake forward counts bytes.

    Returns:
        A handle. ``handle.remove()`` undoes the checkpointing.

    Raises:
        ValueError: there is nothing to checkpoint, a name is unknown, or the activations do not fit into the budget. The message
            has the bytes that remain at least.

    Example:
        >>> net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
        >>> handle = savings.checkpoint_activations(net)
        >>> handle.parts
        ('[0:4]', '[4:8]', '[8:12]')
        >>> handle = savings.checkpoint_activations(net, budget="24KiB", inputs=torch.zeros(16, 64))
        >>> handle
        CheckpointHandle(parts=['[12:16]'], kept=24.00 KiB)
    """
    for submodule in module.modules():
        restore_module(submodule)
    names = _names(module, blocks)
    found = {
        name: _segments(find_module(module, name), segments, cut=blocks == "auto" and not find_blocks(module)) for name in names
    }
    kept = None
    if budget is not None:
        found, kept = _choose(module, found, parse_bytes(budget), inputs)
    changed = []
    for name, cuts in found.items():
        if any(segment.recomputed for segment in cuts):
            changed.append(module.get_submodule(name))
            checkpoint_module(changed[-1], cuts)
    parts = [_text(name, segment) for name, cuts in found.items() for segment in cuts if segment.recomputed]
    return CheckpointHandle(changed, tuple(parts), kept)


def _names(module: nn.Module, blocks: str | Iterable[str]) -> list[str]:
    if blocks != "auto":
        check_type("blocks", blocks, Iterable, "'auto', or the names of submodules")
        names = [blocks] if isinstance(blocks, str) else list(blocks)
        if not names:
            raise ValueError(f"blocks={blocks!r} is empty, {EXPECTED}")
        return names
    if names := list(find_blocks(module)):
        return names
    for name, child in module.named_modules():
        outermost = not any(name.startswith(f"{other}." if other else "") for other in names)
        if outermost and type(child).forward is nn.Sequential.forward and len(children_of(child)) > 1:
            names.append(name)
    if not names:
        raise ValueError(f"{type(module).__name__} has neither repeated blocks nor an nn.Sequential to checkpoint, {EXPECTED}")
    return names


def _segments(module: nn.Module, count: int | None, cut: bool) -> tuple[Segment, ...]:
    if not cut and count is None:
        return (Segment(),)
    if type(module).forward is not nn.Sequential.forward:
        raise ValueError(f"segments={count}, but {type(module).__name__} is not an nn.Sequential: leave segments out")
    length = len(children_of(module))
    if count is None:
        count = max(2, round(math.sqrt(length)))
    check_number("segments", count, "the number of parts of an nn.Sequential", whole=True)
    if not 2 <= count <= length:
        raise ValueError(f"segments={count}, expected a number from 2 to the {length} modules of the nn.Sequential")
    size = length // count
    places = [*range(0, size * count, size), length]
    return tuple(Segment(start, end, recomputed=end < length) for start, end in itertools.pairwise(places))


def _choose(
    module: nn.Module, found: dict[str, tuple[Segment, ...]], budget: int, inputs: Any
) -> tuple[dict[str, tuple[Segment, ...]], int]:
    """Returns ``found`` with as few recomputed segments as the budget allows, and the bytes that stay."""
    if inputs is None:
        raise ValueError("budget needs inputs: give a batch of as many rows as one device gets in one forward")
    modules = {name: module.get_submodule(name) for name in found}
    for name, cuts in found.items():
        checkpoint_module(modules[name], cuts)
    try:
        saved = measure_saved_bytes(module, inputs)
    finally:
        for child in modules.values():
            restore_module(child)
    waiting: list[Part] = [(modules[name], segment) for name, cuts in found.items() for segment in cuts]
    chosen: dict[Part, bool] = {}
    while (kept := saved.total(chosen)) > budget:
        # The first of several equal ones: the last ones are recomputed while the activations of all others are still there.
        best = min(waiting, key=lambda part: saved.total({**chosen, part: False}), default=None)
        if best is None or saved.total({**chosen, best: False}) >= kept:
            raise ValueError(
                f"the activations do not fit into budget={format_bytes(budget)}: at least {format_bytes(kept)} ({kept} bytes) "
                "stay for the backward. Use fewer rows, or offload_activations"
            )
        waiting.remove(best)
        chosen[best] = best not in saved.mutated and saved.total({**chosen, best: True}) <= budget
    return {
        name: tuple(
            segment._replace(recomputed=(part := (modules[name], segment)) in chosen, selective=chosen.get(part, False))
            for segment in cuts
        )
        for name, cuts in found.items()
    }, kept


def _text(name: str, segment: Segment) -> str:
    place = "" if segment.end is None else f"[{segment.start}:{segment.end}]"
    return f"{name}{place}{' (selective)' if segment.selective else ''}"
