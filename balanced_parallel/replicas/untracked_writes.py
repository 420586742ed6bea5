"""Notes the parameters that Python may have written to without torch's version counter: through ``.data``, or in a step.

``parameter.data`` is a tensor with a version counter of its own, and fused optimizers move none. torch has no hook on ``.data``.
A subclass for the parameters would have one, but optimizers take their foreach path for exactly ``nn.Parameter`` and
``torch.Tensor`` (``torch.optim.optimizer._default_to_fused_or_foreach``). So the attribute of ``nn.Parameter`` itself notes who
reads it. Forward, backward, clipping, optimizers and ``state_dict()`` never do.
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
    """The parameters that may have been written to since they were last asked for.

    A tensor that ``.data`` has returned, or was set to, may be written to for as long as it lives. Until then its parameter
    counts as written to every time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        _listen()
        self._parameters = parameters  # alive, so that no other has the id of one
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._noted: dict[int, list[weakref.ref[Tensor]]] = {}  # by place, the tensors that share its memory
        _listening.append(weakref.ref(self, _listening.remove))

    def take(self) -> list[int]:
        """Returns the places of those parameters."""
        if not self._noted:
            return []
        noted, self._noted = self._noted, {}
        for place, aliases in noted.items():
            if alive := [alias for alias in aliases if alias() is not None]:
                self._noted.setdefault(place, []).extend(alive)
        return list(noted)

    def note(self, parameter: Tensor, alias: Tensor) -> None:
        """Notes a tensor that shares the parameter's memory."""
        place = self._places.get(id(parameter))
        if place is not None:
            alive = [known for known in self._noted.get(place, ()) if known() is not None]
            self._noted[place] = [*alive, weakref.ref(alias)]

    def note_all(self, parameters: Iterable[Tensor], *, with_gradients: bool) -> None:
        """Notes several parameters, or those of them that have a gradient, which are all that an optimizer steps."""
        for identity in self._places.keys() & map(id, parameters):
            place = self._places[identity]
            if not with_gradients or self._parameters[place].grad is not None:
                self._noted.setdefault(place, [])


_own_data: Any = torch.Tensor.data


def _read(parameter: nn.Parameter) -> Tensor:
    data: Tensor = _own_data.__get__(parameter)
    _note(parameter, data)
    return data


def _write(parameter: nn.Parameter, data: Tensor) -> None:
    _own_data.__set__(parameter, data)
    if data is not parameter:  # Module.to() sets what has stayed where it was
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
    for group in optimizer.__dict__.get("param_groups", ()):  # a BalancedOptimizer has those of another, stepped before
        note_written(group["params"], with_gradients=True)


@functools.cache
def _listen() -> None:
    """Once, where a parameter first gets a copy on another device."""
    nn.Parameter.data = property(_read, _write)  # type: ignore[assignment]
    register_optimizer_step_post_hook(_note_step)
