"""Optimizers over ranks: torch's ``ZeroRedundancyOptimizer``, and the plain one over the shards of FSDP2.

Every rank calls each method. A state dict has whole tensors, as that of the plain optimizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.collectives import batch_group, rank
from ..runtime.torch_private import is_sharded, map_tensors


class DTensorShards:
    """The plain optimizer over groups of ``DTensor``s. Its state is sharded as the parameters are."""

    def __init__(
        self, groups: list[dict[str, Any]], optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        self.inner = optimizer_class(groups, **defaults)

    def collect(self) -> None:
        """Does nothing: the backward has reduced the gradients."""

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of a parameter, that of a shard gathered from all ranks."""
        return None if parameter.grad is None else _whole(parameter.grad)

    def step(self) -> None:
        """Updates this rank's shards."""
        self.inner.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, its tensors on the CPU."""
        whole: dict[str, Any] = map_tensors(lambda tensor: _whole(tensor).cpu(), self.inner.state_dict())
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over the same parameters."""
        from torch.distributed.tensor import distribute_tensor

        def distribute(value: Any, like: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_sharded(value):
                return value
            value = value.clone()  # torch would go on with the caller's tensors
            has_elements = value.shape == like.shape and value.dim() > 0
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements) if has_elements else value

        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        state = {
            key: {name: distribute(value, parameters[key]) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        }
        self.inner.load_state_dict({**state_dict, "state": state})


class RankShards(DTensorShards):
    """State sharded over the ranks that share a batch. A step broadcasts the updated parameters."""

    def __init__(
        self, groups: list[dict[str, Any]], optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports torch._dynamo, which takes seconds

        group = batch_group()
        self.inner: Any = ZeroRedundancyOptimizer(groups, optimizer_class, process_group=group, **defaults)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, its tensors on the CPU. The first rank collects and broadcasts it."""
        group, is_first = batch_group(), rank() == 0
        self.inner.consolidate_state_dict(to=0)
        shared: list[Any] = [super().state_dict() if is_first else None]
        dist.broadcast_object_list(shared, group=group, group_src=0)
        whole: dict[str, Any] = shared[0]
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over the same parameters."""
        self.inner.load_state_dict(dict(state_dict))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole.detach()
