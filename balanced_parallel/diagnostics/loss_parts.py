"""The kind of a loss, tried on its parts: a sum, a mean over something, or one whose rows depend on each other."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.dims import Dims
from ..batch.per_replica import PerReplica
from ..batch.rows import count_rows, cut, move_leaves
from ..batch.scattering import proportional_sizes
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion, loss_of

__all__: list[str] = []

_WEIGHT = "give DataParallelCriterion weight=, a function (output, *targets) -> scalar that counts what it divides by"
_WHOLE = "compute it as criterion(gather(outputs), targets)"


def scalar_of(result: Any) -> Tensor:
    """The loss that a criterion returned: a tensor, its ``loss``, or the sum of its terms.

    Raises:
        TypeError: it is none of these.
    """
    result = loss_of(result)
    if isinstance(result, Tensor):
        return result
    terms = [leaf for _, leaf in nested.leaves(result)]
    if not terms or not all(isinstance(term, Tensor) and term.numel() == 1 for term in terms):
        raise TypeError(f"the criterion returned {nested.describe(result)}, expected a scalar or several")
    return torch.stack([term.reshape(()) for term in terms]).sum()


def copy_of(thing: Any) -> Any:
    """A deep copy; of what is no module and cannot be copied, ``thing`` itself."""
    try:
        return copy.deepcopy(thing)
    except TypeError:  # something in it has no copy: a lock, a generator
        if isinstance(thing, nn.Module):
            raise
        return thing


def loss_in_parts(output: Any, criterion: Criterion, wrapped: DataParallelCriterion, targets: Any, dims: Dims) -> Iterator[str]:
    """A reason where the loss in parts is not the loss of the whole.

    Args:
        output, targets: those of the plain program.
        criterion: as the plain program calls it.
        wrapped: what the split program puts its parts together with.
        dims: of the rows in the output.
    """
    tensor, dim = nested.first_tensor(output), dims if isinstance(dims, int) else 0
    if tensor is None or not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) < 2:
        return
    rows = tensor.size(dim)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        try:
            parts = _Parts(criterion, wrapped, output, nested.spread(targets), dim, rows)
            kind = parts.kind()
        except Exception:  # noqa: BLE001 - a criterion may raise whatever it likes of a part, or rows lie elsewhere
            return
    if kind:
        yield kind


class _Parts:
    """The loss of runs of rows."""

    def __init__(
        self, criterion: Criterion, wrapped: DataParallelCriterion, output: Any, targets: tuple[Any, ...], dim: int, rows: int
    ) -> None:
        self.criterion, self.wrapped = criterion, wrapped
        self.output, self.dim, self.rows = output, dim, rows
        marked, self.target_dim = wrapped.mark(targets, {}, dim, len(nested.spread(output)))
        self.targets = marked.inputs
        self.counted = count_rows(self.targets, self.target_dim) if targets else None

    def losses(self, sizes: Sequence[int]) -> list[Tensor]:
        """The loss of each run of ``sizes[i]`` rows, by itself."""
        outputs = cut(self.output, sizes, self.dim)
        pieces = [self.targets] * len(sizes)
        if self.counted is not None:
            pieces = cut(self.targets, proportional_sizes(self.counted, sizes), self.target_dim)
        device = nested.first_tensor(self.output).device  # type: ignore[union-attr]
        pairs = zip(outputs, [move_leaves(piece, device) for piece in pieces], strict=True)
        return [scalar_of(copy_of(self.criterion)(*nested.spread(one), *mine)) for one, mine in pairs]

    def kind(self) -> str | None:
        """Returns the reason for a difference; None where the split program has the loss of the whole."""
        third, rows = max(self.rows // 3, 1), self.rows
        cuts = [[third, rows - third], [rows - third, third], [1, rows - 1]]  # uneven: a mean over rows is none over parts
        (whole,) = self.losses([rows])
        if all(_close(self._put_together(sizes, whole), whole) for sizes in cuts):
            return None
        parts = [self.losses(sizes) for sizes in cuts]
        if all(_close(one + other, whole) for one, other in parts):
            return 'the loss is a sum (its parts add up to the whole): give DataParallelCriterion reduction="sum"'
        if all(_close((pair[0] * sizes[0] + pair[1] * sizes[1]) / rows, whole) for pair, sizes in zip(parts, cuts, strict=True)):
            return 'the loss is a mean over rows: give DataParallelCriterion weight="rows"'
        is_mean = self._is_weighted_mean(whole)
        if is_mean is None:
            return (
                f"the loss: in parts it is not the loss of the whole, so its rows depend on each other ({_WHOLE}), or {_WEIGHT}"
            )
        if is_mean:
            return f"the loss is a mean, but not over rows: {_WEIGHT}"
        return f"the loss: its rows depend on each other, so that its parts do not make up the whole: {_WHOLE}"

    def _put_together(self, sizes: Sequence[int], whole: Tensor) -> Tensor:
        try:
            return scalar_of(copy_of(self.wrapped)(PerReplica(cut(self.output, sizes, self.dim), sizes, self.dim), *self.targets))
        except (ValueError, RuntimeError, TypeError):  # it refuses what the criterion itself takes
            return torch.full_like(whole, torch.nan) if whole.isfinite() else torch.zeros_like(whole)

    def _is_weighted_mean(self, whole: Tensor) -> bool | None:
        """Returns True if the whole is a mean of three parts with weights that pairs of them show; None where they show none."""
        part, rest = self.rows // 4, self.rows - 2 * (self.rows // 4)
        for sizes in ((rest, part, part), (part, rest, part), (part, part, rest)) if part else ():
            answer = self._is_mean_of(sizes, whole)
            if answer is not None:
                return answer
        return None

    def _is_mean_of(self, sizes: Sequence[int], whole: Tensor) -> bool | None:
        one, two, three = map(float, self.losses(sizes))
        first, last = (
            float(self.losses([sizes[0] + sizes[1], sizes[2]])[0]),
            float(self.losses([sizes[0], sizes[1] + sizes[2]])[1]),
        )
        above = one - first, last - three, one - two, two - three
        if not all(abs(difference) > 1e-6 * abs(float(whole)) for difference in above):  # nor where one of them is nan
            return None
        of_one, of_three = (first - two) / above[0], (two - last) / above[1]  # in units of the second's weight
        mean = (of_one * one + two + of_three * three) / (of_one + 1 + of_three)
        return of_one >= 0 and of_three >= 0 and _close(torch.tensor(mean), whole)


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.to(other), other, rtol=1e-4, equal_nan=True)
