"""The report of ``verify``."""

from dataclasses import dataclass, field
from html import escape

from tabulate import tabulate

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
        compares_bits: True with ``reproducible="bits"``. Errors are numbers of elements whose bits
            differ then, and the first difference is that of an output or its gradient.
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
    compares_bits: bool = False

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
        return "\n".join([*self._title(), self._table("plain"), *self._notes()])

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        title, notes = (
            [f"<p>{escape(line)}</p>" for line in lines] for lines in (self._title(), self._notes())
        )
        return "".join([*title, self._table("html"), *notes])

    def _table(self, style: str) -> str:
        unit = "elements that differ" if self.compares_bits else "relative error"
        return tabulate(self._rows(), ["", unit, ""], style, disable_numparse=True)

    def _title(self) -> list[str]:
        verdict = f"{'equal' if self.equal else 'DIFFERENT'} within {self.tolerance:.0e}"
        if self.compares_bits:
            verdict = "same bits" if self.equal else "DIFFERENT BITS"
        return [
            f"{verdict}: replicas on {', '.join(self.devices)}; micro-batches: {self.micro_batches}",
            f"loss in step {self.step} on the same batch: {self.plain_loss:.8g} (plain), {self.split_loss:.8g} (split)",
        ]

    def _rows(self) -> list[tuple[str, str, str]]:
        """Returns a name, its error and a mark for each row of the table."""
        gradients = sorted(self.gradient_errors.items(), key=lambda item: -item[1])
        state = [(f"state {name}", error) for name, error in self.state_errors.items()]
        form = ".0f" if self.compares_bits else ".1e"
        return [
            (name, f"{error:{form}}", "<-" * (error > self.tolerance))
            for name, error in [("loss", self.loss_error), *gradients[:_MAX_GRADIENTS], *state]
        ]

    def _notes(self) -> list[str]:
        notes = []
        if len(self.gradient_errors) > _MAX_GRADIENTS:
            notes.append(f"... and {len(self.gradient_errors) - _MAX_GRADIENTS} more")
        if self.first_difference is not None:
            first = "first difference" if self.compares_bits else "first output that differs"
            if self.compares_bits and len(self.devices) == 1:
                first = "this module is not deterministic"
            notes.append(f"{first}: {self.first_difference}")
        notes += [f"known reason: {reason}" for reason in self.reasons]
        if not self.equal and not self.reasons and not self.compares_bits:
            notes.append("no known reason: compare in float64, then see docs/troubleshooting.md")
        return notes + [f"warning: {warning}" for warning in self.warnings]
