"""An existing :class:`TrainStep` as a request to trace, and the bytes that its tensors use now."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..distributed.fsdp import ShardedModel
from ..loss.criterion import DataParallelCriterion
from ..optim.balanced import BalancedOptimizer
from ..replicas.model import DataParallelModel
from ..runtime.collectives import world_size
from ..runtime.tensors import get_gradient, storage_id
from ..runtime.trees import leaves
from ..savings.gradient_release import release_of
from ..training.step import TrainStep
from ..training.update import each_optimizer
from .device_specs import DeviceKind, find_kind
from .request import make_request
from .trace.existing_step import ExistingOptimizers
from .trace.strategies import ReplicasOfStep
from .trace.traced_request import Request

__all__: list[str] = []


def request_of_step(step: TrainStep, inputs: Any, targets: Any) -> Request:
    """Returns the request of one update of a step, with the whole batch in one micro-batch.

    Raises:
        ValueError: the inputs have no rows, or rows in different dimensions; the model is sharded.
    """
    model: Any = step.model
    criterion = step.criterion
    is_local = isinstance(model, DataParallelModel)
    if isinstance(model, ShardedModel):
        raise ValueError(
            "the model is sharded, and its parameters are parts on each rank: call memory.estimate(layout='fsdp') with the "
            "module before parallelize, and set step.micro_batch_size"
        )
    if model.in_dims is not None or criterion.in_dims is not None or criterion.dim not in (None, model.dim):
        raise ValueError(
            "the rows of the inputs and the targets are in different dimensions (in_dims=), expected one dim= for all: call "
            "memory.estimate with a function of one batch, and set step.micro_batch_size"
        )
    kind = kind_of(model.devices[0])
    optimizers = each_optimizer(step.optimizer)
    of_model = model.precision.name
    request = make_request(
        model.module,
        criterion if is_local or criterion.is_coupled else criterion.module,
        inputs,
        targets,
        optimizer=torch.optim.SGD,
        precision=step.precision.name if of_model == "fp32" else of_model,
        layout="replicas" if is_local else "ddp",
        devices=len(model.devices) if is_local else world_size(),
        device_kind=kind.name,
        dim=model.dim,
        scalar=None,
        balanced_optimizer=any(isinstance(one, BalancedOptimizer) for one in optimizers),
        split=model.split,
        savings=["release_gradients_in_backward"] if any(map(release_of, optimizers)) else [],
    )
    return dataclasses.replace(
        request,
        optimizer=ExistingOptimizers(optimizers, foreach=kind.like_cuda),
        layout=ReplicasOfStep if is_local else request.layout,
    )


def kind_of(device: torch.device) -> DeviceKind:
    """Returns the kind of a device."""
    return find_kind("cpu" if device.type == "cpu" else None)


def bytes_in_use(step: TrainStep) -> Counter[torch.device]:
    """Returns the bytes of a step's tensors on each device: parameters, copies, buffers, gradients and optimizer state."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in _tensors_of(step):
        storage = tensor.untyped_storage()
        unit = kind_of(tensor.device).rounds_to
        sizes[tensor.device, storage_id(storage)] = -(-storage.nbytes() // unit) * unit
    total: Counter[torch.device] = Counter()
    for (device, _), size in sizes.items():
        total[device] += size
    return total


def _tensors_of(step: TrainStep) -> Iterator[Tensor]:
    parts: list[Any] = [step.model, step.criterion]
    parameters: list[Tensor] = [parameter for part in parts for parameter in part.parameters()]
    for part in parts:
        yield from part.buffers()
        if isinstance(part, (DataParallelModel, DataParallelCriterion)):
            yield from (copy for copies in part.replicas.copies.by_device.values() for copy in copies)
            for bucket in part.replicas.gradients.buckets:
                yield from (one for gradients in bucket.held for one in gradients if one is not None)
    for optimizer in each_optimizer(step.optimizer):
        inner = optimizer.shards.inner if isinstance(optimizer, BalancedOptimizer) else optimizer
        parameters += [parameter for group in inner.param_groups for parameter in group["params"]]
        yield from (leaf for state in inner.state.values() for leaf in leaves(state) if isinstance(leaf, Tensor))
    for parameter in parameters:
        yield parameter
        if parameter.is_leaf and (gradient := get_gradient(parameter)) is not None:
            yield gradient
