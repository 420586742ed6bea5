"""``verify``: the plain program beside the split one, on the caller's own model and batch, and where they part."""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.dims import Dims
from ..batch.microbatches import as_arguments
from ..batch.rows import count_rows, move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion
from ..loss.rules import is_known, refuse_coupled
from ..replicas.model import DataParallelModel
from ..runtime.devices import DeviceLike, keep_random_state
from ..runtime.precision import Precision
from ..training.step import TrainStep
from .loss_parts import copy_of, scalar_of
from .mismatch import find_reasons
from .module_recording import Program, first_difference, relative_error

__all__: list[str] = []

_SHOWN = 10  # gradients in the table
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class VerificationReport:
    """How far the split program is from the plain one. Errors are relative; ``print(report)`` shows a table.

    The error of a gradient is its largest absolute difference over the largest entry of the plain gradient (of at least a
    thousandth of the largest of all gradients, so that what is zero but for rounding does not count as far off).
    """

    devices: tuple[str, ...]
    micro_batches: int
    tolerance: float
    plain_loss: float
    split_loss: float
    loss_error: float
    gradient_errors: dict[str, float]
    first_difference: str | None
    reasons: tuple[str, ...]
    step: int = 1  # of two on the same batch, the one that the numbers are of: the first that differs, else the second

    @property
    def equal(self) -> bool:
        """Whether loss and all gradients agree within the tolerance."""
        return max([self.loss_error, *self.gradient_errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        rows = [("loss", self.loss_error), *sorted(self.gradient_errors.items(), key=lambda item: -item[1])]
        shown, more = rows[: _SHOWN + 1], len(rows) - _SHOWN - 1
        width = max(len(name) for name, _ in shown)
        lines = [
            f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}: {len(self.devices)} replicas "
            f"({', '.join(self.devices)}), {self.micro_batches} micro-batch(es)",
            f"loss of the plain program {self.plain_loss:.8g}, of the split one {self.split_loss:.8g}, of step {self.step} "
            "on the same batch",
            f"{'':{width}}  relative error",
            *(f"{name:{width}}  {error:.1e}{'' if error <= self.tolerance else '  <-'}" for name, error in shown),
            *([f"... and {more} more"] if more > 0 else []),
        ]
        if self.first_difference is not None:
            lines.append(f"the first output that differs is that of {self.first_difference}")
        lines += [f"known reason: {reason}" for reason in self.reasons]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    criterion: Criterion,
    inputs: Any,
    targets: Any = (),
    *,
    device_ids: Sequence[DeviceLike] | None = None,
    micro_batch_size: int | None = None,
    weight: Callable[..., Any] | str | None = None,
    dim: int | None = None,
    in_dims: Dims = None,
    tolerance: float | None = None,
) -> VerificationReport:
    """Runs two steps of the plain program and of the split one on the same batch, and compares losses and gradients.

    The second step finds what the first one wrote: state of the model or of the criterion. No step changes a parameter.
    Nothing of the caller's is changed: both programs run on copies. They start from different random states, so that a model
    which draws random numbers in forward cannot look equal by luck. float64 gives the clearest answer (``model.double()``).

    Args:
        model: a module, or the :class:`DataParallelModel` around it, whose devices and dimensions are then used.
        criterion: a module or a function, or the :class:`DataParallelCriterion` around it. Several terms are added up.
        inputs, targets: as :class:`TrainStep` takes them; no targets, as for a model that computes its own loss, are ``()``.
        device_ids: as in :class:`DataParallelModel`.
        micro_batch_size: rows per device in one forward; ``None`` runs the whole batch at once.
        weight: as in :class:`DataParallelCriterion`.
        dim: the dimension of the rows in inputs, outputs and targets; ``None`` is that of the wrappers, else 0.
        in_dims: as in :class:`DataParallelModel`.
        tolerance: relative; ``None`` is 1e-10 for float64, 1e-4 for float32, 2e-2 for float16 and 5e-2 for bfloat16.

    Returns:
        The errors of loss and gradients and, where they are too large, the first module whose output differs and the known
        reasons that apply.
    """
    module = model.module if isinstance(model, DataParallelModel) else model
    inner: Criterion = criterion.module if isinstance(criterion, DataParallelCriterion) else criterion
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    limit = _TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
    with keep_random_state(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="it is not known what .* divides its mean by")
        plain, split = Program(module, inner), Program(module, inner)
        wrapped = _wrap_model(split.module, model, device_ids, dim, in_dims)
        if dim is None and not isinstance(criterion, DataParallelCriterion):
            dim = wrapped.dim
        losses = _wrap_criterion(split.criterion, criterion, weight, dim)
        step = TrainStep(wrapped, losses, _Still(split.parameters().values()), micro_batch_size=micro_batch_size)
        number, equal = 0, True
        while equal and number < 2:
            number += 1
            loss, split_loss = _run_plain(plain, inputs, targets, wrapped.devices[0]), _run_split(split, step, inputs, targets)
            errors = {"": relative_error(split_loss, loss)} | _gradient_errors(plain.gradients(), split.gradients())
            worst = max(errors.values())
            equal = worst <= limit
        reasons: tuple[str, ...] = ()
        if not equal:
            fresh = _wrap_criterion(copy_of(inner), criterion, weight, dim)
            cuts = len(wrapped.devices), split.rounds
            criteria = inner, plain.criterion
            reasons = find_reasons(plain.module, plain.output, module, criteria, fresh, targets, wrapped.out_dims, *cuts)
    if not equal and dtype == torch.float64 and worst < 1e-5:
        reasons += ("rounding: the errors are those of float32, to which a part of the model or of the loss seems to cast",)
    return VerificationReport(
        devices=tuple(map(str, wrapped.devices)),
        micro_batches=split.rounds,
        tolerance=limit,
        plain_loss=float(loss),
        split_loss=float(split_loss),
        loss_error=errors.pop(""),
        gradient_errors=errors,
        first_difference=None if equal else first_difference(plain, split, wrapped.dim, limit),
        reasons=reasons,
        step=number,
    )


class _Still(torch.optim.Optimizer):
    """It updates nothing, not even where a gradient is nan."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _wrap_model(
    module: nn.Module, like: nn.Module, device_ids: Sequence[DeviceLike] | None, dim: int | None, in_dims: Dims
) -> DataParallelModel:
    """``module`` as ``like`` is wrapped, if it is, with what the caller names put in its place."""
    split = None
    settings: dict[str, Any] = {}
    if isinstance(like, DataParallelModel):
        split = like.split if device_ids is None else None
        device_ids, dim = device_ids or like.devices, like.dim if dim is None else dim
        settings = {"in_dims": like.in_dims, "out_dims": like.out_dims}
    settings |= {} if in_dims is None else {"in_dims": in_dims}
    return DataParallelModel(module, device_ids, dim=dim or 0, split=split, **settings)


def _wrap_criterion(
    module: Criterion, like: Criterion, weight: Callable[..., Any] | str | None, dim: int | None
) -> DataParallelCriterion:
    """``module`` as ``like`` is wrapped, if it is: with all of its settings but those of devices and precision."""
    if isinstance(like, DataParallelCriterion):
        wrapped = copy.deepcopy(like)
        wrapped.module, wrapped.devices, wrapped.output_device, wrapped.precision = module, None, None, Precision("fp32")
        wrapped.dim = wrapped.dim if dim is None else dim
        wrapped.weight = weight or wrapped.weight
    else:
        wrapped = DataParallelCriterion(module, dim=dim, weight=weight)
    try:
        if wrapped.weight is None and not is_known(module):
            refuse_coupled(module)
    except TypeError:  # refused elsewhere; here its error is to be shown
        wrapped.weight = lambda output, *targets: count_rows(targets, wrapped.dim or 0) or 1
    return wrapped


def _run_plain(program: Program, inputs: Any, targets: Any, device: torch.device) -> Tensor:
    program.begin()
    torch.manual_seed(0)
    arguments, following = move_leaves((as_arguments(inputs), nested.spread(targets)), device)
    program.output = program.module.to(device)(*arguments.inputs, **arguments.kwargs)
    criterion = program.criterion.to(device) if isinstance(program.criterion, nn.Module) else program.criterion
    loss = scalar_of(criterion(*nested.spread(program.output), *following))
    loss.backward()
    return loss.detach()


def _run_split(program: Program, step: TrainStep, inputs: Any, targets: Any) -> Tensor:
    program.begin()
    torch.manual_seed(1)
    return step(inputs, targets)


def _gradient_errors(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
    return {name: relative_error(found[name], gradient, largest / 1000) for name, gradient in expected.items()}
