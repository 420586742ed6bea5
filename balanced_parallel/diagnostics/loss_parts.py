"""Classification of a loss by its values on parts of a batch: a sum, a mean, or a loss whose rows depend on each other."""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.dims import Dims
from ..batch.per_replica import PerReplica
from ..batch.rows import count_rows, cut, move_leaves
from ..batch.splits import proportional_sizes
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion, loss_of
from ..loss.rules import is_known
from ..loss.weights import flat_weights, read_weights

__all__: list[str] = []

_HALF = (torch.bfloat16, torch.float16)
_WEIGHT = "give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the divisor"
_OTHER_WEIGHT = "weight= is not its divisor: give a function (output, *targets) -> scalar that returns it"
_WHOLE = "give DataParallelCriterion whole=True, which computes criterion(gather(outputs), targets)"
_ROUNDING = 1e-4


def scalar_of(result: Any) -> Tensor:
    """Returns the loss in the result of a criterion: a tensor, the attribute ``loss``, or the sum of several terms.

    Raises:
        TypeError: if the result has another form.
    """
    result = loss_of(result)
    if isinstance(result, Tensor):
        return result
    terms = [leaf for _, leaf in nested.leaves(result)]
    if not terms or not all(isinstance(term, Tensor) and term.numel() == 1 for term in terms):
        raise TypeError(f"the criterion returned {nested.describe(result)}, expected a scalar or several")
    return torch.stack([term.reshape(()) for term in terms]).sum()


def copy_of(criterion: Any) -> Any:
    """Returns a deep copy, or the object itself if it is not a module and cannot be copied."""
    try:
        return copy.deepcopy(criterion)
    except TypeError:  # a lock or a generator inside, for example
        if isinstance(criterion, nn.Module):
            raise
        return criterion


def loss_in_parts(output: Any, criterion: Criterion, wrapped: DataParallelCriterion, targets: Any, dims: Dims) -> Iterator[str]:
    """Yields a reason if the loss computed in parts differs from the loss of the whole batch.

    Args:
        output, targets: output and targets of the plain program.
        criterion: criterion of the plain program.
        wrapped: criterion of the split program.
        dims: dimensions of the rows in the output.
    """
    if is_known(criterion) and wrapped.weight is None:  # a rule gives the divisor
        return
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        try:
            tensors = _single((output, nested.spread(targets)))
            kind = _Parts(_single(criterion), _single(wrapped), tensors[0], tensors[1], dims).kind()
        except Exception:  # noqa: BLE001 - a criterion may raise any error
            return
    if kind:
        yield kind


def weight_in_parts(output: Any, wrapped: DataParallelCriterion, targets: Any, dims: Dims) -> Iterator[str]:
    """Yields a reason if the results of ``weight=`` for two parts of the rows do not add up to that for all rows.

    Arguments are those of :func:`loss_in_parts`. Equal parts hide a wrong divisor: the mean of their means is right.
    """
    count: Any = wrapped.weight
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        try:
            parts = _Parts(count, wrapped, output, nested.spread(targets), dims)
            shards = [shard for sizes in ([parts.rows], [1, parts.rows - 1]) for shard in parts.arguments(sizes)]
            whole, first, others = (sum(flat_weights(read_weights(count(*nested.spread(one), *rows)))) for one, rows in shards)
        except Exception:  # noqa: BLE001 - no function, or one that may raise any error
            return
    if abs(first + others - whole) > _ROUNDING * whole:
        entries = len(nested.spread(output))
        spread = f"; the output is a tuple, whose {entries} entries fill its first {entries} arguments" if entries > 1 else ""
        yield (
            f"weight= does not add up: it returned {whole:g} for {parts.rows} rows, {first:g} for the first of them and "
            f"{others:g} for the others, expected the number of terms that the mean divides by{spread}"
        )


def _single(value: Any) -> Any:
    """Returns a copy whose tensors in half precision are float32, so that the losses of parts show more than rounding."""
    if isinstance(value, nn.Module):
        is_half = any(tensor.dtype in _HALF for tensor in (*value.parameters(), *value.buffers()))
        return copy_of(value).float() if is_half else value
    return nested.map_leaves(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf, value)


class _Parts:
    """Losses of contiguous parts of the rows.

    Raises:
        ValueError: there are not several rows.
    """

    def __init__(
        self, criterion: Criterion, wrapped: DataParallelCriterion, output: Any, targets: tuple[Any, ...], dims: Dims
    ) -> None:
        tensor, dim = nested.first_tensor(output), dims if isinstance(dims, int) else 0
        if tensor is None or not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) < 2:
            raise ValueError("the output does not have several rows")
        self.criterion, self.wrapped = criterion, wrapped
        self.output, self.dim, self.rows, self.device = output, dim, tensor.size(dim), tensor.device
        marked, self.target_dim = wrapped.mark(targets, {}, dim, len(nested.spread(output)))
        self.targets = marked.inputs
        self.counted = count_rows(self.targets, self.target_dim) if targets else None

    def arguments(self, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Returns output and targets of each part of ``sizes[i]`` rows."""
        outputs = cut(self.output, sizes, self.dim)
        targets = [self.targets] * len(sizes)
        if self.counted is not None:
            targets = cut(self.targets, proportional_sizes(self.counted, sizes), self.target_dim)
        return zip(outputs, [move_leaves(target, self.device) for target in targets], strict=True)

    def losses(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the loss of each part of ``sizes[i]`` rows, computed separately."""
        return [scalar_of(copy_of(self.criterion)(*nested.spread(output), *targets)) for output, targets in self.arguments(sizes)]

    def kind(self) -> str | None:
        """Returns the reason for a difference, or None if the split program has the loss of the whole batch."""
        third, rows = max(self.rows // 3, 1), self.rows
        cuts = [[third, rows - third], [rows - third, third], [1, rows - 1]]  # uneven: the mean of the parts differs
        (whole,) = self.losses([rows])
        if all(_close(self._combined(sizes, whole), whole) for sizes in cuts):
            return None
        if isinstance(self.criterion, nn.Module) and is_known(self.criterion):
            return f"the loss: weight= is not its divisor: leave it out, because that of {type(self.criterion).__name__} is known"
        try:
            parts = [self.losses(sizes) for sizes in cuts]
        except Exception as error:  # noqa: BLE001 - a criterion may raise any error for a part
            name = type(error).__name__
            return f"the loss: it raises {name} for a part of the rows, so its rows seem to depend on each other: {_WHOLE}"
        if all(_close(first + second, whole) for first, second in parts):
            return 'the loss is a sum (its parts add up to the whole): give DataParallelCriterion reduction="sum"'
        if all(_close((pair[0] * sizes[0] + pair[1] * sizes[1]) / rows, whole) for pair, sizes in zip(parts, cuts, strict=True)):
            return 'the loss is a mean over rows: give DataParallelCriterion weight="rows"'
        is_mean = self._is_weighted_mean(whole)
        if is_mean is None:
            return (
                "the loss: computed in parts it differs from the loss of the whole batch, so its rows depend on each other "
                f"({_WHOLE}), or {_WEIGHT if self.wrapped.weight is None else _OTHER_WEIGHT}"
            )
        if is_mean and self.wrapped.weight is not None:
            return f"the loss is a mean, and {_OTHER_WEIGHT}"
        if is_mean:
            return f"the loss is a mean, but not over rows: {_WEIGHT}"
        if self._is_sum_plus_mean(whole):
            return (
                f"the loss is a sum plus a mean over rows, so it cannot be computed in parts: {_WHOLE}, or AdditiveLoss("
                "statistics, finish), with both sums and the number of rows as statistics"
            )
        return f"the loss: its rows depend on each other, so it cannot be computed in parts: {_WHOLE}"

    def _combined(self, sizes: Sequence[int], whole: Tensor) -> Tensor:
        """Returns the loss that ``wrapped`` computes from the parts, or a different value if it raises an error."""
        try:
            return scalar_of(copy_of(self.wrapped)(PerReplica(cut(self.output, sizes, self.dim), sizes, self.dim), *self.targets))
        except Exception:  # noqa: BLE001 - a criterion may raise any error for a part
            return torch.full_like(whole, torch.nan) if whole.isfinite() else torch.zeros_like(whole)

    def _is_weighted_mean(self, whole: Tensor) -> bool | None:
        """Returns True if the loss is a mean with one weight per part, None if its values do not determine the weights.

        The losses of three parts and of their two adjacent pairs determine the weights. The weighted mean of the three parts must
        then be the loss of the whole batch.
        """
        part, rest = self.rows // 4, self.rows - 2 * (self.rows // 4)
        for sizes in ((rest, part, part), (part, rest, part), (part, part, rest)) if part else ():
            answer = self._is_mean_of(sizes, whole)
            if answer is not None:
                return answer
        return None

    def _is_sum_plus_mean(self, whole: Tensor) -> bool:
        """Returns True if a sum and a mean of each of four parts give the losses of all ranges of parts.

        There are ten ranges of neighbouring parts, and eight unknown numbers. A least-squares solution without residual shows
        the form.
        """
        part = self.rows // 4
        if not part:
            return False
        sizes = [part, part, part, self.rows - 3 * part]
        factors, losses = torch.zeros(10, 8, dtype=torch.float64), torch.zeros(10, 1, dtype=torch.float64)
        for index, (first, last) in enumerate(itertools.combinations(range(5), 2)):
            rows = torch.tensor(sizes[first:last])
            factors[index, first:last], factors[index, 4 + first : 4 + last] = 1, rows / rows.sum()
            outside = sum(sizes[:first]), sum(sizes[last:])
            around = [size for size in (outside[0], int(rows.sum()), outside[1]) if size]
            losses[index] = self.losses(around)[1 if first else 0].cpu()
        residual = factors @ torch.linalg.lstsq(factors, losses).solution - losses
        return bool(residual.abs().max() <= 1e-4 * whole.abs().cpu())

    def _is_mean_of(self, sizes: Sequence[int], whole: Tensor) -> bool | None:
        loss_1, loss_2, loss_3 = map(float, self.losses(sizes))
        loss_12 = float(self.losses([sizes[0] + sizes[1], sizes[2]])[0])
        loss_23 = float(self.losses([sizes[0], sizes[1] + sizes[2]])[1])
        differences = loss_1 - loss_12, loss_23 - loss_3, loss_1 - loss_2, loss_2 - loss_3
        if not all(abs(difference) > 1e-6 * abs(float(whole)) for difference in differences):  # also if one of them is nan
            return None
        weight_1, weight_3 = (loss_12 - loss_2) / differences[0], (loss_2 - loss_23) / differences[1]  # with weight_2 = 1
        mean = (weight_1 * loss_1 + loss_2 + weight_3 * loss_3) / (weight_1 + 1 + weight_3)
        return weight_1 >= 0 and weight_3 >= 0 and _close(torch.tensor(mean), whole)


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.to(expected), expected, rtol=_ROUNDING, equal_nan=True)
