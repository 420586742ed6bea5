"""An optimizer whose state is sharded over ranks: torch's ``ZeroRedundancyOptimizer``."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.trees import map_tensors

__all__: list[str] = []


class RankShards:
    """Shards over the ranks of the running process group. Every rank calls each method.

    Args:
        groups: param groups.
        optimizer_class: the plain optimizer.
        defaults: settings of that optimizer.
    """

    def __init__(
        self, groups: list[dict[str, Any]], optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports torch._dynamo, which takes seconds

        self.inner = ZeroRedundancyOptimizer(groups, optimizer_class, **defaults)

    def collect(self) -> None:
        """Does nothing: the reducer has brought the gradients to the parameters."""

    def step(self) -> None:
        """Updates this rank's shards, and broadcasts them."""
        self.inner.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, its tensors on the CPU. Rank 0 collects and broadcasts it."""
        self.inner.consolidate_state_dict(to=0)
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            shared = [map_tensors(torch.Tensor.cpu, self.inner.state_dict())]
        dist.broadcast_object_list(shared, src=0)
        whole: dict[str, Any] = shared[0]
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over the same parameters."""
        self.inner.load_state_dict(dict(state_dict))
