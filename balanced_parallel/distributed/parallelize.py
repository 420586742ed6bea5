"""The same script in one process or, under torchrun, in one process per device."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from ..batch.dims import Dims, check_dim
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion
from ..replicas.model import DataParallelModel
from ..replicas.module_checks import check_module, refuse_rescaled, rescaled_embeddings
from ..replicas.sync_batchnorm import use_torch_sync_batchnorm
from ..runtime.collectives import world_size
from ..runtime.devices import DeviceLike
from ..runtime.precision import Precision
from ..training.settings import describe_criterion
from .agreement import check_agreement
from .ddp import DistributedModel
from .fsdp import ShardedModel
from .process_group import join_process_group, rank_device
from .strategy import Question, Strategy, check_strategy, choose_strategy, make_mesh
from .torchrun import TorchrunEnvironment

__all__: list[str] = []

Model = DataParallelModel | DistributedModel | ShardedModel


@overload
def parallelize(
    module: nn.Module,
    criterion: None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    dim: int = 0,
    precision: str | Precision | None = None,
    split: Sequence[float] | None = None,
    in_dims: Dims = None,
    out_dims: Dims = None,
    strategy: Strategy = "auto",
    compress: Literal["bf16", "fp16"] | None = None,
    example: tuple[Any, Any] | None = None,
) -> Model: ...


@overload
def parallelize(
    module: nn.Module,
    criterion: Criterion,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    dim: int = 0,
    weight: Callable[..., Any] | str | None = None,
    precision: str | Precision | None = None,
    split: Sequence[float] | None = None,
    in_dims: Dims = None,
    out_dims: Dims = None,
    strategy: Strategy = "auto",
    compress: Literal["bf16", "fp16"] | None = None,
    example: tuple[Any, Any] | None = None,
) -> tuple[Model, DataParallelCriterion]: ...


def parallelize(
    module: nn.Module,
    criterion: Criterion | None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    dim: int = 0,
    weight: Callable[..., Any] | str | None = None,
    precision: str | Precision | None = None,
    split: Sequence[float] | None = None,
    in_dims: Dims = None,
    out_dims: Dims = None,
    strategy: Strategy = "auto",
    compress: Literal["bf16", "fp16"] | None = None,
    example: tuple[Any, Any] | None = None,
) -> Model | tuple[Model, DataParallelCriterion]:
    """Wraps a model and a criterion for all devices, in one process or under torchrun, with the same losses and gradients.

    In one process the result is a :class:`DataParallelModel` and a :class:`DataParallelCriterion`, also if torchrun started only
    one. With more ranks the model is torch's ``DistributedDataParallel`` on this rank's device, or sharded over the ranks by
    torch's ``fully_shard`` (FSDP2). Its forward returns a list too, and the value of the criterion is the loss over all ranks.
    If torchrun's environment is set and no process group is running, one is started (NCCL for CUDA, gloo for CPUs) and ended at
    exit.

    Args:
        module: moved to the first device, or to this rank's. Under torchrun, a module without parameters to train, such as a
            frozen teacher, becomes a :class:`DataParallelModel` on this rank's device.
        criterion: a module or a function, or a :class:`DataParallelCriterion` with its own settings; ``None`` returns the model
            alone.
        device_ids: as in :class:`DataParallelModel`; under torchrun, one device for each process of this machine.
        dim, precision, split, in_dims, out_dims: as in :class:`DataParallelModel`.
        weight: as in :class:`DataParallelCriterion`.
        strategy: ``"replicas"`` in one process; ``"ddp"`` or ``"fsdp"`` under torchrun. ``"auto"`` is ``"fsdp"`` if the model is
            too large for one device, and the reason is logged. It asks :func:`memory.estimate` for an update of ``example``, and
            compares with the free memory of the device. Without an example it compares parameters, gradients and AdamW's state
            with half of the free memory, and the other half is for activations. FSDP over several hosts shards over the devices
            of each host and copies over the hosts, if a host has room for a copy.
        compress: ``"bf16"`` or ``"fp16"`` reduces the gradients of ``"ddp"`` in half the bytes, by torch's communication hooks.
            ``"auto"`` is ``"ddp"`` then.
        example: inputs and targets of one rank, for ``"auto"``. Those of rank 0 count.

    Returns:
        The model and the criterion, or the model alone if no criterion was given.

    Raises:
        ValueError: the strategy is not possible here; torchrun's environment is incomplete, contradicts the running process
            group, or has more processes than devices; the ranks differ in versions, code, module or settings; ``split`` was given
            under torchrun, where each rank passes its own rows; or ``weight`` was given for a :class:`DataParallelCriterion`. At
            the forward of a rank: a parameter that was frozen before requires a gradient.
        RuntimeError: the ranks cannot meet at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Example:
        >>> model, criterion = parallelize(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), ["cpu"] * 2)
        >>> outputs = model(torch.zeros(5, 4))
        >>> [tuple(output.shape) for output in outputs]
        [(3, 3), (2, 3)]
        >>> criterion(outputs, torch.tensor([0, 1, 2, 0, -100])).shape  # the mean over 4 of 5 rows
        torch.Size([])
    """
    check_module(module)
    check_dim(dim)
    environment = TorchrunEnvironment.detect()
    check_strategy(strategy, compress, environment)
    wrapped = None if criterion is None else _wrap(criterion, dim, weight, precision)
    settings: dict[str, Any] = {"dim": dim, "precision": precision, "in_dims": in_dims, "out_dims": out_dims}
    if environment is None and world_size() > 1:
        raise ValueError(
            f"a process group with {world_size()} ranks is running, but torchrun's environment is not there: start the "
            "script with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if environment is None:
        model: Model = DataParallelModel(module, device_ids, split=split, **settings)
    else:
        if split is not None:
            raise ValueError(f"split={split!r} was given under torchrun, expected None: each rank passes its own rows")
        device = rank_device(environment, device_ids)
        join_process_group(environment, device)
        model = _rank_model(module, wrapped, device, environment, settings, strategy, compress, example)
    return model if wrapped is None else (model, wrapped)


def _wrap(
    criterion: Criterion, dim: int, weight: Callable[..., Any] | str | None, precision: str | Precision | None
) -> DataParallelCriterion:
    if not isinstance(criterion, DataParallelCriterion):
        return DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision)
    if weight is not None:
        raise ValueError("weight= was given beside a DataParallelCriterion, expected it among that criterion's own settings")
    return criterion


def _rank_model(
    module: nn.Module,
    criterion: DataParallelCriterion | None,
    device: torch.device,
    environment: TorchrunEnvironment,
    settings: dict[str, Any],
    strategy: Strategy,
    compress: str | None,
    example: tuple[Any, Any] | None,
) -> Model:
    is_frozen = criterion is None and not any(parameter.requires_grad for parameter in module.parameters())
    if world_size() == 1 or (is_frozen and strategy != "fsdp"):
        return DataParallelModel(module, [device], **settings)
    compared = {name: repr(value) for name, value in {**settings, "strategy": strategy, "compress": compress}.items()}
    compared["precision"] = Precision(settings["precision"] or "fp32").name
    check_agreement(module, compared | describe_criterion(criterion))
    refuse_rescaled(rescaled_embeddings(module))
    plain = None if criterion is None else criterion.module
    if strategy == "auto" and compress is None:
        precision = Precision(settings["precision"] or "fp32")
        question = Question(module, plain, example, world_size(), device, precision, settings["dim"])
        strategy = choose_strategy(question, environment)
    if device.type == "cuda":
        use_torch_sync_batchnorm(module)
    if strategy == "fsdp":
        return ShardedModel(module, make_mesh(module, device, environment), device, **settings)
    if criterion is not None:
        plain = criterion.to(device).module
    model = DistributedModel(module.to(device), device, criterion=plain, **settings)
    if compress is not None:
        model.compress_gradients(compress)
    return model
