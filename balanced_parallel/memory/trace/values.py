"""Values that a trace knows: those of small integers among the inputs, and what operators make of
them.

A model that reads sizes of images or lengths of rows from its inputs runs in a trace as in
training. The fake tensors, and what is allocated, are the same as without values: real tensors only
go along with them::

    fake    sizes  --->  sizes.prod(1)  --->  .sum()  --->  .item()     weight.new_zeros(24, 8)
    real    sizes  --->  sizes.prod(1)  --->  .sum()  --->  24
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (  # torch has no public module of fake tensors
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

# no public context leaves all modes
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..operators import READS
from .private import map_tensors, storage_id, tensors_of

KNOWN = 1024  # elements of an input; results have at most its square


class Values:
    """Real tensors with the values of fake ones."""

    def __init__(self) -> None:
        self.real = WeakIdKeyDictionary()

    def follow(
        self,
        func: Any,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        run: Callable[..., object],
    ) -> object:
        """Returns what ``run`` returns for an operator.

        If all values are known, a number, or a result of any size, is theirs.
        """
        if not self.real and args and type(args[0]) is FakeTensor:
            return run(func, args, kwargs)
        tensors = tensors_of((args, kwargs))
        writes = func._schema.is_mutable
        are_known = (each in self.real or (is_small(each) and not writes) for each in tensors)
        if not tensors or not all(are_known):
            self._forget(func, args)
            return run(func, args, kwargs)
        compute = functools.partial(self._compute, func, args, kwargs)
        if func in READS:
            return compute()
        try:
            result = run(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            device = tensors[0].device
            result = map_tensors(
                lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), compute()
            )
        leaves = tensors_of(result)
        if all(leaf.numel() <= KNOWN**2 for leaf in leaves):
            for leaf, real in zip(leaves, tensors_of(compute()), strict=True):
                if leaf.shape == real.shape:
                    self.real[leaf] = real
        return result

    def _forget(self, func: Any, args: tuple[object, ...]) -> None:
        """Forgets the values of what an operator writes to, its first argument, and of all tensors
        that share their storage.
        """
        if not (self.real and func._schema.is_mutable):
            return
        tensors = [leaf for leaf in tensors_of(args[:1]) if leaf in self.real]
        written = {storage_id(leaf.untyped_storage()) for leaf in tensors}
        for fake in [fake for fake in self.real if storage_id(fake.untyped_storage()) in written]:
            del self.real[fake]

    def _compute(
        self,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        def value(tensor: Tensor) -> object:
            return self.real.get(tensor, tensor)

        with _disable_current_modes():
            return func(*map_tensors(value, args), **map_tensors(value, kwargs))


def is_small(tensor: Tensor, times: float = 1.0) -> bool:
    """Returns True for a real tensor of few integers on the CPU, also with so many times its rows."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.int32, torch.int64)
        and tensor.numel() * times <= KNOWN
    )
