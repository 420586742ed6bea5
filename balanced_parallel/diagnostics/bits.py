"""The first operator whose bits differ between two runs of a program.

The runs are compared by digests of what the rows of each forward compute. A mode sees the operators
of a forward. Hooks of autograd's nodes see the gradients. A node belongs to the module that made
it::

    before a module's forward   the nodes of its inputs go to the module that calls it
    after it                    the nodes of its outputs go to it, but for those of others
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.containers import tensors_in
from ..runtime import row_random
from ..runtime.devices import Devices
from ..runtime.torch_private import Node, TorchDispatchMode, current_backward_id
from .reasons import errors_of_state
from .recording import Program
from .report import VerificationReport

_OWNED = "belongs to a module"  # a key in the metadata of a node
Record = tuple[str, list[int]]  # an operator or a gradient, with digests of its tensors
Run = tuple[Program, Callable[[], Tensor]]  # a program, and a step of it that returns the loss


class Group:
    """Records of what the rows of one forward compute, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.modules = ["the loss"]  # Forwards that run, the innermost last.

    def note(self, part: str, value: object) -> None:
        """Records what a part of the innermost module has computed."""
        self.records.append((f"{part} in {self.modules[-1]}", _digests(value)))

    def claim(self, value: object) -> None:
        """Gives the nodes behind ``value`` to the innermost module, but for those of others."""
        nodes = _nodes(value)
        while nodes:
            node = nodes.pop()
            if node is None or _OWNED in node.metadata or "AccumulateGrad" in node.name():
                continue
            node.metadata[_OWNED] = True
            place = f"{node.name()} in {self.modules[-1]}"
            node.register_hook(partial(self._note_gradients, place))
            nodes += [behind for behind, _ in node.next_functions]

    def _note_gradients(self, place: str, results: object, arguments: object) -> None:
        self.records += [
            (f"gradient that reaches {place}", _digests(arguments)),
            (f"gradient from {place}", _digests(results)),
        ]


class Recorder(TorchDispatchMode):
    """Records a program while it runs in this mode: its last step, by the first row of a forward."""

    supports_higher_order_operators = True

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.groups: dict[int, Group] = {}
        for prefix, part in {"": program.module, "criterion.": program.criterion}.items():
            for name, layer in part.named_modules() if isinstance(part, nn.Module) else ():
                label = f"{(prefix + name).strip('.') or 'the model'} ({type(layer).__name__})"
                begin = partial(self._begin_module, label, layer is program.module)
                layer.register_forward_pre_hook(begin, with_kwargs=True)
                layer.register_forward_hook(self._end_module)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Calls an operator, and records its result. Views and new memory may have any values."""
        result = func(*args, **(kwargs or {}))
        group = self._running()
        is_view = getattr(func, "is_view", False)
        if group is not None and not is_view and "empty" not in func.name():
            group.note(f"output of {func}", result)
        return result

    def records(self) -> Iterator[Record]:
        """Yields the records of all groups."""
        for row, group in sorted(self.groups.items()):
            place = "" if row < 0 else f", in the group that begins with row {row}"
            for text, digests in group.records:
                yield text + place, digests

    def _running(self) -> Group | None:
        """Returns the group of the forward that runs in this thread.

        A backward may run parts of it again.
        """
        return self.groups.get(_first_row()) if current_backward_id() is None else None

    def _begin_module(
        self, label: str, is_model: bool, layer: nn.Module, inputs: object, kwargs: object
    ) -> None:
        if is_model:
            self.groups[_first_row()] = Group()
        if (group := self._running()) is not None:
            # Parameters of replicas have nodes that lead to those of the module.
            for node in filter(None, _nodes([*layer.parameters()])):
                node.metadata[_OWNED] = True
            group.claim((inputs, kwargs))
            group.modules.append(label)

    def _end_module(self, layer: nn.Module, inputs: object, output: object) -> None:
        if (group := self._running()) is not None:
            group.claim(output)
            group.note("output of the forward", output)
            group.modules.pop()


def _first_row() -> int:
    """Returns the first row of the forward that runs, or -1 if its rows have no numbers."""
    row: int = getattr(row_random.running.get(), "first_row", -1)
    return row


def _nodes(value: object) -> list[Node]:
    return [tensor.grad_fn for tensor in tensors_in(value)]


def _digests(value: object) -> list[int]:
    """Returns a hash of the bits of each tensor."""
    # Kernels return bytes as memory for their backwards, which may have any value.
    return [_digest(tensor) for tensor in tensors_in(value) if tensor.dtype != torch.uint8]


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

    If they differ, others run with a record of each operator.
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
        losses = []
        for place, (_, step) in enumerate(runs):
            with recorders[place] if is_recorded else nullcontext():
                losses.append(step())
        expected = {"": losses[0], **first.gradients()}
        values = {"": losses[1], **second.gradients()}
        errors = {name: _count_differing(values[name], expected[name]) for name in expected}
        difference = _find_difference(recorders)
        if difference is None and any(errors.values()):
            difference = "in no operator: in a sum over groups, a hook of a parameter, or by chance"
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
