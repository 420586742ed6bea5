"""``Saving``: a way to need less memory, as one object.

``SAVINGS`` has all that this package applies, in their order.

An out of memory error advises those that leave the result as it is. :func:`memory.plan` tries all
of them: ``memory/savings.py`` knows which updates they suit. docs/savings.md has a row for each.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from .checkpointing import checkpoint_activations
from .linear_cross_entropy import replace_lm_head
from .offloading import offload_activations, offload_optimizer

Result = Literal["exact", "other arithmetic", "another optimizer"]


@dataclass(frozen=True)
class Saving:
    """A way to need less memory.

    Attributes:
        name: the function, the class or the setting.
        option: its name in a plan.
        cost: in time and in numbers, as text.
        result: what becomes of loss, gradients and update.
        change_module: applies it to a module in place.
        change_optimizer: applies it to an optimizer in place.
        surround: makes a block around an update.
    """

    name: str
    option: str
    cost: str
    result: Result = "exact"
    change_module: Callable[[nn.Module], object] | None = None
    change_optimizer: Callable[[Optimizer], object] | None = None
    surround: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def is_function(self) -> bool:
        """True if it changes a module or an optimizer, or surrounds an update.

        Others are settings of a step.
        """
        return bool(self.change_module or self.change_optimizer or self.surround)


class Savings:
    """The savings of these names, which are applied together."""

    def __init__(self, names: Iterable[str]) -> None:
        savings = {saving.name: saving for saving in SAVINGS}
        self._savings = [savings[name] for name in names]

    def change_module(self, module: nn.Module) -> None:
        """Applies those that change a module."""
        for saving in self._savings:
            if saving.change_module:
                saving.change_module(module)

    def change_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Applies those that change an optimizer."""
        for optimizer, saving in itertools.product(optimizers, self._savings):
            if saving.change_optimizer:
                saving.change_optimizer(optimizer)

    @contextlib.contextmanager
    def around_update(self) -> Iterator[None]:
        """Applies those that surround an update."""
        with contextlib.ExitStack() as blocks:
            for saving in self._savings:
                if saving.surround:
                    blocks.enter_context(saving.surround())
            yield


def advice() -> str:
    """Returns the names of the savings that leave the result as it is, for an error."""
    return ", ".join(saving.name for saving in SAVINGS if saving.result == "exact")


def _use(kernels: Mapping[str, bool], optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update(kernels)


def use_bf16_parameters(module: nn.Module) -> None:
    """Converts parameters and buffers in place, as ``module.to(torch.bfloat16)``, which refuses the
    copies of a trace.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


BALANCED = Saving("BalancedOptimizer", "BalancedOptimizer", "traffic of the updated parameters")
OFFLOAD_OPTIMIZER = Saving(
    name="offload_optimizer",
    option="optimizer on the host",
    cost="traffic of gradients and parameters; the CPU updates",
    change_optimizer=offload_optimizer,
)
SHARDED = Saving('strategy="fsdp"', "FSDP2", "traffic of all parameters in every micro-batch")
FUSED = Saving(
    name="fused=True",
    option="fused optimizer",
    cost="nothing; Adam, AdamW and Adagrad of torch have it",
    change_optimizer=partial(_use, {"fused": True, "foreach": False}),
)
ONE_BY_ONE = Saving(
    name="foreach=False",
    option="optimizer of one parameter at a time",
    cost="more kernels in the update",
    change_optimizer=partial(_use, {"foreach": False}),
)
LOGITS = Saving(
    name="replace_lm_head",
    option="loss without logits",
    cost="nothing; the logits do not exist",
    change_module=replace_lm_head,
)
SELECTIVE = Saving(
    name="checkpoint_activations(selective=True)",
    option="selective checkpoints",
    cost="a second run of the cheap operations of these blocks",
    change_module=partial(checkpoint_activations, selective=True),
)
CHECKPOINT = Saving(
    name="checkpoint_activations",
    option="checkpointed blocks",
    cost="a second forward of these blocks",
    change_module=checkpoint_activations,
)
OFFLOAD = Saving(
    name="offload_activations",
    option="offloaded activations",
    cost="traffic to the host and back",
    surround=offload_activations,
)
BF16 = Saving('precision="bf16"', "bf16", "other arithmetic", "other arithmetic")
BF16_PARAMETERS = Saving(
    name="module.to(torch.bfloat16)",
    option="bf16 parameters",
    cost="updates of three digits: small ones are lost",
    result="other arithmetic",
    change_module=use_bf16_parameters,
)
# The order in which a plan tries them, and in which those that are functions are applied.
SAVINGS = (
    BALANCED,
    OFFLOAD_OPTIMIZER,
    SHARDED,
    FUSED,
    ONE_BY_ONE,
    LOGITS,
    SELECTIVE,
    CHECKPOINT,
    OFFLOAD,
    BF16,
    BF16_PARAMETERS,
)
