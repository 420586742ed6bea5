"""The strategy of :func:`parallelize`: replicas in one process, ``DistributedDataParallel`` or FSDP2 over ranks."""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..runtime.byte_sizes import format_bytes
from ..runtime.collectives import max_over_ranks, rank, world_size
from ..runtime.devices import free_bytes
from ..runtime.precision import Precision
from .torchrun import TorchrunEnvironment

__all__: list[str] = []

Strategy = Literal["auto", "replicas", "ddp", "fsdp"]
STRATEGIES = ("auto", "replicas", "ddp", "fsdp")

_log = logging.getLogger(__name__)


class Question(NamedTuple):
    """A model whose memory under ``DistributedDataParallel`` is asked for.

    Args:
        module, criterion: without wrappers.
        example: inputs and targets of one rank, if they are known.
        ranks: number of ranks.
        device: of this rank.
        precision: of the forward.
        dim: the dimension of the rows.
    """

    module: nn.Module
    criterion: Any
    example: tuple[Any, Any] | None
    ranks: int
    device: torch.device
    precision: Precision
    dim: int


Estimate = Callable[[Question], int]
_estimates: list[Estimate] = []


def register(estimate: Estimate) -> Estimate:
    """Registers the function that returns the bytes of an update. Its package is not imported here."""
    _estimates.append(estimate)
    return estimate


def check_strategy(strategy: str, compress: str | None, environment: TorchrunEnvironment | None) -> None:
    """Checks that the strategy is possible where the script runs.

    Raises:
        ValueError: it is unknown, needs torchrun, or does not work under torchrun; or ``compress`` is not for it.
    """
    ranks = 1 if environment is None else environment.world_size
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}, expected one of {', '.join(map(repr, STRATEGIES))}")
    if strategy in ("ddp", "fsdp") and environment is None:
        raise ValueError(
            f"strategy={strategy!r} in one process, expected 'auto' or 'replicas': it needs one process per device, which "
            "torchrun --nproc-per-node=gpu starts"
        )
    if strategy == "replicas" and ranks > 1:
        raise ValueError(
            f"strategy='replicas' with {ranks} ranks, expected 'auto', 'ddp' or 'fsdp': each process would train a model of its "
            "own; start the script without torchrun"
        )
    if compress not in (None, "bf16", "fp16"):
        raise ValueError(f"compress={compress!r}, expected 'bf16', 'fp16' or None")
    if compress is not None and strategy in ("replicas", "fsdp"):
        raise ValueError(
            f"compress={compress!r} with strategy={strategy!r}, expected strategy='ddp'; under 'fsdp', precision='bf16' "
            "all-gathers parameters in half the bytes"
        )
    if compress is not None and environment is None:
        raise ValueError(f"compress={compress!r} in one process, expected None: it is for the ranks that torchrun starts")


def choose_strategy(question: Question, environment: TorchrunEnvironment) -> Literal["ddp", "fsdp"]:
    """Returns the strategy for ``"auto"`` with several ranks, the same on all of them, and logs the reason."""
    limit = free_bytes(question.device)
    if question.device.type == "cpu":
        limit //= environment.local_world_size
    needed = max_over_ranks(_estimates[0](question) if question.example is not None and rank() == 0 else 0)
    known = "an update by memory.estimate"
    if not needed:
        needed, known, limit = state_bytes(question.module), "parameters, gradients and AdamW's state", limit // 2
    chosen: Literal["ddp", "fsdp"] = "fsdp" if max_over_ranks(needed > limit) else "ddp"
    if rank() == 0:
        sizes = format_bytes(needed), known, format_bytes(limit)
        _log.info("strategy='auto' is %r: under 'ddp' a rank needs %s (%s) of %s", chosen, *sizes)
    return chosen


def make_mesh(module: nn.Module, device: torch.device, environment: TorchrunEnvironment) -> Any:
    """Returns the device mesh of the ranks: shards over one host and copies over the hosts, if a host has room for a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks, local = world_size(), environment.local_world_size
    fits = True if device.type == "cpu" else state_bytes(module) // local <= free_bytes(device) // 2
    if 1 < local < ranks and ranks % local == 0 and not max_over_ranks(not fits):
        return init_device_mesh(device.type, (ranks // local, local), mesh_dim_names=("copies", "shards"))
    return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shards",))


def state_bytes(module: nn.Module) -> int:
    """Returns the bytes of parameters and buffers, and of the gradients and AdamW's state of those that are trained."""
    parameters = list(module.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return sum(tensor.nbytes for tensor in (*parameters, *module.buffers())) + 3 * trained
