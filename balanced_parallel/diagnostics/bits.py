"""The first module whose bits differ between two runs of a program.

The runs are compared by digests of the outputs of modules, and of the gradients that reach them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..batch.containers import tensors_in
from .reasons import errors_of_state
from .recording import ModuleCalls, Program
from .report import VerificationReport


class DigestedProgram(Program):
    """A program that keeps digests of outputs, and of the gradients that reach them."""

    def keep(self, calls: ModuleCalls, label: str, output: object) -> None:
        """Keeps an output. Adds its gradient, once the backward has it."""
        _note(calls, f"output of {label}", output)
        note = partial(_note, calls, f"gradient that reaches {label}")
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(note)  # It runs behind the hooks of the tensor.


Run = tuple[DigestedProgram, Callable[[], Tensor]]  # A step returns the loss.


def _note(calls: ModuleCalls, place: str, value: object) -> None:
    calls.append((place, [_digest(tensor) for tensor in tensors_in(value)]))


def _digest(tensor: Tensor) -> int:
    """Returns a hash of the bits of a tensor."""
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


def _find_difference(first: Program, second: Program) -> str | None:
    """Returns the first record that differs, in the order of the rows."""
    previous = "the inputs"
    records = [itertools.chain.from_iterable(program.calls) for program in (first, second)]
    for record, other in itertools.zip_longest(*records, fillvalue=("nothing", [])):
        if record != other:
            places = "; in the other run: ".join(dict.fromkeys([record[0], other[0]]))
            return f"{places}; equal up to {previous}"
        previous = record[0]
    return None


def compare_bits(runs: tuple[Run, Run], devices: Sequence[torch.device]) -> VerificationReport:
    """Compares the bits of two programs after two steps, or after one if that differs."""
    (first, _), (second, _) = runs
    number = 0
    difference = None
    while number < 2 and difference is None:
        number += 1
        losses = [step() for _, step in runs]
        expected = {"": losses[0], **first.gradients()}
        values = {"": losses[1], **second.gradients()}
        errors = {name: _count_differing(values[name], expected[name]) for name in expected}
        if any(errors.values()):
            outside = "in no module: in a sum over groups, a hook of a parameter, or by chance"
            place = "in the loss" if errors[""] else outside
            difference = _find_difference(first, second) or place
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
