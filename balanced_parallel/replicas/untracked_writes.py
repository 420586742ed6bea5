"""A record of writes to parameters that do not increment torch's version counter: through ``.data``, or by fused optimizers.

``parameter.data`` is a tensor with its own version counter, and fused optimizers increment none. torch has no hook on ``.data``.
A subclass of ``nn.Parameter`` could have one, but optimizers use their foreach implementation for exactly ``nn.Parameter`` and
``torch.Tensor`` (``torch.optim.optimizer._default_to_fused_or_foreach``). So ``nn.Parameter.data`` is a property that records
its uses. Forward, backward, clipping, optimizers and ``state_dict()`` do not use it.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__: list[str] = []

_listening: "list[weakref.ref[Writes]]" = []


class Writes:
    """A record of the parameters that may have been written to since the last :meth:`take`.

    A tensor that ``.data`` has returned, or was set to, may be written to for as long as it lives. During that time its parameter
    is in every record.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        _listen()
        self._parameters = parameters  # keeps them alive, so their ids stay unique
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}  # by index of the parameter, tensors that share its memory
        _listening.append(weakref.ref(self, _listening.remove))

    def take(self) -> list[int]:
        """Returns the indices of the recorded parameters, and starts a new record."""
        if not self._aliases:
            return []
        recorded, self._aliases = self._aliases, {}
        for index, aliases in recorded.items():
            if alive := [alias for alias in aliases if alias() is not None]:
                self._aliases.setdefault(index, []).extend(alive)
        return list(recorded)

    def note(self, parameter: Tensor, alias: Tensor) -> None:
        """Records a parameter, and a tensor that shares its memory."""
        index = self._indices.get(id(parameter))
        if index is not None:
            alive = [known for known in self._aliases.get(index, ()) if known() is not None]
            self._aliases[index] = [*alive, weakref.ref(alias)]

    def note_all(self, parameters: Iterable[Tensor], *, with_gradients: bool) -> None:
        """Records several parameters.

        Args:
            parameters: these parameters. Others than those of this record are ignored.
            with_gradients: only those that have a gradient. An optimizer updates no others.
        """
        for identity in self._indices.keys() & map(id, parameters):
            index = self._indices[identity]
            if not with_gradients or self._parameters[index].grad is not None:
                self._aliases.setdefault(index, [])


_own_data: Any = torch.Tensor.data


def _read(parameter: nn.Parameter) -> Tensor:
    data: Tensor = _own_data.__get__(parameter)
    _note(parameter, data)
    return data


def _write(parameter: nn.Parameter, data: Tensor) -> None:
    _own_data.__set__(parameter, data)
    if data is not parameter:  # Module.to() sets the parameter itself if nothing moved
        _note(parameter, data)


def _note(parameter: Tensor, alias: Tensor) -> None:
    for listener in tuple(_listening):
        if (writes := listener()) is not None:
            writes.note(parameter, alias)


def note_written(parameters: Iterable[Tensor], *, with_gradients: bool = False) -> None:
    """Marks all replicas of the parameters as outdated."""
    for listener in tuple(_listening):
        if (writes := listener()) is not None:
            writes.note_all(parameters, with_gradients=with_gradients)


def _note_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.__dict__.get("param_groups", ()):  # a BalancedOptimizer has those of its inner optimizer
        note_written(group["params"], with_gradients=True)


@functools.cache
def _listen() -> None:
    """Starts recording, once, when a parameter first gets a copy on another device."""
    nn.Parameter.data = property(_read, _write)  # type: ignore[assignment]
    register_optimizer_step_post_hook(_note_step)
