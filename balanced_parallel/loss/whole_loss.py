"""Losses of all outputs: contrastive losses, mined triplets. Outputs are gathered, and the loss is computed once per process."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import nested
from ..batch.gathering import repeated_rows
from ..batch.row_joining import gather_ranks, join_rows
from ..batch.row_marks import Along, Arguments, Whole, mark_leaves
from ..batch.rows import move_leaves
from ..runtime.collectives import world_size
from ..runtime.devices import move
from ..runtime.tensors import is_differentiable
from .coupled import CoupledLoss
from .criterion_copies import copy_criterion
from .partial_sums import call_spread, loss_of
from .weighting import weighted_sum

__all__: list[str] = []


class WholeLoss(CoupledLoss):
    """The loss of all outputs of an update.

    Outputs and targets of all replicas, micro-batches and ranks are gathered on the criterion's ``output_device``. An output
    without rows, such as the temperature of a model, must be the same in all parts: that of the first replica is used.

    Attributes:
        pieces: detached outputs and targets of each replica and micro-batch, marked.
        dim: dimension of the rows in targets that are not marked.
    """

    def __init__(self, criterion: Any, home: torch.device) -> None:
        super().__init__(criterion, home)
        self.pieces: list[Arguments] = []  # of all replicas and micro-batches
        self._refusal: str | None = None  # of joining the outputs of several pieces
        self._outputs = 1  # number of leading arguments that the outputs fill
        self.dim = 0
        self._pending: list[list[Tensor | None]] = []  # derivatives of each piece

    def value(self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the loss of a batch. The outputs of all ranks are gathered on every rank."""
        self.pieces = self._parts(outputs, targets, kwargs)
        whole, device = self._join()
        loss = self._call(gather_ranks(whole, device, self._refusal).batch, device)
        return nested.map_leaves(lambda leaf: leaf if leaf is None else weighted_sum(leaf, 1), loss)

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all outputs, and its derivative at each of them."""
        pieces = self.pieces
        whole, device = self._join()
        rows = gather_ranks(whole, device, self._refusal)
        if whole is None:
            return
        leaves = _output_leaves(rows.batch, self._outputs)
        at = [_tensor(leaf) for leaf in leaves if is_differentiable(_tensor(leaf))]
        for tensor in at:
            tensor.requires_grad_()
        with torch.enable_grad():
            loss = self._call(rows.batch, device)
            total = sum(weighted_sum(leaf, 1) for _, leaf in nested.leaves(loss) if leaf is not None)
        found = iter(self._derivatives(total, at, rows.ranks, scaler))  # type: ignore[arg-type]
        derivatives = [next(found) if is_differentiable(_tensor(leaf)) else None for leaf in leaves]
        starts = iter(rows.starts)
        columns = [
            self._cut(leaf, derivative, [_output_leaves(piece, self._outputs)[place] for piece in pieces], starts, rows.ranks)
            for place, (leaf, derivative) in enumerate(zip(leaves, derivatives, strict=True))
        ]
        self._pending = [list(row) for row in zip(*columns, strict=True)]

    def _cut(self, leaf: Any, derivative: Tensor | None, pieces: list[Any], starts: Any, ranks: list[int]) -> list[Tensor | None]:
        """Returns the derivative at each piece of a leaf, on the device of the piece."""
        start = next(starts) if isinstance(leaf, Along) else 0
        if derivative is None:
            return [None] * len(pieces)
        if not isinstance(leaf, Along):
            return [self._share(derivative, ranks), *[None] * (len(pieces) - 1)]
        found: list[Tensor | None] = []
        for piece in pieces:
            rows = piece.leaf.size(leaf.dim)
            found.append(derivative.narrow(leaf.dim, start, rows).to(piece.leaf.device, copy=True))  # the whole can be freed
            start += rows
        return found

    def _parts(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        shards = self.criterion.shards(outputs, targets, kwargs)
        self._refusal = self._refusal or repeated_rows(shards.outputs, shards.outputs.sizes, shards.outputs.dim)
        parts = []
        for output, batch in zip(shards.outputs, shards.batches, strict=True):
            marked = nested.spread(mark_leaves(output, shards.outputs.dim, "the output"))
            parts.append(Arguments((*marked, *batch.inputs), batch.kwargs))
            self._outputs = len(marked)
        self.dim = shards.dim
        return parts

    def _collect(self, parts: list[Arguments]) -> None:
        self.pieces += [nested.map_leaves(_detached, part) for part in parts]

    def _take(self, part: Arguments) -> list[tuple[Tensor, Tensor | None]]:
        leaves, derivatives = _output_leaves(part, self._outputs), self._pending.pop(0)
        return [(_tensor(leaf), one) for leaf, one in zip(leaves, derivatives, strict=True)]

    def _join(self) -> tuple[Any, torch.device]:
        """Returns all pieces of this rank as one, and the device of the loss. The pieces are forgotten."""
        pieces, self.pieces = self.pieces, []
        self._refusal = self._refusal if len(pieces) > 1 or world_size() > 1 else None
        tensor = None if not pieces else nested.first_tensor([_tensor(leaf) for leaf in _output_leaves(pieces[0], self._outputs)])
        if len(pieces) > 1 and not self.criterion.is_checked:
            self.criterion.is_checked = True
            _check_constants([_output_leaves(piece, self._outputs) for piece in pieces])
        device = self.criterion.output_device or (self.home if tensor is None else tensor.device)
        return (join_rows(pieces, device, self.dim) if pieces else None), device

    def _call(self, batch: Arguments, device: torch.device) -> Any:
        inputs, kwargs = move_leaves(batch.inputs, device), move_leaves(batch.kwargs, device)
        criterion = self.criterion
        with criterion.precision.autocast([device]), copy_criterion(criterion.module, criterion.replicas, [device]) as copies:
            call = functools.partial(call_spread, copies[0], inputs[: self._outputs], inputs[self._outputs :], kwargs)
            (loss,) = criterion.replicas.workers([call], [device], together=False)
        return loss_of(loss)


def _output_leaves(part: Arguments, outputs: int) -> list[Any]:
    """Returns the tensors of the outputs, those with rows in their marks."""
    found = [leaf for _, leaf in nested.leaves(part.inputs[:outputs])]
    return [leaf for leaf in found if isinstance(_tensor(leaf), Tensor)]


def _check_constants(pieces: list[list[Any]]) -> None:
    """Raises ``ValueError`` if outputs without rows differ between replicas or micro-batches."""
    for first, *others in zip(*pieces, strict=True):
        tensor = _tensor(first)
        if not isinstance(first, Along) and not all(torch.equal(tensor, move(_tensor(other), tensor.device)) for other in others):
            raise ValueError(
                f"an output of shape {tuple(tensor.shape)} has no rows and differs between replicas or micro-batches, expected "
                "the same everywhere, as a temperature is: return a value per row, and reduce it in the criterion"
            )


def _tensor(leaf: Any) -> Any:
    return leaf.leaf if isinstance(leaf, Along) else leaf.value if isinstance(leaf, Whole) else leaf


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, (Along, Whole)):
        inner = _detached(_tensor(leaf))
        return Along(inner, leaf.dim) if isinstance(leaf, Along) else Whole(inner)
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
