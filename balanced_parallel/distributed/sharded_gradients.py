"""Gradients of the parameters that FSDP2 all-gathers together: equal on all ranks in number, whatever a rank has used.

FSDP2 reduces the gradients that a rank has. So ranks that have used different parameters would reduce tensors of different sizes.
Zeros are set in place of missing gradients before each reduction. (torch 2.13 can do this as well, but not 2.11, and a parameter
that no rank has used would get a gradient of zeros.)

    start of the backward    ranks compare the blocks that they have run
    backward of a block      all-gather | gradients of parameters | zeros for missing ones | reduce-scatter
    end of the backward      ranks agree on the parameters that nobody has used: their gradient is None again
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..batch.nested import leaves, map_leaves
from ..runtime.autograd import current_backward_id, run_after_backward
from ..runtime.collectives import sum_over_ranks
from ..runtime.tensors import is_sharded
from .block_order import BlockOrder

__all__: list[str] = []


_NO_UNIT = -1


class ShardedGradients:
    """Completes the gradients of sharded modules in every backward."""

    def __init__(self) -> None:
        self.order = BlockOrder()
        self.is_dummy = False  # the present forward has no rows of this rank: its gradients are zeros
        self.parameters: list[nn.Parameter] = []  # the shards
        self._units: list[list[tuple[nn.Module, str]]] = []
        self._backward: int | None = None
        self._is_dummy = False  # of the running backward
        self._used: set[tuple[int, int]] = set()
        self._before: list[bool] = []

    def add(self, unit: nn.Module, name: str) -> None:
        """Completes the gradients of the parameters of a sharded module, without those that were added before."""
        self.order.add(name)
        known, slots = set(map(id, self.parameters)), []
        for part in unit.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    self.parameters.append(parameter)
                    slots.append((part, name))
        number = len(self._units)
        self._units.append(slots)

        def watch_inputs(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
            self.order.note(number)
            return self._watch((inputs, kwargs), number)

        # runs after the hook of FSDP2, so its backward runs before; torch.compile leaves both out
        unit.register_forward_pre_hook(torch.compiler.disable(watch_inputs), with_kwargs=True)

    def avoid_views(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Returns outputs of the root that are not views, of which FSDP2 warns. Callers get those of :meth:`watch_output`."""
        return self._watch(output, _NO_UNIT)

    def watch_output(self, output: Any) -> Any:
        """Returns the output of the root, connected to the beginning of its backward."""
        return self._watch(output, None)

    def _watch(self, node: Any, number: int | None) -> Any:
        tensors = [leaf for _, leaf in leaves(node) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not tensors or not torch.is_grad_enabled():
            return node
        watched = iter(_Watch.apply(self, number, self.is_dummy, *tensors))
        return map_leaves(lambda leaf: next(watched) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, node)

    def begin(self, *, is_dummy: bool) -> None:
        """Begins a backward. This runs before the hooks of FSDP2, so its callback at the end runs before theirs."""
        if self._backward != current_backward_id():
            self.order.compare()
            self._backward, self._is_dummy, self._used = current_backward_id(), is_dummy, set()
            self._before = [parameter.grad is not None for parameter in self.parameters]
            run_after_backward(self._end)
        self._is_dummy = self._is_dummy and is_dummy

    def complete(self, number: int, *, is_dummy: bool) -> None:
        """Sets the missing gradients of a unit to zeros; all of them after a forward without rows."""
        for index, (part, name) in enumerate(self._units[number]):
            parameter = part.get_parameter(name)
            if is_sharded(parameter):
                return  # a shard: this unit has not run, or is reduced already
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif is_dummy:
                parameter.grad.zero_()
            else:
                self._used.add((number, index))

    def _end(self) -> None:
        """Completes the units that FSDP2 reduces at the end of the backward, and looks for unused parameters after it."""
        for number in range(len(self._units)):
            self.complete(number, is_dummy=self._is_dummy)
        run_after_backward(self._forget_unused)

    def _forget_unused(self) -> None:
        places = [(number, index) for number, slots in enumerate(self._units) for index in range(len(slots))]
        used = sum_over_ranks(torch.tensor([place in self._used for place in places], dtype=torch.int32)).tolist()
        for parameter, count, had_gradient in zip(self.parameters, used, self._before, strict=True):
            if not count and not had_gradient:
                parameter.grad = None


class _Watch(torch.autograd.Function):
    """The identity on the outputs of the root, or on the inputs of a unit.

    Behind the inputs, its backward runs when the gradients of the unit's parameters are there.
    """

    @staticmethod
    def forward(ctx: Any, gradients: ShardedGradients, number: int | None, is_dummy: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = gradients, number, is_dummy
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs)  # not views, which must not be written to in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        of_module, number, is_dummy = ctx.call
        if number is None:
            of_module.begin(is_dummy=is_dummy)
        elif number != _NO_UNIT:
            of_module.complete(number, is_dummy=is_dummy)
        return None, None, None, *gradients
