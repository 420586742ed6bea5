"""Losses whose rows depend on each other, computed from parts of the batch: replicas, micro-batches and ranks.

    first pass     forward 0 | forward 1 | ...     without a graph; the parts of the loss are collected
    differentiate  loss of all parts, and its derivative at each of them, once per process
    second pass    forward 0 | backward 0 | forward 1 | backward 1 | ...     from these derivatives

This is GradCache (arXiv:2101.06983). The parts are outputs (:class:`WholeLoss`) or sums (:class:`LossOfSums`).
"""

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.collectives import rank
from ..runtime.devices import move
from ..runtime.precision import scaled
from ..runtime.tensors import is_differentiable
from .shard_runner import ShardRunner
from .weighting import LossSum, widen

__all__: list[str] = []


class CoupledLoss(abc.ABC):
    """The loss of one update, whose rows depend on each other.

    Args:
        criterion: computes the loss.
        home: a device of this process, for collectives if it has no rows.
    """

    def __init__(self, criterion: ShardRunner, home: torch.device) -> None:
        self.criterion, self.home = criterion, home
        self._loss: Tensor | None = None  # of all ranks, until a part has handed it back
        self._parameters: list[Tensor] = []
        self._of_parameters: list[Tensor | None] = []

    @abc.abstractmethod
    def value(self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the loss of a batch, with the graph of its outputs."""

    @abc.abstractmethod
    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all parts on all ranks, and its derivative at each part. Every rank calls this.

        Args:
            scaler: scales the loss meanwhile, so that derivatives in float16 do not underflow.
        """

    @abc.abstractmethod
    def _parts(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the part of each replica."""

    @abc.abstractmethod
    def _collect(self, parts: list[Any]) -> None:
        """Keeps the values of the parts for :meth:`differentiate`."""

    @abc.abstractmethod
    def _take(self, part: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the tensors of a replica's part with the derivatives of the loss. Parts come in the order of the first pass."""

    def collect(self, outputs: Any, *targets: Any) -> list[LossSum]:
        """Collects the parts of a micro-batch in the first pass. Returns no losses."""
        self.collect_parts(outputs, *targets)
        return []

    def hand_back(self, outputs: Any, *targets: Any) -> list[LossSum]:
        """Returns a loss per replica of a micro-batch in the second pass.

        Their sum over all micro-batches and ranks is the loss, and their gradients sum to its gradient.
        """
        return self.hand_back_parts(self._parts(outputs, targets, {}))

    def collect_parts(self, outputs: Any, *targets: Any) -> list[Any]:
        """Collects the parts of a micro-batch, and returns them, for a single pass."""
        parts = self._parts(outputs, targets, {})
        self._collect(parts)
        return parts

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns the result of :meth:`hand_back` for parts with a graph."""
        return [self._handed(part) for part in parts]

    def _handed(self, part: Any) -> LossSum:
        pairs = self._take(part)
        loss, self._loss = self._loss, None
        if loss is not None:
            pairs += zip(self._parameters, self._of_parameters, strict=True)
            self._parameters = []
        learning = [(tensor, derivative) for tensor, derivative in pairs if is_differentiable(tensor)]
        device = pairs[0][0].device if pairs else torch.device("cpu") if loss is None else loss.device
        value = torch.zeros((), device=device) if loss is None else move(loss, device)
        tensors, derivatives = [tensor for tensor, _ in learning], [derivative for _, derivative in learning]
        return LossSum(_HandBack.apply(value, derivatives, *tensors), None)

    def _derivatives(
        self, loss: Tensor, at: Sequence[Tensor], ranks: Sequence[int], scaler: torch.amp.GradScaler | None
    ) -> list[Tensor | None]:
        """Keeps the loss and its derivatives at the criterion's parameters. Returns those at other tensors.

        The ranks of ``ranks`` compute the same loss. The first reports it, and each adds its share to gradients of parameters.
        """
        parameters = [parameter for parameter in self.criterion.parameters() if parameter.requires_grad]
        scale = None if scaler is None else scaled(torch.ones((), device=loss.device), scaler)
        whole = loss if scale is None else loss * scale
        found = torch.autograd.grad(whole, [*at, *parameters], allow_unused=True)
        if scale is not None:
            found = tuple(None if one is None else widen(one) / move(scale, one.device) for one in found)
        self._loss = loss.detach() if ranks[0] == rank() else torch.zeros_like(loss, requires_grad=False)
        self._parameters = [*parameters]
        self._of_parameters = [self._share(one, ranks) for one in found[len(at) :]]
        return list(found[: len(at)])

    def _share(self, derivative: Tensor | None, ranks: Sequence[int]) -> Tensor | None:
        """Returns this rank's share of a derivative that all of ``ranks`` have."""
        return None if derivative is None or rank() not in ranks else derivative / len(ranks)


class _HandBack(torch.autograd.Function):
    """Returns ``value`` in the forward. The backward gives each tensor its derivative, times the gradient of the value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, derivatives: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.derivatives = derivatives
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.derivatives, ctx.dtypes, strict=True)
        found = [None if one is None else (one * move(gradients[0], one.device).to(one.dtype)).to(dtype) for one, dtype in pairs]
        return None, None, *found
