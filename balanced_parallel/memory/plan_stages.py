"""The options of a plan in stages, the cheapest first."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..savings.activation_checkpointing import find_blocks
from .candidates import Option
from .small_optimizers import smaller_optimizers
from .trace.optimizer_choice import OptimizerChoice
from .trace.traced_request import Request
from .trace.tracer import Trace, try_traces

__all__: list[str] = []


def stages_of(request: Request, clips: bool) -> Iterator[list[Option]]:
    """Yields the options, the cheapest first. Gradients that are clipped are not released in the backward.

    Each stage costs more operations than the one before, or changes the result. It is traced only if nothing before it fits."""
    spread_state = [False, True] if request.devices > 1 else [False]
    blocks, precision = find_blocks(request.module), request.precision
    no_logits = _can_leave_logits_out(request)
    for used in dict.fromkeys((precision, "bf16" if precision == "fp32" else precision)):
        kwargs: dict[str, Any] = {"precision": used, "changes_result": used != precision, "no_logits": no_logits}
        if no_logits and used == precision:  # first the module as it is
            yield [Option(balanced, (), used, False) for balanced in spread_state]
        for names in ((), blocks) if blocks else ((),):
            yield [Option(balanced, names, **kwargs) for balanced in spread_state]
            if not names and any(getattr(part, "inplace", None) is False for part in request.module.modules()):
                yield [Option(balanced, names, inplace=True, **kwargs) for balanced in spread_state]
        yield [Option(balanced, blocks, offload=True, **kwargs) for balanced in spread_state]
        if not clips and used != "fp16":  # its scaler reads all gradients, too
            ways = dict.fromkeys([((), False), (blocks, False), (blocks, True)])
            yield [Option(False, names, offload=offload, released=True, **kwargs) for names, offload in ways]
    assert isinstance(request.optimizer, OptimizerChoice)
    others = smaller_optimizers(request.optimizer)
    if others:
        yield [Option(False, blocks, precision, False, other, no_logits=no_logits) for other in others]


def _can_leave_logits_out(request: Request) -> bool:
    """Returns True if the module is a language model that computes its loss, and nothing reads its logits."""
    if "labels" not in request.inputs.kwargs:
        return False
    (trace,) = try_traces([(dataclasses.replace(request, savings=("replace_lm_head",)), 2 * request.row_step)])
    return isinstance(trace, Trace)
