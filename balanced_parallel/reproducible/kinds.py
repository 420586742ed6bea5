"""Kinds of losses whose sums have the same bits for any order of the parts, on any ranks."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..loss import kinds as loss_kinds
from ..loss import sums as loss_sums
from ..loss.copies import Calls
from ..loss.means import LossOfSums


def exact_kind(kind: loss_kinds.Kind) -> loss_kinds.Kind:
    """Returns the kind whose loss has the same bits for any order of the parts.

    Raises ``ValueError`` for a loss of all rows.
    """
    if isinstance(kind, loss_kinds.KnownMean):
        return ExactKnownMean(kind.settings, kind.reduction, kind.least)
    if type(kind) is loss_kinds.MeansInside:  # OneCount is exact.
        return ExactMeansInside(kind.settings, kind.reduction)
    if kind.couples_rows:
        raise ValueError(
            "reproducible='bits' with a loss of all rows (whole=True or an AdditiveLoss), whose parts are added in floating "
            "point, expected a loss whose rows are independent"
        )
    return kind  # Parts have the same bits already.


class ExactKnownMean(loss_kinds.KnownMean):
    """A mean that torch computes, whose weight is never that of a batch."""

    def of_batch(self, targets: Sequence[tuple[Any, ...]], *, is_whole: bool) -> loss_kinds.Kind:
        """Returns the same kind."""
        return self


class ExactLossOfMeans(LossOfSums):
    """A :class:`LossOfSums` whose sums are the same for any order of the parts, on any ranks."""

    @functools.cached_property
    def _numbers(self) -> dict[Any, list[Tensor]]:
        return {}  # the parts of each sum on this rank

    def collect(self, calls: Calls) -> list[Any]:
        """Adds the statistics of a micro-batch in the first pass, and keeps each."""
        parts = super().collect(calls)
        for part in parts:
            for place, number in part.tensors.items():
                self._numbers.setdefault(place, []).append(number.detach())
        return parts

    def _share(self, derivative: Tensor | None, ranks: Sequence[int]) -> Tensor | None:
        """Returns the derivative on one rank: a quotient of it would be rounded."""
        if derivative is None or self._is_reporter:
            return derivative
        return torch.zeros_like(derivative)

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks, without a graph. Returns the ranks with rows."""
        form = {place: total.to("meta") for place, total in self._total.items()}
        numbers = {place: [each.cpu() for each in parts] for place, parts in self._numbers.items()}
        everywhere = enumerate(self.comparison.gather((self._formula, form, numbers)))
        by_rank = {rank: parts for rank, parts in everywhere if parts[1]}
        self.comparison.check_names([form for _, form, _ in by_rank.values()])
        for formula, form, _ in [*by_rank.values()][-1:]:
            self._formula = self._formula or formula
            for place, like in form.items():
                everyone = itertools.chain(*(parts[2][place] for parts in by_rank.values()))
                total = loss_sums.add_tensors([*everyone])
                self._total[place] = total.to(self.home, like.dtype)
        return [*by_rank]


class ExactMeansInside(loss_kinds.MeansInside):
    """A function of sums over the rows that have no order."""

    loss = ExactLossOfMeans
