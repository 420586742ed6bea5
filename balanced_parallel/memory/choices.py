"""One way to run an effective batch, with its memory per device and its cost: a row of a plan's table."""

from dataclasses import dataclass
from typing import Any

from ..runtime.byte_sizes import format_bytes

__all__: list[str] = []


@dataclass(frozen=True)
class Choice:
    """One row of the table. Sizes are bytes, one entry per device.

    Attributes:
        micro_batch_size: the most rows of a device in one forward; 0 if not even one row fits.
        micro_batches: number per update.
        split: the weight of each device; None for equal shares.
        checkpoint: names of the modules whose activations are recomputed in the backward.
        peak: maximum in use. ``reserved`` is the memory that the allocator takes from the device for it.
        saved: bytes below the peak of plain replicas that run the whole batch at once.
        recomputed: operations that run twice, as a fraction of those of a step without recomputation.
        traffic: bytes to and from the busiest device per update, for parameters and gradients.
        changes_result: the loss and the gradients are computed in another precision.
        statistics: rows that batch norm takes its statistics from: ``"replica"`` or ``"micro-batch"``; None for all rows.
        optimizer: name of an optimizer in the place of the given one, which makes this an alternative that is never chosen.
        inplace: names of the activations that are in place.
        offload: activations wait for the backward in the memory of the host.
        no_logits: a language model computes its loss without its logits, by :func:`replace_lm_head`.
        released: each gradient is applied and freed in the backward, by :func:`release_gradients_in_backward`. It needs the
            whole batch in one micro-batch, and gradients that are not clipped.
    """

    name: str
    precision: str
    balanced_optimizer: bool
    checkpoint: tuple[str, ...]
    micro_batch_size: int
    micro_batches: int
    split: tuple[float, ...] | None
    peak: tuple[int, ...]
    reserved: tuple[int, ...]
    saved: int
    recomputed: float
    traffic: int
    changes_result: bool
    fits: bool
    statistics: str | None = None
    optimizer: str | None = None
    inplace: tuple[str, ...] = ()
    offload: bool = False
    no_logits: bool = False
    released: bool = False

    @property
    def exact(self) -> bool:
        """True if loss, gradients and update are those of the plain program on the whole batch, up to rounding."""
        return not self.changes_result and self.statistics is None and self.optimizer is None

    @property
    def cost(self) -> tuple[Any, ...]:
        """Orders choices: exact ones first, then by operations, micro-batches and traffic."""
        return self.optimizer is not None, self.changes_result, self.recomputed, self.micro_batches, self.traffic


def choice_of(values: dict[str, Any]) -> Choice:
    """Returns the choice that was written as JSON."""
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Choice(**settings)


def row_of(choice: Choice) -> list[str]:
    """Returns the cells of a choice in the table of a plan."""
    rows = " + ".join(f"{weight:.0f}" for weight in choice.split) if choice.split else f"{choice.micro_batch_size} per device"
    return [
        choice.name,
        f"{rows} x {choice.micro_batches}" if choice.micro_batches else "not at once" if choice.released else "not one row",
        _of_devices(choice.peak, choice.split),
        _of_devices(choice.reserved, choice.split),
        format_bytes(choice.saved),
        f"{choice.recomputed:.0%}",
        format_bytes(choice.traffic),
        _result_of(choice),
        "yes" if choice.fits else "no",
    ]


def _of_devices(sizes: tuple[int, ...], split: tuple[float, ...] | None) -> str:
    """Returns the size of each of unequal devices, or the largest."""
    return " + ".join(map(format_bytes, sizes)) if split else format_bytes(max(sizes))


def _result_of(choice: Choice) -> str:
    differences = ["other arithmetic"] * choice.changes_result + ["another optimizer"] * (choice.optimizer is not None)
    differences += [f"batch norm by {choice.statistics}"] if choice.statistics else []
    return ", ".join(differences) or "exact"
