"""``checkpoint_activations``: blocks of a network save their inputs only, and the backward runs
them again.

A checkpointed module has another class, so that its copies and replicas are checkpointed too. The
second run of a forward draws the same random numbers and reads the same buffers, which
``torch.utils.checkpoint`` alone would update twice.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from ..replicas.module_tree import class_of, find_blocks
from ..runtime import torch_private, values
from ..runtime.random_numbers import RandomState

EXPECTED = "expected names of named_modules(): blocks=['encoder', 'decoder']"


class Checkpointed:
    """A base class of checkpointed modules, besides their own class."""

    # the class of the module, its number of segments, and True if they are selective
    made_from: tuple[Any, int, bool]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Returns the parts for ``pickle`` and ``copy``, which do not find a class that was made at
        run time.
        """
        parts: Any = super().__reduce_ex__(protocol)
        return _new, self.made_from, *parts[2:]


def _new(*made_from: Any) -> Any:
    checkpointed = _checkpointed(*made_from)
    return checkpointed.__new__(checkpointed)


@functools.cache
def _checkpointed(kind: Any, segments: int, selective: bool) -> Any:
    """Returns a checkpointed subclass.

    A ``forward`` set on the instance would still run the original after a copy.
    """

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: object, **kwargs: object) -> object:
        run = functools.partial(run_checkpointed, name=kind.__name__, selective=selective)
        if segments == 1:
            return run([self], functools.partial(kind.forward, self), args, kwargs)
        size = len(self) // segments
        last = size * (segments - 1)  # The last segment stays as it is.
        for start in range(0, last, size):
            layers = list(self)[start : start + size]
            args = (run(layers, functools.partial(_run_layers, layers), args, kwargs),)
        return _run_layers(list(self)[last:], *args)

    return type(
        kind.__name__,
        (Checkpointed, kind),
        {
            "forward": forward,
            "__module__": kind.__module__,
            "made_from": (kind, segments, selective),
        },
    )


def _run_layers(layers: Iterable[nn.Module], value: object) -> object:
    for layer in layers:
        value = layer(value)
    return value


class CheckpointHandle:
    """The result of :func:`checkpoint_activations`.

    Attributes:
        parts: the modules that are recomputed, by name, as a whole or in segments.
    """

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self.parts = parts

    def remove(self) -> None:
        """Undoes the checkpointing, for graphs that are made from now on."""
        for module in self.parts.values():
            module.__class__ = class_of(module)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(parts={list(self.parts)})"


@values.naming_arguments
def checkpoint_activations(
    module: nn.Module,
    *,
    blocks: str | Iterable[str] = "auto",
    selective: bool = False,
) -> CheckpointHandle:
    """Checkpoints parts of a module in place.

    Their activations are computed again in the backward instead of being kept.

    Loss, gradients, random numbers and running statistics stay the same. A call replaces the
    checkpoints of an earlier call.

    Args:
        module: any module. Names of parameters, ``state_dict()`` and ``isinstance`` stay as they
            are.
        blocks: names of submodules (of the module itself: ``""``). ``"auto"`` takes the repeated
            blocks of the network, such as the layers of a transformer. If there are none, each
            outermost ``nn.Sequential`` is cut into segments, as many as the square root of its
            length, of which the last stays as it is.
        selective: keeps the outputs of matrix multiplications, convolutions and attention, which
            are expensive to compute again.

    Returns:
        A handle. ``handle.remove()`` undoes the checkpointing.

    Raises:
        ValueError: there is nothing to checkpoint, or a name is unknown.

    Example:
        >>> net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
        >>> savings.checkpoint_activations(net)
        CheckpointHandle(parts=[''])
    """
    values.check_type("module", module, nn.Module, "a module, as in checkpoint_activations(net)")
    for submodule in module.modules():
        submodule.__class__ = class_of(submodule)
    names: Sequence[str] = find_blocks(module)
    if blocks != "auto":
        values.check_type("blocks", blocks, Iterable, "'auto', or the names of submodules")
        names = [blocks] if isinstance(blocks, str) else list(blocks)
        if not names:
            raise ValueError(f"blocks={blocks!r} is empty, {EXPECTED}")
    modules = dict(module.named_modules(remove_duplicate=False))
    segments = dict.fromkeys(names, 1) or {
        name: max(2, round(math.sqrt(len(torch_private.children_of(child)))))
        for name, child in outermost_sequentials(module).items()
    }
    if not segments:
        raise ValueError(
            f"{type(module).__name__} has neither repeated blocks nor an nn.Sequential to checkpoint, {EXPECTED}"
        )
    for name in segments:
        if name not in modules:
            raise ValueError(f"there is no module {name!r} to checkpoint, {EXPECTED}")
    parts = {name: modules[name] for name in segments}
    for name, child in parts.items():
        child.__class__ = _checkpointed(class_of(child), segments[name], selective)
    return CheckpointHandle(parts)


def outermost_sequentials(module: nn.Module) -> dict[str, nn.Module]:
    """Returns each ``nn.Sequential`` of several modules that is not inside of another one, by name."""
    sequentials: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        is_outermost = not any(
            name.startswith(f"{other}." if other else "") for other in sequentials
        )
        if (
            is_outermost
            and type(child).forward is nn.Sequential.forward
            and len(torch_private.children_of(child)) > 1
        ):
            sequentials[name] = child
    return sequentials


def has_parts(module: nn.Module) -> bool:
    """Returns True if :func:`checkpoint_activations` finds something to checkpoint."""
    return bool(find_blocks(module) or outermost_sequentials(module))


def run_checkpointed(
    modules: Sequence[nn.Module],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    name: str,
    selective: bool = False,
) -> Any:
    """Returns ``function(*args, **kwargs)``, which the backward runs again.

    It may write to buffers of ``modules``.
    """
    leaves, rebuild = torch_private.flatten((args, kwargs))
    is_generating = any(hasattr(leaf, _CACHE) for leaf in leaves) and not any(
        module.training for module in modules
    )
    if is_generating or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves = without_empty_cache(leaves, name)

    def run(*again: object) -> object:
        positional, named = rebuild(list(again))
        return function(*positional, **named)

    # the compiler runs operators again, with their random numbers, and no writes
    if torch.compiler.is_compiling():
        # it refuses noop_context_fn
        settings: dict[str, Any] = {"context_fn": _make_selective} if selective else {}
        return checkpoint(run, *leaves, use_reentrant=False, **settings)
    # Tensors are passed by position: torch finds the devices, and thereby autocast, from positional
    # arguments only.
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    before = torch_private.versions(tensors)
    rerun = _Rerun(modules, tensors, selective)
    contexts = rerun.first_run(), rerun
    outputs = checkpoint(
        run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
    )
    if torch_private.versions(tensors) != before:
        raise RuntimeError(
            f"{name} writes to its input in place, so its forward cannot run again: set inplace=False on the module that does"
        )
    return outputs


class _Rerun:
    """A context of each further run of a forward.

    One graph may enter it several times (``retain_graph=True``).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[Tensor],
        selective: bool,
    ) -> None:
        self._first, self._inner = _make_selective() if selective else noop_context_fn()
        # hooks of saved tensors do not get the outputs that it keeps, as before torch 2.15
        if selective:
            self._first.respect_saved_tensors_hooks = False
        owners = dict.fromkeys(owner for module in modules for owner in module.modules())
        buffers = [(owner, torch_private.buffers_of(owner)) for owner in owners]
        self._owners = [(owner, named) for owner, named in buffers if named]
        # An argument may be an object with tensors, and a layer on another device than the
        # arguments.
        parameters = [
            parameter
            for owner in owners
            for parameter in torch_private.parameters_of(owner).values()
            if parameter is not None
        ]
        self._random = RandomState([tensor.device for tensor in (*tensors, *parameters)])
        self._written: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._entered: list[ExitStack] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Records the buffers that the block writes to, with their values before."""
        before = []
        for owner, buffers in self._owners:
            named = [
                (buffers, name, buffer)
                for name, buffer in buffers.items()
                if buffer is not None and owner.training
            ]
            if buffers.get("running_mean") is None:
                before += [(*each, each[2].clone()) for each in named]
            # torch's norms do not count these writes as versions. Outputs in training do not depend
            # on the values.
            else:
                self._written += [(buffers, name, None) for buffers, name, _ in named]
        now = torch_private.versions([buffer for _, _, buffer, _ in before])
        with self._first:
            yield
        for version, (buffers, name, buffer, value) in zip(now, before, strict=True):
            if buffers.get(name) is not buffer or torch_private.versions([buffer]) != [version]:
                self._written.append((buffers, name, value))
        self._random.end()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._random.again())
            for buffers, name, value in self._written:
                stack.callback(buffers.__setitem__, name, buffers[name])
                start = buffers[name] if value is None else value
                buffers[name] = None if start is None else start.clone()
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


_MULTIPLICATIONS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")
}


def _keep_expensive(_context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operator in _MULTIPLICATIONS
    place = torch_private.ATTENTION_KERNELS.get(operator)
    # attention that draws random numbers has to run again, to draw them again
    if place is not None:
        keeps = not (args[place] if len(args) > place else kwargs.get("dropout_p"))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


_make_selective = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)


_CACHE = "get_seq_length"  # A method that a cache of transformers has.


def without_empty_cache(leaves: list[Any], name: str) -> list[object]:
    """Returns the arguments of a block with None in place of a cache, to which a recomputation
    would append once more.

    Keys of earlier tokens change the result, so such a cache is refused. The first tensor has the
    shape ``[rows, tokens, ...]``.
    """
    hidden = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), None)
    tokens = 0 if hidden is None else hidden.shape[1]
    outputs: list[object] = []
    for leaf in leaves:
        length = leaf.get_seq_length() if hasattr(leaf, _CACHE) else None
        # blocks before this one may have appended the tokens of this call
        if length not in (None, 0, tokens):
            raise ValueError(
                f"{name} gets a cache with the keys of {length} tokens for {tokens} new ones, to which a recomputation would "
                "append: train without past_key_values, or do not checkpoint this block"
            )
        outputs.append(leaf if length is None else None)
    return outputs
