"""The memory of a rank under ``DistributedDataParallel``, for ``parallelize(strategy="auto")``."""

import warnings

from ..distributed import strategy
from .estimation import estimate
from .step_request import kind_of

__all__: list[str] = []


@strategy.register
def bytes_of_rank(question: strategy.Question) -> int:
    """Returns the bytes that one update reserves on a rank, by :func:`estimate`."""
    assert question.example is not None
    inputs, targets = question.example
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        report = estimate(
            question.module,
            question.criterion,
            inputs,
            targets,
            layout="ddp",
            devices=question.ranks,
            precision=question.precision.name,
            device_kind=kind_of(question.device).name,
            dim=question.dim,
        )
    return max(report.reserved)
