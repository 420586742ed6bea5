"""``verify``: comparison of the split program with the plain program, on the user's own model and batch."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.containers import Dims
from ..batch.rows import count_rows
from ..loss.copies import Criterion
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import MeansInside
from ..loss.means import UnknownMeanError
from ..loss.rules import refuse_coupled
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import check_is_module
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices, without_tf32
from ..runtime.values import check_number
from ..training.step import TrainStep
from .reasons import compare_state, find_reasons, state_of_criterion, state_of_model, unregistered_tensors, without_errors
from .recording import Program, copy_of, first_difference, relative_error, weight_in_parts

_MAX_GRADIENTS = 10  # gradients in the table


@dataclass(frozen=True)
class VerificationReport:
    """Relative errors of the split program. ``print(report)`` prints a table.

    The error of a gradient is its largest difference over the largest entry of the plain gradient, or over a part of the largest
    entry of all gradients, if that is more: a thousandth in float64, a tenth in other dtypes. A gradient that is zero but for
    rounding, as of a bias in front of a batch norm, would differ otherwise.

    Attributes:
        devices, micro_batches: one device per replica, and the number of forwards of each.
        tolerance: largest relative error that counts as equal.
        plain_loss, split_loss, loss_error: losses of both programs, and their relative error.
        gradient_errors: relative error of each gradient, by the name of the parameter.
        first_difference: first module whose output differs, with its error; None if there is none.
        reasons: known reasons for a difference that apply.
        step: number of the step that the errors belong to: the first of two that differs, else the second.
        state_errors: relative error of each buffer, and of each parameter that a forward has written, that differs after the
            steps, except those of batch norms.
        warnings: attributes that differ after the steps although the results are equal, and tensors that are not compared.
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
        """True if the errors of the loss and of all gradients are within the tolerance, and no buffer or parameter differs."""
        return not self.state_errors and max([self.loss_error, *self.gradient_errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        rows = [("loss", self.loss_error), *sorted(self.gradient_errors.items(), key=lambda item: -item[1])]
        shown, more = rows[: _MAX_GRADIENTS + 1], len(rows) - _MAX_GRADIENTS - 1
        state = [(f"state {name}", error) for name, error in self.state_errors.items()]
        width = max(len(name) for name, _ in (*shown, *state))
        lines = [
            f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}: replicas on {', '.join(self.devices)}; "
            f"micro-batches: {self.micro_batches}",
            f"loss in step {self.step} on the same batch: {self.plain_loss:.8g} (plain), {self.split_loss:.8g} (split)",
            f"{'':{width}}  relative error",
            *(f"{name:{width}}  {error:.1e}{'' if error <= self.tolerance else '  <-'}" for name, error in shown),
            *([f"... and {more} more"] if more > 0 else []),
            *(f"{name:{width}}  {error:.1e}  <-" for name, error in state),
        ]
        if self.first_difference is not None:
            lines.append(f"first output that differs: {self.first_difference}")
        lines += [f"known reason: {reason}" for reason in self.reasons]
        if not self.equal and not self.reasons:
            lines.append("no known reason: compare in float64, then see docs/troubleshooting.md")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_FLOAT32_ROUNDING = 1e-5


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
    reproducible: bool = False,
) -> VerificationReport:
    """Runs the plain and the split program on the same batch, and compares losses and gradients.

    Each program runs two steps on copies, without updates of parameters. The second step shows state that the first has written.
    The programs start with different random states, so a model that draws random numbers is not equal by chance: compare it in
    eval mode, or with ``reproducible=True``. TF32 is off. Use float64 (``model.double()``) for the clearest result.

    Args:
        model: a module, or a :class:`DataParallelModel`, whose devices and dimensions are then used.
        criterion: a module, a function, or a :class:`DataParallelCriterion`. Several terms are added up.
        inputs, targets: a batch, as for :class:`TrainStep`. Targets are ``()`` for a model that computes its own loss.
        device_ids, in_dims, weight: as in :class:`DataParallelModel` and :class:`DataParallelCriterion`. Without ``device_ids``,
            a single device has three replicas.
        micro_batch_size: number of rows per device in one forward. ``None`` means the whole batch in one forward.
        dim: dimension of the rows in inputs, outputs and targets. ``None`` means that of the given wrappers, else 0.
        tolerance: relative tolerance. ``None`` means 1e-10 for float64, 1e-4 for float32, 2e-2 for float16 and 5e-2 for bfloat16.
        reproducible: draws random numbers as ``TrainStep(reproducible=True)``, in the plain program those of one device.

    Returns:
        A :class:`VerificationReport` with the errors of loss and gradients, and of state that ends with other values. If they
        exceed the tolerance, it has the first module whose output differs, and the known reasons that apply.

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
    inner: Criterion = criterion.module if isinstance(criterion, DataParallelCriterion) else criterion
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    limit = _TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
    with keep_random_state(), without_tf32(), warnings.catch_warnings():
        plain, split = Program(module, inner), Program(module, inner)
        wrapped = _wrap_model(split.module, model, device_ids, dim, in_dims)
        if dim is None and not isinstance(criterion, DataParallelCriterion):
            dim = wrapped.dim
        losses = _wrap_criterion(split.criterion, criterion, weight, dim)
        make_step = functools.partial(TrainStep, reproducible=reproducible)
        step = make_step(wrapped, losses, _NoUpdate(split.learning().values()), micro_batch_size=micro_batch_size)
        if reproducible:
            alone = _wrap_model(plain.module, model, wrapped.devices[:1], dim, in_dims)
            of_all = _wrap_criterion(plain.criterion, criterion, weight, dim)
            plain_step = make_step(alone, of_all, _NoUpdate(plain.learning().values()))
        number, equal, refusal = 0, True, ""
        while equal and number < 2:
            number += 1
            if reproducible:
                loss = _run_step(plain, plain_step, inputs, targets)
            else:
                plain.forward(inputs, wrapped.devices[0], seed=0)
                loss = plain.backward(targets, wrapped.devices[0])
            try:
                split_loss = _run_step(split, step, inputs, targets)
            except UnknownMeanError as error:  # the report has it, and the reasons if the rows do not count the same
                refusal = str(error)
                losses = _wrap_criterion(split.criterion, criterion, "rows", dim)
                step = make_step(wrapped, losses, _NoUpdate(split.learning().values()), micro_batch_size=micro_batch_size)
                split_loss = _run_step(split, step, inputs, targets)
            expected, gradients = plain.gradients(), split.gradients()
            largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
            floor = largest * (1e-3 if dtype == torch.float64 else 0.1)
            errors = {name: relative_error(gradients[name], expected[name], floor) for name in expected}
            errors[""] = relative_error(split_loss, loss)
            equal = max(errors.values()) <= limit
        count = len(wrapped.devices)
        state, numbers = compare_state(plain, split, count, limit)
        hidden = [refusal] if refusal else []
        if len(split.calls) == 1:
            hidden.append("nothing was split: one forward had all rows, expected several rows and devices, or micro_batch_size=")
        hidden += [*numbers, *without_errors(weight_in_parts(plain.output, losses, targets, wrapped.out_dims))]
        reasons = () if equal or state else _rounding(dtype, max(errors.values()))
        if (equal and state) or reasons:
            reasons += (*state_of_criterion(inner, plain.criterion, count), *state_of_model(module, plain.module, count))
        elif not equal:
            fresh = _wrap_criterion(copy_of(inner), criterion, weight, dim)
            wrap = functools.partial(_wrap_model, like=model, device_ids=[wrapped.devices[0]] * 2, dim=dim, in_dims=in_dims)
            reasons = find_reasons(
                plain, module, (inputs, targets), wrapped, fresh, wrap, split.rounds, limit, reproducible=reproducible
            )
    difference = None if equal else first_difference(plain, split, wrapped.dim, limit)
    if not reasons and difference is None and errors[""] <= limit < max(errors.values()):
        reasons = ("loss and outputs equal, gradients not: a hook or an autograd function changes gradients (docs/exactness.md)",)
    return VerificationReport(
        devices=tuple(map(str, wrapped.devices)),
        micro_batches=split.rounds,
        tolerance=limit,
        plain_loss=float(loss),
        split_loss=float(split_loss),
        loss_error=errors.pop(""),
        gradient_errors=errors,
        first_difference=None if difference is None else str(difference),
        reasons=reasons,
        step=number,
        state_errors=state,
        warnings=(*unregistered_tensors(module), *(hidden if equal else ())),
    )


def _rounding(dtype: torch.dtype, error: float) -> tuple[str, ...]:
    """Returns a reason if the largest error is of the size of rounding errors."""
    if dtype == torch.float64 and error < _FLOAT32_ROUNDING:
        return ("rounding: the errors are of the size of float32; a part of the model or of the loss may cast to float32",)
    rounding = _FLOAT32_ROUNDING if dtype == torch.float32 else _TOLERANCES.get(dtype, 0.0)
    if error > rounding or dtype == torch.float64:
        return ()
    name = str(dtype).removeprefix("torch.")
    return (f"rounding: the errors are within the rounding of {name}: compare in float64 (model.double()), or give tolerance=",)


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer without updates. SGD with a learning rate of 0 would write nan for gradients that are nan."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _run_step(program: Program, step: TrainStep, inputs: Any, targets: Any) -> Tensor:
    program.begin()
    torch.manual_seed(1)
    return step(inputs, targets)


def _wrap_model(
    module: nn.Module, like: nn.Module, device_ids: Sequence[DeviceLike] | None, dim: int | None, in_dims: Dims
) -> DataParallelModel:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped. Settings of the caller take precedence."""
    settings: dict[str, Any] = {} if in_dims is None else {"in_dims": in_dims}
    devices: Sequence[DeviceLike] = device_ids or resolve_devices(None)
    if isinstance(like, DataParallelModel):
        settings = {"split": None if device_ids else like.split, "in_dims": like.in_dims, "out_dims": like.out_dims, **settings}
        devices, dim = device_ids or like.devices, like.dim if dim is None else dim
    if device_ids is None and len(devices) == 1:
        devices, settings["split"] = [*devices] * 3, None  # one replica is the plain program
    return DataParallelModel(module, devices, dim=dim or 0, **settings)


def _wrap_criterion(
    module: Criterion, like: Criterion, weight: Callable[..., Any] | str | None, dim: int | None
) -> DataParallelCriterion:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped, except devices and precision."""
    settings: dict[str, Any] = {}
    if isinstance(like, DataParallelCriterion):
        settings = {**like.arguments, "device_ids": None, "output_device": None, "precision": None}
    if dim is not None:
        settings["dim"] = dim
    if weight is not None:
        settings["weight"] = weight
    wrapped = DataParallelCriterion(module, **settings)
    try:
        if isinstance(wrapped.kind, MeansInside):
            refuse_coupled(module)
    except TypeError:  # a loss whose rows depend on each other: the report shows its error
        settings["weight"] = lambda output, *targets: count_rows(targets, wrapped.dim or 0) or 1
        return DataParallelCriterion(module, **settings)
    return wrapped
