"""A forward that runs again in the backward, with the same random numbers, and without a second update of buffers.

``torch.utils.checkpoint`` runs it again on the buffers that the first run has left. Batch norm would then update its running
statistics twice, and spectral norm would use another weight.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ..runtime import trees
from ..runtime.modules import buffers_of, parameters_of
from ..runtime.random_numbers import RandomState
from ..runtime.tensors import versions
from .expensive_operators import keep_expensive
from .key_value_caches import is_cache, without_empty_cache

__all__: list[str] = []

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def run_checkpointed(
    modules: Sequence[nn.Module], function: Callable[..., Any], args: Any, kwargs: Any, *, name: str, selective: bool = False
) -> Any:
    """Returns ``function(*args, **kwargs)``. The graph keeps the arguments only, and the backward runs the function again.

    Args:
        modules: that the function runs, whose buffers it may write to.
        name: for errors.
        selective: the graph also keeps the outputs of matrix multiplications, convolutions and attention.

    Raises:
        RuntimeError: the function writes to its arguments.
        ValueError: an argument is a cache of keys and values that is not empty.
    """
    leaves, rebuild = trees.flatten((args, kwargs))
    is_training = any(module.training for module in modules)
    if not torch.is_grad_enabled() or (not is_training and any(map(is_cache, leaves))):
        return function(*args, **kwargs)
    leaves = without_empty_cache(leaves, name)

    def run(*again: Any) -> Any:
        positional, named = rebuild(list(again))
        return function(*positional, **named)

    make = functools.partial(create_selective_checkpoint_contexts, keep_expensive)
    if torch.compiler.is_compiling():  # the compiler runs operators again, with their random numbers, and no writes
        settings: dict[str, Any] = {"context_fn": make} if selective else {}
        return checkpoint(run, *leaves, use_reentrant=False, **settings)
    contexts = _selective_contexts if selective else noop_context_fn
    # Tensors are passed by position: torch finds the devices, and thereby autocast, from positional arguments only.
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    before = versions(tensors)
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    parameters = [parameter for owner in owners for parameter in parameters_of(owner).values() if parameter is not None]
    devices = [tensor.device for tensor in (*tensors, *parameters)]  # an argument may be an object, layers on another device
    outputs = checkpoint(
        run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: _contexts(owners, devices, contexts())
    )
    if versions(tensors) != before:
        raise RuntimeError(
            f"{name} writes to its input in place, so its forward cannot run again: set inplace=False on the "
            "module that does; call checkpoint_activations before inplace_activations, which then leaves that module as it is"
        )
    return outputs


def _selective_contexts() -> Contexts:
    """Returns torch's contexts of selective checkpointing. Hooks of saved tensors do not get the outputs that it keeps."""
    first, again = create_selective_checkpoint_contexts(keep_expensive)
    first.respect_saved_tensors_hooks = False  # as before torch 2.15, which warns that None will mean True
    return first, again


def _contexts(owners: list[nn.Module], devices: list[torch.device], inner: Contexts) -> Contexts:
    again = _Again(owners, devices, inner[1])
    return again.first_run(inner[0]), again


class _Again:
    """A context of each further run of a forward. One graph may enter it several times (``retain_graph=True``)."""

    def __init__(
        self, owners: list[nn.Module], devices: list[torch.device], inner: contextlib.AbstractContextManager[Any]
    ) -> None:
        self._owners = [(owner, buffers_of(owner)) for owner in owners if buffers_of(owner)]
        self._random = RandomState(devices)
        self._inner = inner
        self._written: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._entered: list[contextlib.ExitStack] = []

    @contextlib.contextmanager
    def first_run(self, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Records the buffers that the block writes to, with their values before."""
        before = []
        for owner, buffers in self._owners:
            if owner.training and buffers.get("running_mean") is not None:
                # torch's norms do not count these writes as versions. Outputs in training do not depend on the values.
                self._written += [(buffers, name, None) for name, buffer in buffers.items() if buffer is not None]
            elif owner.training:
                before += [(buffers, name, buffer, buffer.clone()) for name, buffer in buffers.items() if buffer is not None]
        found = versions([buffer for _, _, buffer, _ in before])
        with inner:
            yield
        for version, (buffers, name, buffer, value) in zip(found, before, strict=True):
            if buffers.get(name) is not buffer or versions([buffer]) != [version]:
                self._written.append((buffers, name, value))
        self._random.end()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._random.again())
            for buffers, name, value in self._written:
                current = buffers[name]
                stack.callback(buffers.__setitem__, name, current)
                start = current if value is None else value
                buffers[name] = None if start is None else start.clone()
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
