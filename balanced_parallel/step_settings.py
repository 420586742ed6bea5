"""Settings of a step, checked."""

from typing import Any

from .criterion import DataParallelCriterion
from .model import DataParallelModel
from .ranks import RankModel, world_size

__all__: list[str] = []


def check_step(model: Any, criterion: Any, micro_batch_size: Any, max_grad_norm: float | None) -> None:
    """Raises ``TypeError`` for a model or a criterion of another kind, ``ValueError`` for settings out of their range."""
    if not isinstance(model, DataParallelModel) and not isinstance(model, RankModel):
        raise TypeError(
            f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns"
        )
    if isinstance(model, DataParallelModel) and model.gather_outputs:
        raise TypeError("the model has gather_outputs=True, expected outputs that stay on their devices: leave it out")
    if not isinstance(criterion, DataParallelCriterion):
        raise TypeError(f"the criterion is a {type(criterion).__name__}, expected a DataParallelCriterion: wrap it in one")
    if world_size() > 1 and isinstance(model, DataParallelModel):
        raise TypeError(
            f"{world_size()} ranks are running, but a DataParallelModel does not reduce over ranks: "
            "use parallelize(module, criterion)"
        )
    if micro_batch_size is not None and (isinstance(micro_batch_size, (bool, str)) or micro_batch_size < 1):
        raise ValueError(f"micro_batch_size={micro_batch_size!r}, expected a positive number of rows per device, or None")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}, expected a positive number, or None for no clipping")
