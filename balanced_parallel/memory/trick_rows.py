"""Rows of the table of tricks, and the comparisons of two steps that they need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .extrapolation import Lines
from .trace.tracer import Job, Trace, reason_of, try_traces

__all__: list[str] = []


@dataclass(frozen=True)
class Trick:
    """One row of the table.

    Attributes:
        saves: bytes of the busiest device at its peak; None if the trick does not apply to this model.
        cost: what is lost.
    """

    name: str
    saves: int | None
    cost: str


@dataclass(frozen=True)
class Comparison:
    """A row whose bytes are the difference of two peaks.

    Attributes:
        make: returns the step without the trick and the step with it, each to be traced, or its peak if that is known.
    """

    name: str
    cost: str
    make: Callable[[], list[Job | int]]

    def steps(self) -> list[Job | int] | str:
        """Returns the two steps, or the reason why the model does not take the trick."""
        try:
            return self.make()
        except Exception as error:  # noqa: BLE001 - a model may raise anything where a trick does not suit it
            return reason_of(error)


def measure_rows(rows: Sequence[Trick | Comparison]) -> Iterator[Trick]:
    """Traces all comparisons together."""
    all_steps = [[] if isinstance(row, Trick) else row.steps() for row in rows]
    jobs = [step for steps in all_steps if isinstance(steps, list) for step in steps if isinstance(step, tuple)]
    peaks = iter(list(map(_peak, jobs, try_traces(jobs))))
    for row, steps in zip(rows, all_steps, strict=True):
        if isinstance(row, Trick):
            yield row
            continue
        found = [next(peaks) if isinstance(step, tuple) else step for step in steps] if isinstance(steps, list) else [steps]
        reason = next((one for one in found if isinstance(one, str)), None)
        if reason is not None:
            yield Trick(row.name, None, f"not for this model: {reason[:80]}")
        else:
            before, after = found
            yield Trick(row.name, int(before) - int(after), row.cost)


def _peak(job: Job, trace: Trace | str) -> int | str:
    """Returns the peak of the busiest device, or the reason why it is not known."""
    if isinstance(trace, str):
        return trace
    request, _ = job
    lines = Lines.exact(trace, request)
    return max(lines.peak(i) for i in request.layout.traced_devices(request.devices))
