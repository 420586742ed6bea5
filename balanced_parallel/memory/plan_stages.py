"""The options of a plan in stages, the cheapest first."""

from collections.abc import Iterator
from typing import Any

from ..savings.activation_checkpointing import find_blocks
from .candidates import Option
from .request import Request
from .small_optimizers import smaller_optimizers
from .trace.optimizer_choice import OptimizerChoice

__all__: list[str] = []


def stages_of(request: Request) -> Iterator[list[Option]]:
    """Yields the options, the cheapest first.

    Each stage costs more operations than the one before, or changes the result. It is traced only if nothing before it fits."""
    spread_state = [False, True] if request.devices > 1 else [False]
    blocks, precision = find_blocks(request.module), request.precision
    for used in dict.fromkeys((precision, "bf16" if precision == "fp32" else precision)):
        kwargs: dict[str, Any] = {"precision": used, "changes_result": used != precision}
        for names in ((), blocks) if blocks else ((),):
            yield [Option(balanced, names, **kwargs) for balanced in spread_state]
            if not names and any(getattr(part, "inplace", None) is False for part in request.module.modules()):
                yield [Option(balanced, names, inplace=True, **kwargs) for balanced in spread_state]
        yield [Option(balanced, blocks, offload=True, **kwargs) for balanced in spread_state]
    assert isinstance(request.optimizer, OptimizerChoice)
    others = smaller_optimizers(request.optimizer)
    if others:
        yield [Option(False, blocks, precision, False, other) for other in others]
