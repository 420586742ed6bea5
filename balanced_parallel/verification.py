"""``verify``: the plain program beside the split one, on the caller's own model and batch, and where they part."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import nesting
from .criterion import DataParallelCriterion
from .devices import DeviceLike, keep_random_state, resolve_devices
from .diagnosis import find_reasons
from .execution import current_replica
from .losses import is_known, refuse_coupled
from .microbatching import as_arguments, count_micro_batches
from .model import DataParallelModel
from .rows import count_rows, cut, move_leaves
from .scattering import proportional_sizes, split_sizes
from .step import TrainStep
from .terms import Criterion
from .weighting import Weight

__all__: list[str] = []

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

    @property
    def equal(self) -> bool:
        """Whether loss and all gradients agree within the tolerance."""
        return max([self.loss_error, *self.gradient_errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        width = max(map(len, ["loss", *self.gradient_errors]))
        rows = [("loss", self.loss_error), *sorted(self.gradient_errors.items(), key=lambda item: -item[1])]
        lines = [
            f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}: {len(self.devices)} replicas "
            f"({', '.join(self.devices)}), {self.micro_batches} micro-batch(es)",
            f"loss of the plain program {self.plain_loss:.8g}, of the split one {self.split_loss:.8g}",
            f"{'':{width}}  relative error",
            *(f"{name:{width}}  {error:.1e}{'' if error <= self.tolerance else '  <-'}" for name, error in rows),
        ]
        if self.first_difference is not None:
            lines.append(f"the first output that differs is that of {self.first_difference}")
        lines += [f"known reason: {reason}" for reason in self.reasons]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    criterion: Criterion,
    inputs: Any,
    targets: Any,
    *,
    device_ids: Sequence[DeviceLike] | None = None,
    micro_batch_size: int | None = None,
    weight: Callable[..., Weight] | None = None,
    tolerance: float | None = None,
) -> VerificationReport:
    """Runs one forward and backward of the plain program and of the split one, and compares.

    Nothing of the caller's is changed: both run on copies. They start from different random states, so that a model which
    draws random numbers in forward cannot look equal by luck. float64 gives the clearest answer (``model.double()``).

    Args:
        model: a module, or the :class:`DataParallelModel` around it, whose devices are then used.
        criterion: a module or a function, or the :class:`DataParallelCriterion` around it.
        inputs, targets: as :class:`TrainStep` takes them.
        device_ids: as in :class:`DataParallelModel`.
        micro_batch_size: rows per device in one forward; ``None`` runs the whole batch at once.
        weight: as in :class:`DataParallelCriterion`.
        tolerance: relative; ``None`` is 1e-10 for float64, 1e-4 for float32, 2e-2 for float16 and 5e-2 for bfloat16.

    Returns:
        The errors of loss and gradients and, where they are too large, the first module whose output differs and the known
        reasons that apply.
    """
    dim, split_weights = 0, None
    if isinstance(model, DataParallelModel):
        split_weights = model.split if device_ids is None else None
        device_ids, dim, model = device_ids or model.devices, model.dim, model.module
    if isinstance(criterion, DataParallelCriterion):
        weight = weight or criterion.weight
        criterion = criterion.module
    weight = _weigh(criterion, weight)
    devices = resolve_devices(device_ids)
    rows = count_rows(as_arguments(inputs), dim)
    pieces = 1 if rows is None else max(count_micro_batches(rows, micro_batch_size, split_weights or len(devices)), 1)

    with keep_random_state(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="it is not known what .* divides its mean by")
        plain = _Program(model, criterion)
        loss = _run_plain(plain, inputs, targets, devices[0])
        split = _Program(model, criterion)
        wrapped = DataParallelModel(split.module, devices, dim=dim, split=split_weights)
        split_loss = _run_split(split, wrapped, inputs, targets, pieces, weight)

    expected, found = plain.gradients(), split.gradients()
    largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
    errors = {name: _relative_error(found[name], gradient, largest / 1000) for name, gradient in expected.items()}
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    limit = _TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
    loss_error = _relative_error(split_loss, loss)
    worst = max([loss_error, *errors.values()])
    equal = worst <= limit
    reasons = () if equal else find_reasons(plain.module, plain.output, model, criterion, weight, targets, pieces * len(devices))
    if not equal and dtype == torch.float64 and worst < 1e-5:
        reasons += ("rounding: the errors are those of float32, to which a part of the model or of the loss seems to cast",)
    return VerificationReport(
        devices=tuple(map(str, devices)),
        micro_batches=pieces,
        tolerance=limit,
        plain_loss=float(loss),
        split_loss=float(split_loss),
        loss_error=loss_error,
        gradient_errors=errors,
        first_difference=None if equal else _first_difference(plain, split, dim, limit),
        reasons=reasons,
    )


class _Program:
    """A copy of model and criterion that notes the output of each module, by replica and micro-batch."""

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        self.module = copy.deepcopy(module)
        self.criterion = copy.deepcopy(criterion) if isinstance(criterion, nn.Module) else criterion
        self.piece = 0
        self.output: Any = None
        self.noted: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        for parameter in (*self.module.parameters(), *self._own_parameters().values()):
            parameter.grad = None
        for name, layer in self.module.named_modules():
            layer.register_forward_hook(self._note(name or "the model", type(layer).__name__))

    def _note(self, name: str, kind: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            replica = current_replica()
            tensor = nesting.first_tensor(output)
            if tensor is not None:
                place = (self.piece, 0 if replica is None else replica.index)
                self.noted.setdefault(place, []).append((f"{name} ({kind})", tensor.detach().clone()))

        return hook

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        if not isinstance(self.criterion, nn.Module):
            return {}
        return {f"criterion.{name}": parameter for name, parameter in self.criterion.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        named = dict(self.module.named_parameters()) | self._own_parameters()
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in named.items()
            if parameter.requires_grad
        }


def _run_plain(program: _Program, inputs: Any, targets: Any, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    arguments, following = move_leaves((as_arguments(inputs), nesting.spread(targets)), device)
    program.output = program.module.to(device)(*arguments.inputs, **arguments.kwargs)
    criterion = program.criterion.to(device) if isinstance(program.criterion, nn.Module) else program.criterion
    loss = criterion(*nesting.spread(program.output), *following)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    return loss.detach()


def _run_split(
    program: _Program,
    model: DataParallelModel,
    inputs: Any,
    targets: Any,
    pieces: int,
    weight: Callable[..., Weight] | None,
) -> Tensor:
    torch.manual_seed(1)
    step = TrainStep(
        model,
        DataParallelCriterion(program.criterion, weight=weight),
        torch.optim.SGD([*program.module.parameters(), *program._own_parameters().values()], lr=0.0),
    )
    rows = count_rows(as_arguments(inputs), model.dim)
    if rows is None:
        return step(inputs, targets)
    sizes, target_rows = split_sizes(rows, pieces), count_rows(targets)
    target_sizes = sizes if target_rows is None else proportional_sizes(target_rows, sizes)
    for program.piece, (some, labels) in enumerate(zip(cut(inputs, sizes, model.dim), cut(targets, target_sizes), strict=True)):
        step.add(some, labels)
    return step.apply()


def _weigh(criterion: Criterion, weight: Callable[..., Weight] | None) -> Callable[..., Weight] | None:
    """The weight to run with: by rows for a loss that is refused elsewhere, for here its error is to be shown."""
    try:
        if weight is None and not is_known(criterion):
            refuse_coupled(criterion)
    except TypeError:
        return lambda output, *targets: count_rows(targets) or 1
    return weight


def _relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Infinite where only one of them is nan: a comparison with nan would pass for small."""
    if expected.numel() == 0:
        return 0.0
    found, expected = found.to(expected.device).double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, found - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference / scale) else math.inf


def _first_difference(plain: _Program, split: _Program, dim: int, tolerance: float) -> str | None:
    """The first module, in the order in which forwards end, whose pieces put together are not the plain output."""
    parts = [split.noted[place] for place in sorted(split.noted)]
    for index, (name, expected) in enumerate(plain.noted.get((0, 0), [])):
        pieces = [part[index][1].to(expected.device) for part in parts if index < len(part) and part[index][0] == name]
        if len(pieces) < len(parts):
            return f"{name}, which the replicas did not run in the same order"
        along = dim if expected.dim() > dim else None
        whole = torch.cat(pieces, along) if along is not None else torch.stack(pieces)
        if whole.shape == expected.shape and (error := _relative_error(whole, expected)) > tolerance:
            return f"{name}: relative error {error:.1e}"
    return None
