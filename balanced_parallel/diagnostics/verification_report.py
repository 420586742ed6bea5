"""``VerificationReport``: the errors of the split program, as a table."""

from dataclasses import dataclass, field

__all__: list[str] = []

_MAX_GRADIENTS = 10  # gradients in the table


@dataclass(frozen=True)
class VerificationReport:
    """Relative errors of the split program. ``print(report)`` prints a table.

    The error of a gradient is its largest absolute difference over the largest entry of the plain gradient. The divisor is at
    least a thousandth of the largest entry of all gradients, so rounding errors in a gradient near zero do not count.

    Attributes:
        devices: one device per replica.
        micro_batches: number of micro-batches.
        tolerance: largest relative error that counts as equal.
        plain_loss: loss of the plain program.
        split_loss: loss of the split program.
        loss_error: relative error of the loss.
        gradient_errors: relative error of each gradient, by the name of the parameter.
        first_difference: first module whose output differs, with its error; None if there is none.
        reasons: known reasons for a difference that apply.
        step: number of the step that the errors belong to: the first of two that differs, else the second.
        state_errors: relative error of each buffer that differs after the steps, except those of batch norms.
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
        """True if the errors of the loss and of all gradients are within the tolerance, and no buffer differs."""
        return not self.state_errors and max([self.loss_error, *self.gradient_errors.values()]) <= self.tolerance

    def __str__(self) -> str:
        rows = [("loss", self.loss_error), *sorted(self.gradient_errors.items(), key=lambda item: -item[1])]
        shown, more = rows[: _MAX_GRADIENTS + 1], len(rows) - _MAX_GRADIENTS - 1
        state = [(f"buffer {name}", error) for name, error in self.state_errors.items()]
        width = max(len(name) for name, _ in (*shown, *state))
        lines = [
            f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}: {_counted(len(self.devices), 'replica')} "
            f"({', '.join(self.devices)}), {_counted(self.micro_batches, 'micro-batch')}",
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
            lines.append("no known reason: `python -m balanced_parallel doctor`, and docs/exactness.md")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"
