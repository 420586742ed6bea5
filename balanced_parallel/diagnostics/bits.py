"""The first module whose bits differ between two runs of a program.

The runs are compared by digests of what the modules compute for the rows of each forward: hooks of
modules see outputs, hooks of tensors the gradients that reach an output and leave an input.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..batch.containers import tensors_in
from ..runtime import row_random
from ..runtime.devices import Devices
from ..runtime.torch_private import current_backward_id
from .reasons import errors_of_state
from .recording import Program
from .report import VerificationReport

Record = tuple[str, list[int]]  # an output or a gradient, with digests of its tensors
Run = tuple[Program, Callable[[], Tensor]]  # a program, and a step of it that returns the loss


class Recorder:
    """Records the last step of a program, by the first row of a forward."""

    def __init__(self, program: Program) -> None:
        self._groups: dict[int, list[Record]] = {}
        for prefix, part in {"": program.module, "criterion.": program.criterion}.items():
            for name, layer in part.named_modules() if isinstance(part, nn.Module) else ():
                label = f"{(prefix + name).strip('.') or 'the model'} ({type(layer).__name__})"
                begin = partial(self._begin_module, label, layer is program.module)
                layer.register_forward_pre_hook(begin, with_kwargs=True)
                layer.register_forward_hook(partial(self._end_module, label))

    def records(self) -> Iterator[Record]:
        """Yields the records of all groups."""
        for row, records in sorted(self._groups.items()):
            place = "" if row < 0 else f", in the group that begins with row {row}"
            for text, digests in records:
                yield text + place, digests

    def _begin_module(
        self, label: str, is_model: bool, layer: nn.Module, inputs: object, kwargs: object
    ) -> None:
        if current_backward_id() is None:  # A backward may run parts of a forward again.
            row = _first_row()
            if is_model:
                self._groups[row] = []
            records = self._groups.get(row, [])
            for tensor in tensors_in((inputs, kwargs)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(_note, records, f"gradient from {label}"))

    def _end_module(self, label: str, layer: nn.Module, inputs: object, output: object) -> None:
        if current_backward_id() is None:
            records = self._groups.get(_first_row(), [])
            _note(records, f"output of {label}", output)
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # The hook runs behind those of the tensor.
                    place = f"gradient that reaches {label}"
                    tensor.grad_fn.register_prehook(partial(_note, records, place))


def _note(records: list[Record], place: str, value: object) -> None:
    records.append((place, _digests(value)))


def _first_row() -> int:
    """Returns the first row of the forward that runs, or -1 if its rows have no numbers."""
    row: int = getattr(row_random.running.get(), "first_row", -1)
    return row


def _digests(value: object) -> list[int]:
    """Returns a hash of the bits of each tensor."""
    return [*map(_digest, tensors_in(value))]


def _digest(tensor: Tensor) -> int:
    try:
        return hash(_bits_of(tensor).cpu().numpy().tobytes())
    except RuntimeError:  # Nested tensors, and those inside of torch.func, have no memory to read.
        return 0


def _bits_of(tensor: Tensor) -> Tensor:
    """Returns the bits of the elements as integers, in one dimension."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.to_dense()
    flat = dense.resolve_conj().resolve_neg().reshape(-1)
    return flat.view(getattr(torch, f"int{8 * min(flat.itemsize, 8)}"))


def _count_differing(value: Tensor, expected: Tensor) -> float:
    """Returns the number of elements with other bits."""
    return float((_bits_of(value) != _bits_of(expected)).sum())


def _find_difference(recorders: Sequence[Recorder]) -> str | None:
    """Returns the first record that differs, in the order of the rows."""
    records = [recorder.records() for recorder in recorders]
    for record, other in itertools.zip_longest(*records, fillvalue=("nothing", [])):
        if record != other:
            return "; in the other run: ".join(dict.fromkeys([record[0], other[0]]))
    return None


def compare_bits(make_runs: Callable[[], Sequence[Run]], devices: Devices) -> VerificationReport:
    """Compares the bits of two programs, which are made anew.

    If they differ, others run with a record of each module.
    """
    report = _compare_runs(make_runs(), devices, is_recorded=False)
    if not report.equal:
        for _ in range(3):  # Two runs may be equal by chance.
            recorded = _compare_runs(make_runs(), devices, is_recorded=True)
            if recorded.first_difference is not None:
                return replace(report, first_difference=recorded.first_difference)
    return report


def _compare_runs(
    runs: Sequence[Run], devices: Devices, *, is_recorded: bool
) -> VerificationReport:
    """Runs two steps, or one if that differs."""
    (first, _), (second, _) = runs
    recorders = [Recorder(program) for program, _ in runs] if is_recorded else []
    number = 0
    difference = None
    while number < 2 and difference is None:
        number += 1
        losses = [step() for _, step in runs]
        expected = {"": losses[0], **first.gradients()}
        values = {"": losses[1], **second.gradients()}
        errors = {name: _count_differing(values[name], expected[name]) for name in expected}
        difference = _find_difference(recorders)
        if difference is None and any(errors.values()):
            outside = "in no module: in a sum over groups, a hook of a parameter, or by chance"
            difference = "in the loss" if errors[""] else outside
    return VerificationReport(
        devices=tuple(map(str, devices)),
        micro_batches=second.rounds,
        tolerance=0.0,
        plain_loss=float(losses[0]),
        split_loss=float(losses[1]),
        loss_error=errors.pop(""),
        gradient_errors=errors,
        first_difference=difference,
        reasons=(),
        step=number,
        state_errors=errors_of_state(first, second, 0.0, _count_differing),
        compares_bits=True,
    )
