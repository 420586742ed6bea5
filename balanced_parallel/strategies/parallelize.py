"""``parallelize``: the same script in one process or, under torchrun, in one process per device.

The strategy is replicas in one process, ``DistributedDataParallel`` or FSDP2 over ranks.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..batch.containers import Dims, check_dim
from ..batch.rows import ParallelModel
from ..loss.copies import Criterion
from ..loss.criterion import DataParallelCriterion
from ..replicas.batchnorm import use_torch_sync_batchnorm
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import check_module, refuse_rescaled
from ..replicas.recorded import Refresh, check_refresh
from ..runtime import collectives
from ..runtime.collectives import max_over_ranks, rank, world_size
from ..runtime.devices import DeviceLike, free_bytes, is_accelerator
from ..runtime.module_state import embeddings_of
from ..runtime.values import Precision, PrecisionName, format_bytes, naming_arguments
from ..training.settings import describe_criterion
from .ddp import DistributedModel
from .fsdp import ShardedModel
from .launch import TorchrunEnvironment, check_agreement, join_process_group, rank_device
from .ranks import RankModel, RowSettings

Strategy = Literal["auto", "replicas", "ddp", "fsdp"]
_log = logging.getLogger(__name__)


class RankModule(NamedTuple):
    """A module to train over the ranks of torchrun, with what a strategy needs to know of it."""

    module: nn.Module
    criterion: DataParallelCriterion | None
    device: torch.device  # the one of this rank
    mesh: DeviceMesh | None
    settings: RowSettings


class RankStrategy(NamedTuple):
    """A strategy over the ranks of torchrun."""

    wrap: Callable[[RankModule], RankModel]
    is_sharded: bool = False  # Each rank has parts of the parameters, frozen ones too.


def _replicate(on_rank: RankModule) -> RankModel:
    module, criterion, device, *_ = on_rank
    plain = None if criterion is None else criterion.to(device).module
    return DistributedModel(module.to(device), device, plain, **on_rank.settings)


def _shard(on_rank: RankModule) -> RankModel:
    module, _, device, mesh, settings = on_rank
    if mesh is None:
        mesh = init_device_mesh(device.type, (world_size(),), mesh_dim_names=("shards",))
    return ShardedModel(module, mesh, device, **settings)


OVER_RANKS = {"ddp": RankStrategy(_replicate), "fsdp": RankStrategy(_shard, is_sharded=True)}


class _Options(RowSettings, total=False):
    split: Sequence[float] | None
    refresh: Refresh
    strategy: Strategy
    mesh: DeviceMesh | None


@overload
def parallelize(
    module: nn.Module,
    criterion: None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    **options: Unpack[_Options],
) -> ParallelModel: ...


@overload
def parallelize(
    module: nn.Module,
    criterion: Criterion,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    weight: Callable[..., Any] | str | None = None,
    **options: Unpack[_Options],
) -> tuple[ParallelModel, DataParallelCriterion]: ...


@naming_arguments
def parallelize(
    module: nn.Module,
    criterion: Criterion | None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    dim: int = 0,
    weight: Callable[..., Any] | str | None = None,
    precision: PrecisionName | Precision | None = None,
    split: Sequence[float] | None = None,
    out_dims: Dims = None,
    refresh: Refresh = "recorded",
    strategy: Strategy = "auto",
    mesh: DeviceMesh | None = None,
) -> ParallelModel | tuple[ParallelModel, DataParallelCriterion]:
    """Wraps a model and a criterion for all devices, in one process or under torchrun, with the
    same losses and gradients.

    In one process the result is a :class:`DataParallelModel` and a :class:`DataParallelCriterion`.
    With more ranks the model is torch's ``DistributedDataParallel`` on this rank's device, or
    sharded over the ranks by torch's ``fully_shard`` (FSDP2). Its forward returns a list too, and
    the value of the criterion is the loss over all ranks. Under torchrun a process group is started
    (NCCL for CUDA, gloo for CPUs) if none is running, and ended at exit.

    Args:
        module: moved to the first device, or to this rank's. Under torchrun, a module without
            parameters to train, such as a frozen teacher, becomes a :class:`DataParallelModel` on
            this rank's device.
        criterion: a module or a function, or a :class:`DataParallelCriterion` with its own
            settings; ``None`` returns the model alone.
        device_ids: as in :class:`DataParallelModel`; under torchrun, one device for each process of
            this machine.
        dim, precision, split, out_dims: as in :class:`DataParallelModel`.
        refresh: as in :class:`DataParallelModel`. Ranks have no replicas, so it has no effect under
            torchrun.
        weight: as in :class:`DataParallelCriterion`.
        strategy: ``"replicas"`` in one process; ``"ddp"`` or ``"fsdp"`` under torchrun. ``"auto"``
            is ``"fsdp"`` if the model is too large for one device, and the reason is logged: it
            compares parameters, gradients and AdamW's state with half of the free memory of the
            device, and the other half is for activations, which :func:`memory.estimate` predicts.
        mesh: a ``DeviceMesh`` with the ranks that share a batch, such as ``mesh["data"]``, if
            others compute with the same rows (tensor or context parallelism); ``None`` is all
            ranks. It has one dimension, or for ``"fsdp"`` two: copies and shards. Each rank belongs
            to one such mesh, and all models of a program have the same.

    Returns:
        The model and the criterion, or the model alone if no criterion was given.

    Raises:
        ValueError: the strategy is not possible here; torchrun's environment is incomplete,
            contradicts the running process group, or has more processes than devices; the ranks
            differ in versions, code, module or settings; ``split`` was given under torchrun; or
            ``weight`` was given for a :class:`DataParallelCriterion`. At a forward: a parameter
            that was frozen before requires a gradient.
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
    check_refresh(refresh)
    environment = detect_ranks(strategy)
    wrapped = criterion if isinstance(criterion, DataParallelCriterion) else None
    if wrapped is not None and weight is not None:
        raise ValueError(
            "weight= was given beside a DataParallelCriterion, expected it among that criterion's own settings"
        )
    if wrapped is None and criterion is not None:
        wrapped = DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision)
    settings: RowSettings = {
        "dim": dim,
        "precision": precision,
        "out_dims": out_dims,
    }
    if environment is None:
        if world_size() > 1:
            raise ValueError(
                f"a process group with {world_size()} ranks is running, but torchrun's environment is not there: start the "
                "script with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
        if mesh is not None:
            raise ValueError(
                "mesh= was given in one process, expected None: it is for the ranks that torchrun starts"
            )
        model: ParallelModel = DataParallelModel(
            module, device_ids, split=split, refresh=refresh, **settings
        )
    else:
        if split is not None:
            raise ValueError(
                f"split={split!r} was given under torchrun, expected None: each rank passes its own rows"
            )
        device = rank_device(environment, device_ids)
        join_process_group(environment, device)
        collectives.share_batches(group_of(mesh, strategy))
        on_rank = RankModule(module, wrapped, device, mesh, settings)
        model = _rank_model(on_rank, strategy, environment.local_world_size)
    return model if wrapped is None else _Pair((model, wrapped))


class _Pair(tuple[ParallelModel, DataParallelCriterion]):
    """A model and a criterion. Used as a model, it says that it is both."""

    def __call__(self, *arguments: object, **kwargs: object) -> NoReturn:
        raise TypeError(_BOTH)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{_BOTH}, before .{name}")


_BOTH = "parallelize was given a criterion and returned a pair, expected model, criterion = parallelize(...)"


def _rank_model(on_rank: RankModule, strategy: str, local_ranks: int) -> ParallelModel:
    module, criterion, device, mesh, settings = on_rank
    is_frozen = criterion is None and not any(
        parameter.requires_grad for parameter in module.parameters()
    )
    if world_size() == 1 or (is_frozen and not _is_sharded(strategy)):
        return DataParallelModel(module, [device], **settings)
    compared = {name: repr(value) for name, value in {**settings, "strategy": strategy}.items()}
    compared["precision"] = Precision(settings["precision"] or "fp32").name
    check_agreement(module, compared | describe_criterion(criterion))
    refuse_rescaled(embeddings_of(module))
    if strategy == "auto":
        has_copies = mesh is not None and mesh.ndim == 2
        strategy = "fsdp" if has_copies else choose_strategy(module, device, local_ranks)
    if device.type == "cuda":
        use_torch_sync_batchnorm(module)
    model = OVER_RANKS[strategy].wrap(on_rank)
    if criterion is not None:
        model.share_state(criterion)
    return model


def _is_sharded(strategy: str) -> bool:
    return strategy in OVER_RANKS and OVER_RANKS[strategy].is_sharded


def group_of(mesh: DeviceMesh | None, strategy: str) -> collectives.Group:
    """Returns the process group of a device mesh; None for all ranks. All ranks call this."""
    if mesh is None:
        return None
    may_shard = strategy == "auto" or _is_sharded(strategy)
    if mesh.ndim > (2 if may_shard else 1):
        raise ValueError(
            f"mesh= has the dimensions {mesh.mesh_dim_names or mesh.ndim}, expected one, of the ranks that share a batch, as in "
            "mesh['data'], or two with strategy='fsdp': copies and shards"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    group: collectives.Group = dist.new_group(
        mesh.mesh.flatten().tolist(), use_local_synchronization=True
    )
    return group


def detect_ranks(strategy: str) -> TorchrunEnvironment | None:
    """Returns the environment of torchrun, or None in one process.

    Raises ``ValueError`` for a strategy that is unknown or not possible here.
    """
    environment = TorchrunEnvironment.detect()
    names = "auto", "replicas", *OVER_RANKS
    if strategy not in names:
        raise ValueError(f"strategy={strategy!r}, expected one of {', '.join(map(repr, names))}")
    if strategy in OVER_RANKS and environment is None:
        raise ValueError(
            f"strategy={strategy!r} in one process, expected 'auto' or 'replicas': it needs one process per device, which "
            "torchrun --nproc-per-node=gpu starts"
        )
    if strategy == "replicas" and environment is not None and environment.world_size > 1:
        ranks = environment.world_size
        raise ValueError(
            f"strategy='replicas' with {ranks} ranks, expected 'auto', {' or '.join(map(repr, OVER_RANKS))}, or no torchrun"
        )
    return environment


def choose_strategy(
    module: nn.Module, device: torch.device, local_ranks: int
) -> Literal["ddp", "fsdp"]:
    """Returns the strategy for ``"auto"`` with several ranks, the same on all of them, and logs the
    reason.

    ``local_ranks`` is the number of ranks on this machine, which share its memory on CPUs.
    """
    needed = state_bytes(module)
    limit = free_bytes(device) // 2
    if not is_accelerator(device):
        limit //= local_ranks
    strategy: Literal["ddp", "fsdp"] = "fsdp" if max_over_ranks(needed > limit) else "ddp"
    if rank() == 0:
        message = "strategy='auto' is %r: under 'ddp' a rank needs %s (parameters, gradients and AdamW's state) of %s"
        _log.info(message, strategy, format_bytes(needed), format_bytes(limit))
    return strategy


def state_bytes(module: nn.Module) -> int:
    """Returns the bytes of parameters and buffers, and of the gradients and AdamW's state of those
    that are trained.
    """
    parameters = list(module.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return sum(tensor.nbytes for tensor in (*parameters, *module.buffers())) + 3 * trained
