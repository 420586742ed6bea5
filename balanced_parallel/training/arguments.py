"""Settings of a step, checked."""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from ..batch.dims import Dims
from ..loss.criterion import DataParallelCriterion
from ..replicas.model import DataParallelModel
from ..runtime.collectives import world_size

__all__: list[str] = []


class RankCompletion(Protocol):
    """What a reduction over ranks needs beside the gradients of a loss."""

    def roots(self) -> list[torch.Tensor]: ...
    def reducing(self, total: torch.Tensor, weight: torch.Tensor | float) -> contextlib.AbstractContextManager[None]: ...
    def take_totals(self) -> tuple[float, float]: ...


@runtime_checkable
class RankModel(Protocol):
    """One rank's model under torchrun, as :func:`parallelize` makes it."""

    devices: list[torch.device]
    split: None
    dim: int
    out_dims: Dims

    @property
    def completion(self) -> RankCompletion: ...
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any: ...
    def mark(self, arguments: Any) -> Any: ...
    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...
    def forward_nothing(self) -> torch.Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def modules(self) -> Iterator[torch.nn.Module]: ...


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
