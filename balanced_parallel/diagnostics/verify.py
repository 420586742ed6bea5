"""``verify``: comparison of the split program with the plain program, on the user's own model and
batch.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import DataParallelCriterion, DataParallelModel, TrainStep
from ..batch.rows import Batch, as_arguments, spread
from ..loss.copies import Criterion
from ..replicas.module_tree import check_is_module
from ..replicas.replicas import window
from ..runtime import values
from ..runtime.devices import resolve_devices
from .bits import DigestedProgram, Run, compare_bits
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
from .report import VerificationReport

_WHOLE = "nothing was split: one forward had all rows, expected several rows and devices, or micro_batch_size="
DeviceIds = Sequence[torch.device | str | int]


@values.naming_arguments
def verify(
    model: nn.Module,
    criterion: Criterion,
    inputs: Any,
    targets: Any = (),
    *,
    device_ids: DeviceIds | None = None,
    micro_batch_size: int | None = None,
    tolerance: float | None = None,
    reproducible: bool | Literal["bits"] = False,
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
        device_ids: as in :class:`DataParallelModel`. Without it, a single device has three
            replicas.
        micro_batch_size: number of rows per device in one forward. ``None`` means the whole batch
            in one forward. For bits on several devices it means one group for each.
        tolerance: relative tolerance. ``None`` means 1e-10 for float64, 1e-4 for float32, 2e-2 for
            float16 and 5e-2 for bfloat16.
        reproducible: draws random numbers as ``TrainStep(reproducible=True)``, in the plain program
            those of one device. ``"bits"`` compares bits, without a tolerance: those of one device
            and of all, as ``TrainStep(reproducible="bits")`` computes them. On one device without
            ``micro_batch_size`` it runs the plain program twice, with equal seeds. TF32 stays as it
            is.

    Returns:
        A :class:`VerificationReport` with the errors of loss and gradients, and of state that ends
        with other values. If they exceed the tolerance, it has the first module whose output
        differs, and the known reasons that apply. Errors of bits are numbers of elements, and the
        first difference is that of a module: its output, or the gradient that reaches it.

    Raises:
        ValueError: a ``tolerance`` for bits, a program that cannot have the same bits, or a loss
            that :class:`TrainStep` refuses.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
        >>> inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
        >>> report = verify(net, torch.nn.CrossEntropyLoss(), inputs, targets, device_ids=["cpu"] * 3)
        >>> report.equal, report.devices
        (True, ('cpu', 'cpu', 'cpu'))
        >>> sorted(report.gradient_errors)
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> settings = {"device_ids": ["cpu"] * 3, "micro_batch_size": 2, "reproducible": "bits"}
        >>> print(str(verify(net, torch.nn.CrossEntropyLoss(), inputs, targets, **settings)).splitlines()[0])
        same bits: replicas on cpu, cpu, cpu; micro-batches: 2
    """
    check_is_module(model, "model")
    if tolerance is not None:
        values.check_number(
            "tolerance", tolerance, "a number that is not negative, or None", at_least=0
        )
    module = model.module if isinstance(model, DataParallelModel) else model
    inner: Criterion = (
        criterion.module if isinstance(criterion, DataParallelCriterion) else criterion
    )
    if reproducible == "bits":
        return _verify_bits(
            partial(DigestedProgram, module, inner),
            partial(_wrap_model, like=model, device_ids=device_ids),
            partial(_wrap_criterion, like=criterion),
            (inputs, targets),
            micro_batch_size,
            tolerance,
        )
    with _keep_random_state(), without_tf32(), warnings.catch_warnings():
        plain = Program(module, inner)
        split = Program(module, inner)
        limit = TOLERANCES.get(plain.dtype, 1e-4) if tolerance is None else tolerance
        wrapped = _wrap_model(split.module, model, device_ids)
        wrap = partial(_wrap_criterion, like=criterion, dim=wrapped.dim)
        make_step = partial(TrainStep, reproducible=reproducible)
        batch = as_arguments(inputs), spread(targets)
        run_plain = partial(plain.run, *batch, wrapped.devices[0])
        if reproducible:
            alone = _wrap_model(plain.module, model, wrapped.devices[:1])
            plain_step = make_step(alone, wrap(plain.criterion), plain.optimizer)
            run_plain = partial(_run_step, plain, plain_step, inputs, targets)
        criterion_of_all = wrap(split.criterion)
        step = make_step(
            wrapped, criterion_of_all, split.optimizer, micro_batch_size=micro_batch_size
        )
        errors = {"": 0.0}
        number = 0
        while number < 2 and max(errors.values()) <= limit:
            number += 1
            with window(wrapped, criterion_of_all, states_differ=True):
                split_loss = _run_step(split, step, inputs, targets)
            loss = run_plain()
            errors = {"": relative_error(split_loss, loss), **_errors_of_gradients(plain, split)}
        losses = wrap(copy_of(inner))
        comparison = Comparison(module, plain, split, wrapped, losses, *batch, limit)
        state = errors_of_state(plain, split, limit)
        reasons = find_reasons(comparison, errors, state, reproducible=reproducible)
        difference = None
        hidden = list[str]()
        if max(errors.values()) > limit:
            difference = first_difference(plain.calls[0], split.calls, wrapped.dim, limit)
        else:
            hidden += without_errors(weight_in_parts(comparison))
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
        warnings=tuple(hidden),
    )


def _verify_bits(
    make_program: Callable[[], DigestedProgram],
    wrap_model: Callable[..., DataParallelModel],
    wrap_criterion: Callable[..., DataParallelCriterion],
    batch: tuple[Any, Any],
    micro_batch_size: int | None,
    tolerance: float | None,
) -> VerificationReport:
    """Compares the bits of one device and of all, or of two runs of the plain program."""
    if tolerance is not None:
        raise ValueError(
            f"tolerance={tolerance} with reproducible='bits', expected None: bits are equal or not"
        )
    with _keep_random_state():
        arguments = as_arguments(batch[0])
        example = wrap_model(make_program().module)
        devices = example.devices
        rows = Batch(arguments, dims=(example.dim, 0)).rows or 1

        def make_run(**layout: Any) -> Run:
            program = make_program()
            if len(devices) == 1 and micro_batch_size is None:
                return program, partial(program.run, arguments, spread(batch[1]), devices[0])
            model = wrap_model(program.module, **layout)
            step = TrainStep(
                model,
                wrap_criterion(program.criterion, dim=model.dim),
                program.optimizer,
                micro_batch_size=micro_batch_size or -(-rows // len(devices)),
                reproducible="bits",
            )
            return program, partial(_run_step, program, step, *batch)

        return compare_bits((make_run(device_ids=devices[:1]), make_run()), devices)


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
    module: nn.Module, like: nn.Module, device_ids: DeviceIds | None
) -> DataParallelModel:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped.

    Devices of the caller take precedence.
    """
    settings: dict[str, Any] = {}
    devices: DeviceIds = device_ids or resolve_devices(None)
    if isinstance(like, DataParallelModel):
        settings = {"dim": like.dim, "out_dims": like.out_dims}
        if not device_ids:
            devices, settings["split"] = like.devices, like.split
    if device_ids is None and len(devices) == 1:
        devices, settings["split"] = [*devices] * 3, None  # one replica is the plain program
    return DataParallelModel(module, devices, **settings)


def _wrap_criterion(module: Criterion, like: Criterion, dim: int) -> DataParallelCriterion:
    """Wraps ``module`` with the settings of ``like``, if that is wrapped, except devices and
    precision.
    """
    settings: dict[str, Any] = {"dim": dim}
    if isinstance(like, DataParallelCriterion):
        settings = {**like.arguments, "device_ids": None, "output_device": None, "precision": None}
    return DataParallelCriterion(module, **settings)


def _keep_random_state() -> contextlib.AbstractContextManager[None]:
    """Restores the random state of the CPU and of all accelerators at the end of the block."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.random.fork_rng(
        range(torch.accelerator.device_count()),
        device_type=accelerator.type if accelerator else "cpu",
    )


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Computes products of float32 tensors with all bits of float32 in this block, in all threads.

    cuDNN uses 10 bits of mantissa by default (TF32). torch has an old and a new way to set this,
    and raises an error if they differ. So both are set, and put back.
    """
    backends: Any = torch.backends
    # The CPU is among them: torch.set_float32_matmul_precision("medium") rounds to bfloat16 there.
    switches = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    ]
    before = [switch.fp32_precision for switch in switches]
    try:
        old_way: tuple[str, bool] | None = (
            torch.get_float32_matmul_precision(),
            backends.cudnn.allow_tf32,
        )
    except RuntimeError:  # set in the new way, by a program that then does not read the old one
        old_way = None

    def set_precisions(precisions: Sequence[str], old: tuple[str, bool]) -> None:
        if old_way is not None:
            torch.set_float32_matmul_precision(old[0])
            backends.cudnn.allow_tf32 = old[1]
        for switch, precision in zip(switches, precisions, strict=True):
            switch.fp32_precision = precision

    try:
        set_precisions(["ieee"] * len(switches), ("highest", False))
        yield
    finally:
        set_precisions(before, old_way or ("highest", False))
