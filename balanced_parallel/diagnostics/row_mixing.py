"""Rows that forward mixes or reorders: the plain model runs on the whole batch and on its halves."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.dims import Dims
from ..batch.gathering import join
from ..batch.microbatches import as_arguments
from ..replicas.model import DataParallelModel
from ..replicas.sync_batchnorm import AllRowsBatchNorm
from ..runtime.modules import BatchNorm
from .module_recording import Program
from .output_difference import first_difference
from .random_draws import output_error

__all__: list[str] = []

Wrap = Callable[[nn.Module], DataParallelModel]


def mixed_rows(module: nn.Module, wrap: Wrap, inputs: Any, device: torch.device, limit: float) -> Iterator[str]:
    """Yields a reason if the outputs of the halves of a batch are not those of the whole batch.

    Args:
        module: a model that draws no random numbers.
        wrap: function that makes a model of two replicas on ``device``.
        inputs: the batch.
        device: device of the model.
        limit: largest relative error that counts as equal.
    """
    if any(isinstance(layer, BatchNorm) and _mixes_halves(layer) for layer in module.modules()):
        return  # they have a reason of their own
    plain, split, repeated = Program(module), Program(module), Program(module)
    whole = plain.forward(inputs, device, 0)
    repeated.forward(inputs, device, 0)
    if output_error(whole, repeated.forward(inputs, device, 0)) > limit:
        return  # written state changes the output, so each half changes that of the other
    model, arguments = wrap(split.module.to(device)), as_arguments(inputs)
    outputs = model(*arguments.inputs, **arguments.kwargs)
    joined = join(outputs, device, outputs.dim)  # gather refuses rows that may be in another order
    if output_error(whole, joined) <= limit:
        return
    difference = first_difference(plain, split, model.dim, limit)
    place = f"the model ({type(module).__name__})" if difference is None else difference.place
    if output_error(_sorted(whole, model.out_dims), _sorted(joined, model.out_dims)) <= limit:
        yield (
            f"the rows of the output are in another order than those of the inputs, from {place} on: flatten the output in the "
            "criterion, not in forward; for rows in another dimension give dim="
        )
    else:
        yield (
            f"forward mixes rows, in {place}: the output of a row depends on the other rows of its batch: move this part into "
            "the criterion, with whole=True; for a batch norm use convert_sync_batchnorm(module)"
        )


def _mixes_halves(layer: nn.Module) -> bool:
    return not isinstance(layer, AllRowsBatchNorm) and (layer.training or layer.running_mean is None)


def _sorted(output: Any, dims: Dims) -> Any:
    dim = dims if isinstance(dims, int) else 0

    def sort(leaf: Any) -> Any:
        return leaf.sort(dim).values if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() else leaf

    return nested.map_leaves(sort, output)
