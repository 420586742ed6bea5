"""A gradient whose elements are on several devices, and which everything reads and writes as one
tensor.

After a reduction to owners, ``parameter.grad`` has shape, dtype and device of the parameter, and no
memory. An operation gathers this gradient alone, and copies back what it wrote. Views write through,
because they are taken again of the gathered gradient::

    parameter.grad                      parts: | device 0 | device 1 | device 2 |
    parameter.grad.norm()               gather -> norm
    parameter.grad.mul_(2)              gather -> mul_ -> scatter
    parameter.grad.detach()[0].zero_()  gather -> detach -> [0] -> zero_ -> scatter
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import torch_private
from .transport import copy


class ShardLayout(NamedTuple):
    """Places of the elements of a parameter's gradient."""

    like: Tensor  # the parameter, on the meta device
    device: torch.device  # that of the parameter
    owners: Sequence[torch.device]  # the device of each part
    runs: Sequence[slice | None]  # the elements of each part; None for all
    settle: Callable[[], Callable[[], None] | None]  # a weak reference; adds what waits elsewhere

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Returns the parts of a tensor, which are views if its memory has no gaps."""
        return [whole if run is None else whole.reshape(-1)[run] for run in self.runs]

    def scatter(self, whole: Tensor) -> list[Tensor]:
        """Returns copies of the parts of a tensor on their owners."""
        parts = zip(self.cut(whole), self.owners, strict=True)
        return [part.to(owner, copy=True) for part, owner in parts]


class ShardedGradient(Tensor):
    """A gradient with a part for each run of its layout, or a view of it.

    Views share the list of ``parts``, which is empty until something is added.
    """

    __torch_function__ = torch_private.no_torch_function

    def __new__(
        cls, shards: ShardLayout, parts: list[Tensor], *views: Callable[[Any], Any]
    ) -> "ShardedGradient":
        """Makes a tensor without memory."""
        return torch_private.make_wrapper(cls, _replay(views, shards.like), shards.device)

    def __init__(
        self, shards: ShardLayout, parts: list[Tensor], *views: Callable[[Any], Any]
    ) -> None:
        self.shards = shards
        self.parts = parts
        self.views = views

    def gather(self) -> Tensor:
        """Returns the whole gradient, of which this may be a view, on the device of the parameter."""
        settle = self.shards.settle()
        if settle is not None:
            settle()
        whole = torch.zeros_like(self.shards.like, device=self.shards.device)
        for target, part in zip(self.shards.cut(whole), self.parts, strict=False):
            copy(target, part)
        return whole

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        settings: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an operator on gathered gradients."""
        if torch.Tag.inplace_view in function.tags:
            raise TypeError(
                f"{function} of a gradient whose elements are on several devices, expected an operator that keeps its shape: "
                "change a copy, optimizer.gradient(parameter)"
            )
        first = arguments[0]
        if function.is_view and isinstance(first, cls):
            return first.view_by(lambda tensor: function(tensor, *arguments[1:], **settings or {}))
        wholes: dict[int, Tensor] = {}
        gradients: dict[int, ShardedGradient] = {}

        def gathered(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, cls):
                return tensor
            key = id(tensor.parts)
            if key not in wholes:
                wholes[key] = tensor.gather()
            value = _replay(tensor.views, wholes[key])
            gradients[id(value)] = tensor
            return value

        values, named = torch_private.map_tensors(gathered, (arguments, settings or {}))
        result = function(*values, **named)
        if torch_private.writes(function):
            for gradient in gradients.values():
                sources = gradient.shards.cut(wholes[id(gradient.parts)])
                for part, source in zip(gradient.parts, sources, strict=True):
                    copy(part, source)
        return torch_private.map_tensors(lambda tensor: gradients.get(id(tensor), tensor), result)

    def view_by(self, function: Callable[[Any], Any]) -> "ShardedGradient | list[ShardedGradient]":
        """Returns the view, or the views, that a function takes of a gathered gradient."""
        views = (*self.views, function)
        like = _replay(views, self.shards.like)
        if isinstance(like, Tensor):
            return ShardedGradient(self.shards, self.parts, *views)
        return [
            ShardedGradient(self.shards, self.parts, *views, operator.itemgetter(place))
            for place in range(len(like))
        ]

    @property
    def data(self) -> Tensor:
        """The gradient. It can be set to values, as old loops do."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the whole gradient as an array."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Returns the whole gradient as nested lists."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: object) -> Tensor:
        """Returns the whole gradient, a plain tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the whole gradient, a plain tensor."""
        return self.clone().__reduce_ex__(protocol)


def _replay(views: Sequence[Callable[[Any], Any]], whole: Tensor) -> Any:
    return functools.reduce(lambda tensor, view: view(tensor), views, whole)
