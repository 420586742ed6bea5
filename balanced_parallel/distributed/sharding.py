"""FSDP2's ``fully_shard`` on the repeated blocks of a module and on the rest of it.

module                          group of parameters, all-gathered and reduced together
embedding, norm, head    --->   root
blocks[0]                --->   blocks[0]
blocks[1]                --->   blocks[1]
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ..runtime.modules import BatchNorm
from ..runtime.precision import Precision
from ..runtime.tensors import is_sharded
from ..savings.activation_checkpointing import find_blocks

__all__: list[str] = []


def find_sharded_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a module that are sharded one by one.

    These are the modules that Hugging Face's ``_no_split_modules`` names, otherwise the repeated blocks, otherwise layers of one
    class in an ``nn.ModuleList`` or ``nn.Sequential``. A block that shares a parameter with another module belongs to the root.
    """
    inner = without_compilation(module)
    blocks = _named_blocks(inner) or [inner.get_submodule(name) for name in find_blocks(inner)] or _repeated_layers(inner)
    blocks = list(dict.fromkeys(without_compilation(block) for block in blocks))
    uses = _count_uses(inner)
    return [
        block for block in blocks if block is not inner and all(uses[key] == count for key, count in _count_uses(block).items())
    ]


def shard(module: nn.Module, mesh: Any, precision: Precision, prepare: Callable[[nn.Module], None]) -> list[nn.Module]:
    """Shards a module in place over the ranks of a mesh. Returns the sharded blocks, and the root at the end.

    Args:
        module: with parameters on any device.
        mesh: one dimension of shards, or a dimension of hosts with copies before it.
        precision: parameters are all-gathered and used in its dtype, except in blocks with batch norm. Gradients are reduced in
            float32.
        prepare: is called for each block, and for the root, before it is sharded.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # imports torch._dynamo, which takes seconds

    half = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
    units = [*find_sharded_blocks(module), without_compilation(module)]
    for unit in units:
        prepare(unit)
        # batch norm takes parameters of the dtype of its statistics; autocast casts in the other layers
        is_full = precision.dtype is None or any(isinstance(part, BatchNorm) for part in unit.modules())
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy() if is_full else half)
        cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return units


def without_compilation(module: nn.Module) -> nn.Module:
    """Returns the module inside of ``torch.compile(module)``, or ``module`` itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def _named_blocks(module: nn.Module) -> list[nn.Module]:
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found = [part for part in module.modules() if type(part).__name__ in names and part is not module]
    inside = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inside]


def _repeated_layers(module: nn.Module) -> list[nn.Module]:
    found = []
    for parent in module.modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            layers = [layer for layer in parent.children() if next(layer.parameters(recurse=False), None) is not None]
            kinds = Counter(map(type, layers))
            found += [layer for layer in layers if kinds[type(layer)] > 1]
    return found


def _count_uses(module: nn.Module) -> Counter[int]:
    parts = module.named_parameters(remove_duplicate=False)
    return Counter(id(parameter) for _, parameter in parts)


class StateOfRank0:
    """Moves a module to a device part by part, with the parameters and buffers of rank 0. No device has all of them at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: set[int] = set()

    def send(self, module: nn.Module) -> None:
        """Moves and sends the tensors of a part that are not on ``meta`` and were not sent before."""
        for part in module.modules():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if id(tensor) not in self._sent and not is_sharded(tensor) and not tensor.is_meta:
                    tensor.data = tensor.data.to(self._device)
                    dist.broadcast(tensor.data, 0)
                    self._sent.add(id(tensor))
