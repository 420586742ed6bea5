"""Losses whose rows depend on each other, computed from parts of the batch: replicas, micro-batches
and ranks::

    first pass     forward 0 | forward 1 | ...     without a graph; collects the parts of the loss
    differentiate  loss of all parts, and its derivative at each of them, once per process
    second pass    forward 0 | backward 0 | forward 1 | backward 1 | ...     from these derivatives

This is GradCache (arXiv:2101.06983). The parts are outputs, which are gathered (:class:`WholeLoss`:
contrastive losses, mined triplets), or statistics, which are summed (``LossOfSums``, of an
``AdditiveLoss``: Dice, Pearson's correlation).
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..batch import containers
from ..batch.marks import Along, Arguments, map_marked, mark, mark_leaves, without_mark
from ..batch.outputs import repeated_rows
from ..batch.rows import ParallelModel, move_arguments, spread
from ..runtime.collectives import gather_objects, gather_rows, rank, world_size
from ..runtime.devices import move
from ..runtime.torch_private import is_differentiable
from ..runtime.values import scaled
from .copies import Calls, CriterionCopies, ShardLoss
from .entries import LoggedMeans, add_leaves, log_mean, places_to_log
from .samples import is_list, join_rows
from .sums import LossSum, hand_back, weighted_sum, widen


class CoupledLoss(abc.ABC):
    """The loss of one update, whose rows depend on each other.

    ``home`` is a device for a process without rows. ``is_split`` tells that several devices, ranks
    or micro-batches have the rows.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        self.copies = copies
        self.home = home
        self.is_split = is_split
        self.is_shared = False  # Ranks have exchanged their parts.
        self._loss = torch.zeros(())  # The loss of all ranks. A part hands it back once.
        self._is_reporter = False
        self._logged: LoggedMeans = {}  # The values beside it, likewise.
        # Each has the derivative of the loss.
        self._of_parameters: list[tuple[Tensor, Tensor | None]] = []

    def of_model(self, model: ParallelModel | None) -> Self:
        """Tells the model, which may compute the loss. Without it, its rows are not compared."""
        return self

    @abc.abstractmethod
    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch, with the graph of its outputs."""

    @abc.abstractmethod
    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all parts on all ranks, and its derivative at each, from a scaled
        loss. Every rank calls this.
        """

    @abc.abstractmethod
    def collect(self, calls: Calls) -> list[Any]:
        """Collects the parts of a micro-batch in the first pass. Returns them with their graph."""

    @abc.abstractmethod
    def _parts(self, calls: Calls) -> list[Any]:
        """Returns the part of each replica."""

    @abc.abstractmethod
    def _take(self, part: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the tensors of a replica's part with the derivatives of the loss.

        Parts come in the order of the first pass.
        """

    def hand_back(self, calls: Calls) -> list[LossSum]:
        """Returns a loss per replica of a micro-batch in the second pass.

        Their sum over everything is the loss.
        """
        return self.hand_back_parts(self._parts(calls))

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns the result of :meth:`hand_back` for parts with a graph."""
        losses = []
        for part in parts:
            pairs = [*self._take(part), *self._of_parameters]
            value = move(self._loss, pairs[0][0].device) if pairs else self._loss
            total = hand_back(value, [slope for _, slope in pairs], [tensor for tensor, _ in pairs])
            losses.append(LossSum(total, None, logged=self._logged))
            self._loss = torch.zeros_like(self._loss)
            self._logged = {}
            self._of_parameters = []
        return losses

    def _derivatives(
        self,
        compute: Callable[[], object],
        at: Sequence[Tensor],
        ranks: Sequence[int],
        scaler: torch.amp.GradScaler | None,
    ) -> list[Tensor | None]:
        """Computes the losses, and keeps their sum and its derivatives at the criterion's parameters.

        Returns those at other tensors.

        The ranks of ``ranks`` compute the same loss. The first reports it, and each adds its share
        to gradients of parameters.
        """
        parameters = [parameter for parameter in self._trained() if parameter.requires_grad]
        learning = [
            *(tensor.requires_grad_() for tensor in at if is_differentiable(tensor)),
            *parameters,
        ]
        with torch.enable_grad():
            result = compute()
            loss = add_leaves(result)
            whole = scaled(loss, scaler)
        gradients: Sequence[Tensor | None] = [None] * len(learning)
        if whole.requires_grad:  # A constant has none.
            gradients = torch.autograd.grad(whole, learning, allow_unused=True)
        if scaler is not None:
            scale = scaled(torch.ones((), device=loss.device), scaler)
            gradients = [
                slope if slope is None else widen(slope) / move(scale, slope.device)
                for slope in gradients
            ]
        self._is_reporter = ranks[0] == rank()
        self._loss = loss.detach() if self._is_reporter else torch.zeros_like(loss)
        self._logged = self._values_to_log(result)
        slopes = iter(gradients)
        derivatives = [next(slopes) if is_differentiable(tensor) else None for tensor in at]
        self._of_parameters = [
            (parameter, self._share(next(slopes), ranks)) for parameter in parameters
        ]
        return derivatives

    def _trained(self) -> list[Tensor]:
        """Returns the parameters of the loss."""
        return [*self.copies.parameters]

    @abc.abstractmethod
    def _values_to_log(self, result: Any) -> LoggedMeans:
        """Returns the values beside the loss that each rank has."""

    def _share(self, derivative: Tensor | None, ranks: Sequence[int]) -> Tensor | None:
        """Returns this rank's share of a derivative that all of ``ranks`` have."""
        return None if derivative is None or rank() not in ranks else derivative / len(ranks)


class WholeLoss(CoupledLoss):
    """The loss of all outputs of an update.

    The first of outputs without rows is used, which must be the same in all parts.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        # detached outputs and targets of all replicas and micro-batches, marked
        self.pieces: list[Arguments] = []
        # An error for outputs of several pieces that cannot be joined.
        self._refusal: str | None = None
        self._outputs = 1  # number of leading arguments that the outputs fill
        self._pending: list[list[Tensor | None]] = []  # derivatives of each piece

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. The outputs of all ranks are gathered on every rank."""
        self.pieces = self._parts(calls)
        rows = self._gather()
        share = world_size() * (rank() in rows.ranks) / max(len(rows.ranks), 1)
        loss = self._call(rows, share)
        return containers.map_leaves(
            lambda leaf: leaf if leaf is None else weighted_sum(leaf, 1), loss
        )

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all outputs, and its derivative at each of them."""
        pieces = self.pieces
        rows = self._gather()
        self.is_shared = True
        if not pieces:
            return
        leaves = _output_leaves(rows.batch, self._outputs)
        tensors = [without_mark(leaf) for leaf in leaves]
        derivatives = self._derivatives(lambda: self._call(rows), tensors, rows.ranks, scaler)
        columns = zip(*[_output_leaves(piece, self._outputs) for piece in pieces], strict=True)
        starts = iter(rows.starts)
        self._pending = [[] for _ in pieces]
        for leaf, derivative, column in zip(leaves, derivatives, columns, strict=True):
            start = next(starts, 0) if isinstance(leaf, Along) else 0
            for pending, piece in zip(self._pending, map(without_mark, column), strict=True):
                slope = (
                    None if pending is not self._pending[0] else self._share(derivative, rows.ranks)
                )
                if derivative is not None and isinstance(leaf, Along):
                    size = piece.size(leaf.dim)
                    # the whole can be freed
                    slope = derivative.narrow(leaf.dim, start, size).to(piece.device, copy=True)
                    start += size
                pending.append(slope)

    def _values_to_log(self, result: Any) -> LoggedMeans:
        values = dict(containers.leaves(result))
        places = [place for place in places_to_log(result) if values[place] is not None]
        return {place: log_mean(LossSum(weighted_sum(values[place], 1), 1.0)) for place in places}

    def _parts(self, calls: Calls) -> list[Any]:
        outputs = calls.outputs
        self._refusal = self._refusal or repeated_rows(outputs, outputs.sizes, outputs.dim)
        parts = []
        for output, shard in zip(outputs, calls.shards, strict=True):
            marked = spread(mark_leaves(output, outputs.dim, "the output"))
            targets, kwargs = mark(shard.targets, self.copies.dim)
            parts.append(Arguments((*marked, *targets), kwargs))
            self._outputs = len(marked)
        return parts

    def collect(self, calls: Calls) -> list[Any]:
        """Keeps outputs and targets of a micro-batch in the first pass."""
        parts = self._parts(calls)
        self.pieces += map_marked(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, parts
        )
        return parts

    def _take(self, part: Arguments) -> list[tuple[Tensor, Tensor | None]]:
        leaves = _output_leaves(part, self._outputs)
        derivatives = self._pending.pop(0)
        return [
            (without_mark(leaf), derivative)
            for leaf, derivative in zip(leaves, derivatives, strict=True)
        ]

    def _gather(self) -> "RankRows":
        """Returns all pieces of all ranks as one. The pieces are forgotten."""
        pieces = self.pieces
        self.pieces = []
        outputs = [_output_leaves(piece, self._outputs) for piece in pieces]
        is_due = (
            len(pieces) > 1 and self.copies.checks is not None and self.copies.checks.are_due(None)
        )
        for leaves in zip(*outputs, strict=True) if is_due else ():
            _check_constant(*leaves)
        device = self.copies.output_device or (
            without_mark(outputs[0][0]).device if outputs else self.home
        )
        join = functools.partial(join_rows, device=device)
        whole = containers.zip_leaves(join, pieces, "the batch") if pieces else None
        return RankRows(
            whole, device, self._refusal if len(pieces) > 1 or world_size() > 1 else None
        )

    def _call(self, rows: "RankRows", share: float = 1.0) -> Any:
        batch = rows.batch
        if share != 1:
            batch = containers.map_leaves(lambda leaf: _scale_gradient(leaf, share), batch)
        inputs, kwargs = move_arguments(batch, rows.device)
        arguments = (
            1,
            inputs[: self._outputs],
            inputs[self._outputs :],
            kwargs,
            self.copies.collectives,
        )
        return self.copies.run_once(
            lambda criterion: ShardLoss(criterion, *arguments).call(), rows.device
        )


def _scale_gradient(leaf: object, factor: float) -> Any:
    """Multiplies the gradient of a leaf without rows, such as a temperature, and returns it.

    Strategies average gradients over all ranks, and a rank without rows has none of it.
    """
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    same = leaf.view_as(leaf)
    same.register_hook(lambda gradient: gradient * factor)
    return same


def _output_leaves(part: Arguments, outputs: int) -> list[Any]:
    """Returns the tensors of the outputs, those with rows in their marks."""
    leaves = [leaf for _, leaf in containers.leaves(part.inputs[:outputs])]
    return [leaf for leaf in leaves if isinstance(without_mark(leaf), Tensor)]


def _check_constant(first: Any, *others: object) -> None:
    """Raises ``ValueError`` if an output without rows differs between replicas or micro-batches."""
    tensor = without_mark(first)
    equal = (torch.equal(tensor, move(without_mark(each), tensor.device)) for each in others)
    if not isinstance(first, Along) and not all(equal):
        raise ValueError(
            f"an output of shape {tuple(tensor.shape)} has no rows and differs between replicas or micro-batches, expected "
            "the same everywhere, as a temperature is: return a value per row, and reduce it in the criterion"
        )


class RankRows:
    """The rows of all ranks, in their order: ``batch``, which is differentiable, or None on a rank
    without one.

    All ranks make one, of their joined pieces or None. All of them raise ``ValueError`` if one has
    a refusal. ``starts`` are the places of this rank's rows in each tensor with rows, if there are
    other ranks, and ``ranks`` those with rows.
    """

    def __init__(self, batch: Any, device: torch.device, refusal: str | None) -> None:
        layout = None if batch is None else containers.map_leaves(_layout, batch)
        layouts, refusals = zip(*gather_objects((layout, refusal)), strict=True)
        for message in filter(None, refusals):
            raise ValueError(message)
        by_rank = {number: each for number, each in enumerate(layouts) if each is not None}
        self.batch = batch
        self.device = device
        self.ranks = [*by_rank]
        self._sizes: list[list[int]] = []  # Each tensor has the rows of all ranks.
        if world_size() > 1 and by_rank:
            self._leaves = iter(
                () if batch is None else [leaf for _, leaf in containers.leaves(batch)]
            )
            whole = containers.zip_leaves(self._gather_leaf, [*by_rank.values()], "the batch")
            self.batch = None if batch is None else whole
            self.ranks = [
                number for number in by_rank if any(sizes[number] for sizes in self._sizes)
            ] or self.ranks
        self.starts = [sum(sizes[: rank()]) for sizes in self._sizes]

    def _gather_leaf(self, place: str, layouts: list[Any]) -> Any:
        """Returns the rows of all ranks in the place of one leaf, which this rank may not have."""
        leaf = next(self._leaves, None)
        joined = join_rows(place, layouts, torch.device("meta"))
        if not isinstance(joined, Along):
            return leaf if joined is None else joined
        sizes = [0] * world_size()
        for number, each in zip(self.ranks, layouts, strict=True):
            sizes[number] = each.leaf.size(joined.dim)
        self._sizes.append(sizes)
        learning = (each.leaf.requires_grad for each in layouts if each.leaf.size(joined.dim))
        tensor = torch.empty_like(layouts[0].leaf, device=self.device).narrow(joined.dim, 0, 0)
        if leaf is not None:
            # All ranks run the backward of the tensor, or none.
            learns = any(learning)
            is_equal = leaf.leaf.requires_grad == learns
            tensor = leaf.leaf if is_equal else leaf.leaf.detach().requires_grad_(learns)
        return Along(gather_rows(tensor.to(joined.leaf.dtype), sizes, joined.dim), joined.dim)


def _layout(leaf: object) -> Any:
    """Returns a tensor with rows without its values, a list of rows as it is, and None for others."""
    if isinstance(leaf, Along):
        layout = leaf.leaf.detach().to("meta").requires_grad_(leaf.leaf.requires_grad)
        return Along(layout, leaf.dim)
    return leaf if is_list(leaf) else None
