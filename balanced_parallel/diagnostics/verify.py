"""``verify``: comparison of the split program with the plain program, on the user's own model and
batch.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.containers import Dims
from ..batch.rows import as_arguments, spread
from ..loss.copies import Criterion
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import MeansInside
from ..loss.means import UnknownMeanError
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import check_is_module
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices, without_tf32
from ..runtime.values import check_number
from ..training.step import TrainStep
from .reasons import errors_of_state, find_reasons, without_errors
from .recording import (
    TOLERANCES,
    Comparison,
    Program,
    copy_of,
    first_difference,
    relative_error,
    weight_in_parts,
)

_MAX_GRADIENTS = 10  # gradients in the table


@dataclass(frozen=True)
class VerificationReport:
    """Relative errors of the split program. ``print(report)`` prints a table.

    The error of a gradient is its largest difference over the largest entry of the plain gradient,
    or over a part of the largest entry of all gradients, if that is more: a thousandth in float64,
    a tenth in other dtypes. A gradient that is zero but for rounding, as of a bias in front of a
    batch norm, would differ otherwise.

    Attributes:
        devices, micro_batches: one device per replica, and the number of forwards of each.
        tolerance: largest relative error that counts as equal.
        plain_loss, split_loss, loss_error: losses of both programs, and their relative error.
        gradient_errors: relative error of each gradient, by the name of the parameter.
        first_difference: first module whose output differs, with its error; None if there is none.
        reasons: known reasons for a difference that apply.
        step: number of the step that the errors belong to: the first of two that differs, else the
            second.
        state_errors: relative error of each buffer, and of each parameter that a forward has
            written, that differs after the steps, except those of batch norms.
        warnings: what equal results do not show: a batch that was not split, a ``weight=`` that
            does not add up.
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
    step: int = 1
    state_errors: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the errors of the loss and of all gradients are within the tolerance, and no
        buffer or parameter differs.
        """
        return (
            not self.state_errors
            and max([self.loss_error, *self.gradient_errors.values()]) <= self.tolerance
        )

    def __str__(self) -> str:
        gradients = sorted(self.gradient_errors.items(), key=lambda item: -item[1])
        state = [(f"state {name}", error) for name, error in self.state_errors.items()]
        table = [("loss", self.loss_error), *gradients[:_MAX_GRADIENTS], *state]
        width = max(len(name) for name, _ in table)
        lines = [
            f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}: replicas on {', '.join(self.devices)}; "
            f"micro-batches: {self.micro_batches}",
            f"loss in step {self.step} on the same batch: {self.plain_loss:.8g} (plain), {self.split_loss:.8g} (split)",
            f"{'':{width}}  relative error",
            *(
                f"{name:{width}}  {error:.1e}{'  <-' * (error > self.tolerance)}"
                for name, error in table
            ),
        ]
        if len(gradients) > _MAX_GRADIENTS:
            lines.append(f"... and {len(gradients) - _MAX_GRADIENTS} more")
        if self.first_difference is not None:
            lines.append(f"first output that differs: {self.first_difference}")
        lines += [f"known reason: {reason}" for reason in self.reasons]
        if not self.equal and not self.reasons:
            lines.append("no known reason: compare in float64, then see docs/troubleshooting.md")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


_WHOLE = "nothing was split: one forward had all rows, expected several rows and devices, or micro_batch_size="
WeightSetting = Callable[..., Any] | str | None


def verify(
    model: nn.Module,
    criterion: Criterion,
    inputs: Any,
    targets: Any = (),
    *,
    device_ids: Sequence[DeviceLike] | None = None,
    micro_batch_size: int | None = None,
    weight: WeightSetting = None,
    dim: int | None = None,
    in_dims: Dims = None,
    tolerance: float | None = None,
    reproducible: bool = False,
) -> VerificationReport:
    """Runs the plain and the split program on the same batch, and compares losses and gradients.

    Each program runs two steps on copies, without updates of parameters. The second step shows
    state that the first has written. The programs start with different random states, so a model
    that draws random numbers is not equal by chance: compare it in eval mode, or with
    ``reproducible=True``. TF32 is off. Use float64 (``model.double()``) for the clearest result.

    Args:
        model: a module, or a :class:`DataParallelModel`, whose devices and dimensions are then
            used.
        criterion: a module, a function, or a :class:`DataParallelCriterion`. Several terms are
            added up.
        inputs, targets: a batch, as for :class:`TrainStep`. Targets are ``()`` for a model that
            computes its own loss.
        device_ids, in_dims, weight: as in :class:`DataParallelModel` and
            :class:`DataParallelCriterion`. Without ``device_ids``, a single device has three
            replicas.
        micro_batch_size: number of rows per device in one forward. ``None`` means the whole batch
            in one forward.
        dim: dimension of the rows in inputs, outputs and targets. ``None`` means that of the given
            wrappers, else 0.
        tolerance: relative tolerance. ``None`` means 1e-10 for float64, 1e-4 for float32, 2e-2 for
            float16 and 5e-2 for bfloat16.
        reproducible: draws random numbers as ``TrainStep(reproducible=True)``, in the plain program
            those of one device.

    Returns:
        A :class:`VerificationReport` with the errors of loss and gradients, and of state that ends
        with other values. If they exceed the tolerance, it has the first module whose output
        differs, and the known reasons that apply.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
        >>> inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
        >>> report = verify(net, torch.nn.CrossEntropyLoss(), inputs, targets, device_ids=["cpu"] * 3)
        >>> report.equal, report.devices
        (True, ('cpu', 'cpu', 'cpu'))
        >>> sorted(report.gradient_errors)
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    check_is_module(model, "model")
    if tolerance is not None:
        check_number("tolerance", tolerance, "a number that is not negative, or None", at_least=0)
    module = model.module if isinstance(model, DataParallelModel) else model
    inner: Criterion = (
        criterion.module if isinstance(criterion, DataParallelCriterion) else criterion
    )
    with keep_random_state(), without_tf32(), warnings.catch_warnings():
        plain = Program(module, inner)
        split = Program(module, inner)
        limit = TOLERANCES.get(plain.dtype, 1e-4) if tolerance is None else tolerance
        wrapped = _wrap_model(split.module, model, device_ids, dim, in_dims)
        wrap = partial(_wrap_criterion, like=criterion, dim=dim, model_dim=wrapped.dim)
        make_step = partial(TrainStep, reproducible=reproducible)
        batch = as_arguments(inputs), spread(targets)
        run_plain = partial(plain.run, *batch, wrapped.devices[0])
        if reproducible:
            alone = _wrap_model(plain.module, model, wrapped.devices[:1], dim, in_dims)
            plain_step = make_step(alone, wrap(plain.criterion, weight=weight), plain.optimizer)
            run_plain = partial(_run_step, plain, plain_step, inputs, targets)
        settings = {"optimizer": split.optimizer, "micro_batch_size": micro_batch_size}
        make_split = partial(make_step, wrapped, **settings)
        step = make_split(wrap(split.criterion, weight=weight))
        errors = {"": 0.0}
        refusal = ""
        number = 0
        while number < 2 and max(errors.values()) <= limit:
            number += 1
            loss = run_plain()
            try:
                split_loss = _run_step(split, step, inputs, targets)
            except (UnknownMeanError, TypeError) as error:  # The report has it, or a reason.
                if not isinstance(step.criterion.kind, MeansInside):
                    raise
                refusal = str(error)
                weight = "rows"
                step = make_split(wrap(split.criterion, weight=weight))
                split_loss = _run_step(split, step, inputs, targets)
            errors = {"": relative_error(split_loss, loss), **_errors_of_gradients(plain, split)}
        losses = wrap(copy_of(inner), weight=weight)
        comparison = Comparison(module, plain, split, wrapped, losses, *batch, limit)
        state = errors_of_state(plain, split, limit)
        reasons = find_reasons(comparison, errors, state, reproducible=reproducible)
        difference = None
        hidden = list[str]()
        if max(errors.values()) > limit:
            difference = first_difference(plain.calls[0], split.calls, wrapped.dim, limit)
        else:
            hidden = [refusal, *without_errors(weight_in_parts(comparison))]
            if len(split.calls) == 1:
                hidden.append(_WHOLE)
    return VerificationReport(
        devices=tuple(map(str, wrapped.devices)),
        micro_batches=split.rounds,
        tolerance=limit,
        plain_loss=float(loss),
        split_loss=float(split_loss),
        loss_error=errors.pop(""),
        gradient_errors=errors,
        first_difference=None if difference is None else str(difference),
        reasons=tuple(reasons),
        step=number,
        state_errors=state,
        warnings=tuple(filter(None, hidden)),
    )


def _errors_of_gradients(plain: Program, split: Program) -> dict[str, float]:
    expected = plain.gradients()
    gradients = split.gradients()
    sizes = (float(gradient.abs().max()) for gradient in expected.values() if gradient.numel())
    largest = max(sizes, default=0.0)
    floor = largest * (1e-3 if plain.dtype == torch.float64 else 0.1)
    return {name: relative_error(gradients[name], expected[name], floor) for name in expected}


def _run_step(program: Program, step: TrainStep, inputs: object, targets: object) -> Tensor:
    program.begin(1)
    return step(inputs, targets)


def _wrap_model(
    module: nn.Module,
    like: nn.Module,
    device_ids: Sequence[DeviceLike] | None,
    dim: int | None,
    in_dims: Dims,
) -> DataParallelModel:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped.

    Settings of the caller take precedence.
    """
    settings: dict[str, Any] = {"dim": 0}
    devices: Sequence[DeviceLike] = device_ids or resolve_devices(None)
    if isinstance(like, DataParallelModel):
        settings = {"dim": like.dim, "in_dims": like.in_dims, "out_dims": like.out_dims}
        if not device_ids:
            devices, settings["split"] = like.devices, like.split
    if device_ids is None and len(devices) == 1:
        devices, settings["split"] = [*devices] * 3, None  # one replica is the plain program
    return DataParallelModel(module, devices, **_replaced(settings, dim=dim, in_dims=in_dims))


def _wrap_criterion(
    module: Criterion,
    like: Criterion,
    dim: int | None,
    model_dim: int,
    weight: WeightSetting,
) -> DataParallelCriterion:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped, except devices and
    precision.
    """
    settings: dict[str, Any] = {"dim": model_dim}
    if isinstance(like, DataParallelCriterion):
        settings = {**like.arguments, "device_ids": None, "output_device": None, "precision": None}
    return DataParallelCriterion(module, **_replaced(settings, dim=dim, weight=weight))


def _replaced(settings: dict[str, Any], **others: object) -> dict[str, Any]:
    """Returns settings with others in their place, but None."""
    return settings | {name: value for name, value in others.items() if value is not None}
