"""``memory.plan``: the cheapest way to fit an effective batch on given devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..batch.splits import split_sizes
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import is_known
from ..runtime.byte_sizes import parse_each
from .candidates import Measured, measure_what_decides
from .capacity import what_would_fit
from .choices import Choice
from .device_specs import DeviceKind
from .estimation import make_report, report_of
from .length_traces import check_lengths, with_length
from .memory_plan import MakeOptimizer, MemoryPlan
from .plan_stages import stages_of
from .progress import tell
from .report import MemoryReport
from .request import make_request
from .trace.coupled_update import plain_criterion

__all__: list[str] = []


def plan(
    module: torch.nn.Module,
    criterion: Callable[..., Any],
    inputs: Any,
    targets: Any,
    *,
    batch_size: int,
    capacity: int | str | Sequence[int | str] | None = None,
    devices: int = 1,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    device_kind: str | None = None,
    dim: int = 0,
    scalar: int | float | bool | None = None,
    lengths: tuple[int, int] | None = None,
    trim: int = 1,
) -> MemoryPlan:
    """Plans the cheapest way to fit an effective batch on the devices of one process.

    The plan chooses the number of micro-batches, the split over unequal devices, :class:`BalancedOptimizer`, activations in
    place, checkpointing of the module's repeated blocks, offloaded activations, and gradients that are released in the backward.
    If none of these suffices, it tries the same in bf16, which changes the result. The cheapest choice has the fewest operations,
    then the fewest micro-batches, then the least traffic. If nothing fits, optimizers with less state are shown as alternatives.

    Args:
        module, criterion, inputs, targets, optimizer, device_kind, dim, scalar: as for :func:`estimate`. Inputs and targets
            give the shapes; their number of rows does not matter.
        batch_size: rows per update over all devices. Any number, also one that does not divide evenly.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. ``None`` is that of the device kind.
        devices: number of devices.
        precision: the precision to try first.
        max_grad_norm: that of the step. Gradients that are clipped cannot be released in the backward.
        lengths: the shortest and the longest row. The plan is made for rows of the longest, and has a ``micro_batch_cost``: the
            largest budget such that every shard with ``rows x longest`` within it fits.
        trim: the dimension of the lengths, as for :func:`estimate`.

    Raises:
        ValueError: a setting is out of its range, or :func:`estimate` refuses it.

    Example:
        >>> net, batch = torch.nn.Linear(256, 256), (torch.zeros(8, 256), torch.zeros(8, 256))
        >>> found = plan(net, torch.nn.MSELoss(), *batch, batch_size=4096, capacity="6MiB", devices=2, device_kind="cpu")
        >>> found.fits, found.chosen.micro_batches
        (True, 2)
        >>> model, criterion, optimizer, step = found.apply(net, torch.nn.MSELoss(), device_ids=["cpu"] * 2, lr=1e-3)
        >>> step(torch.zeros(4096, 256), torch.zeros(4096, 256)).shape
        torch.Size([])
        >>> MemoryPlan.from_json(found.to_json()) == found
        True
    """
    request = make_request(
        module,
        plain_criterion(criterion),
        inputs,
        targets,
        optimizer=optimizer,
        precision=precision,
        layout="replicas",
        devices=devices,
        device_kind=device_kind,
        dim=dim,
        scalar=scalar,
    )
    if lengths is not None:
        request = with_length(request, trim, check_lengths(request, trim, lengths)[1])
    limits = _capacities(capacity, devices, request.kind)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}, expected a positive number of rows per update")
    stages = list(stages_of(request, max_grad_norm is not None))
    measured: list[Measured] = []
    choices: list[Choice] = []
    while stages and not any(choice.fits for choice in choices):
        options = stages.pop(0)
        tell("; ".join(option.name for option in options))
        first = Measured(request, options[0], limits, batch_size)
        if options[0].inplace and not first.request.inplace:
            continue  # no activation may be in place, so this is the stage before
        some = [first, *(Measured(request, option, limits, batch_size) for option in options[1:])]
        plain = (measured or some)[0]
        try:
            measure_what_decides(some, batch_size, plain)
        except ValueError:
            if not (some[0].option.optimizer or some[0].option.offload or some[0].option.released):
                raise
            continue  # an optimizer that cannot be traced here, or not released; more rows that are offloaded than others
        measured += some
        choices += [each.choose(batch_size, plain) for each in some]
    whole = max(plain.lines(1).peak(i, -(-batch_size // devices) * devices) for i in range(devices))
    choices = [dataclasses.replace(choice, saved=whole - max(choice.peak)) for choice in choices]
    ranked = sorted(zip(choices, measured, strict=True), key=lambda pair: (_is_other(pair[0]), not pair[0].fits, pair[0].cost))
    best, how = ranked[0]
    return MemoryPlan(
        batch_size=batch_size,
        capacity=limits,
        device_kind=request.kind.name,
        choices=tuple(choice for choice, _ in ranked),
        fits=best.fits,
        needs=None if best.fits else what_would_fit([each for each in measured if each.option.accumulates], max(limits)),
        dim=dim,
        untried=tuple(option.name for stage in stages for option in stage),
        micro_batch_cost=how.largest_cost(trim, lengths) if lengths is not None and best.fits else None,
        trim=trim,
        unknown_divisor=_has_unknown_divisor(criterion),
        report=_report(how, best, batch_size) if best.fits else None,
    )


def _capacities(capacity: int | str | Sequence[int | str] | None, devices: int, kind: DeviceKind) -> tuple[int, ...]:
    if capacity is None:
        if kind.capacity is None:
            raise ValueError(f"capacity=None with device_kind={kind.name!r}, which has none: expected a size, as '24GiB'")
        capacity = kind.capacity
    return parse_each(capacity, devices)


def _has_unknown_divisor(criterion: Any) -> bool:
    if not isinstance(criterion, DataParallelCriterion):
        return not is_known(criterion)
    is_given = criterion.weight is not None or criterion.is_coupled
    return not (is_given or criterion.reduction == "sum" or is_known(criterion.module))


def _is_other(choice: Choice) -> bool:
    return choice.optimizer is not None


def _report(measured: Measured, choice: Choice, batch_size: int) -> MemoryReport:
    """Makes the report from the traces of the plan. Unequal shares, and less than two rows per device, are traced again."""
    count, devices = choice.micro_batches, measured.request.devices
    rows = -(-batch_size // count)
    request = dataclasses.replace(measured.request, micro_batches=count, split=choice.split)
    if choice.split or rows < 2 * devices:
        return report_of(request, rows)
    lines = measured.lines(count)
    return make_report(request, rows, lines, [size * devices for size in split_sizes(rows, devices)], lines)
