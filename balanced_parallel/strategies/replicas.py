"""Synchronisation of gradients over the replicas of one process."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight, power_of_two, run_backward
from ..replicas.model import DataParallelModel
from ..replicas.replicas import window
from ..runtime.collectives import world_size
from ..runtime.torch_private import foreach_multiply_
from ..runtime.values import take_gradients
from ..training.settings import Settings
from ..training.sync import GradientSync, GroupReport, GroupSync, UpdateSync, gradient_sync


class _ReplicaSync(GradientSync, GroupSync):
    """Sums gradients of replicas to the module's parameters, or to their owners, in the backward of
    the last micro-batch.

    No update has a state of its own here. Gradients that are not reduced yet are in the buckets of
    the replicas.
    """

    def __init__(self, model: DataParallelModel, criterion: DataParallelCriterion) -> None:
        self._model = model
        self._criterion = criterion

    def open(self) -> UpdateSync:
        return self

    def by_group(self) -> Callable[[], GroupSync]:
        shared = {*self._model.parameters()} & {*self._criterion.parameters()}
        if shared and len({*self._model.devices}) > 1:
            raise ValueError(
                "reproducible='bits' with a parameter that model and criterion share on several devices, expected it in the "
                "module alone: its gradients are added in another order on one device"
            )
        return lambda: self

    def take(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        taken = []
        for replicas in (self._criterion.replicas, self._model.replicas):
            for bucket in replicas.gradients.buckets:
                for gradients in bucket.take():
                    for place, gradient in gradients.items():
                        taken.append((bucket.parameters[place], gradient))
        return taken + take_gradients(parameters)

    def gather(self, report: GroupReport) -> list[GroupReport]:
        return [report]

    def reduce(self, sizes: Sequence[int], tensors: Iterator[Tensor]) -> None:
        """Makes the tensors: there is one process."""
        for _ in tensors:
            pass

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns the expected weight, if the host knows it.

        One device then computes as the plain program does, bit for bit.
        """
        if in_float16:
            return power_of_two(
                expected.clamp(min=before)
                if isinstance(expected, Tensor)
                else max(expected, before)
            )
        return expected if isinstance(expected, float) and 0 < expected < math.inf else 1.0

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return window(self._model, self._criterion, deferred=True)

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        if not is_reduced:
            yield []  # The backward only sums the gradients of the replicas.

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        both = self._criterion.replicas, self._model.replicas
        if losses:
            compiled = [
                replicas
                for replicas in both
                if replicas.tree is not None and replicas.tree.is_compiled
            ]
            # Compiled backwards fail in the threads of the engine, one for each device
            # (pytorch#185372).
            with torch.autograd.set_multithreading_enabled(
                torch.autograd.is_multithreading_enabled() and not compiled
            ):
                run_backward(losses, divisor)
        # The model comes last: a BalancedOptimizer takes the gradients of parameters that both
        # share from there.
        for replicas in both if local is not None else ():
            if replicas.gradients.buckets:  # only with several devices
                replicas.gradients.reduce()

    def random_numbers(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def count_micro_batches(self, count: int) -> int:
        return count

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        return local

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        if isinstance(factor, Tensor) or factor != 1:
            foreach_multiply_(
                [tensor.grad for tensor in tensors if tensor.grad is not None], factor
            )

    def smallest(self, number: float) -> float:
        return number

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        for replicas in (self._criterion.replicas, self._model.replicas):
            replicas.gradients.drop()
        return False


@gradient_sync.register
def _(model: DataParallelModel, criterion: DataParallelCriterion) -> GradientSync:
    if type(model).forward is not DataParallelModel.forward:
        raise TypeError(
            f"{type(model).__name__} has a forward of its own, which a step does not call: put it into the module"
        )
    if model.gather_outputs:
        raise TypeError(
            "the model has gather_outputs=True, expected outputs that stay on their devices: leave it out"
        )
    if world_size() > 1:
        raise TypeError(
            f"{world_size()} ranks are running, but DataParallelModel is for one: use parallelize(module, criterion)"
        )
    return _ReplicaSync(model, criterion)
