"""The savings that a plan knows: those of ``savings/``, those to apply by hand, and which updates
they suit.

:data:`PLANNED` has them in their order. ``memory.plan`` tries them, the command ``tricks`` measures
each, and ``memory.fit`` advises them. A saving without an entry is never tried.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn, optim

from ..savings import LinearCrossEntropy
from ..savings import saving as applied
from ..savings.checkpointing import has_parts
from ..savings.saving import Saving
from .problem import Request
from .trace.layouts import FSDP, OptimizerChoice

# A plan tries layouts over the devices, savings that are exact, other arithmetic, and other
# optimizers. It only names savings by hand, which change the user's program.
Stage = Literal["layout", "exact", "arithmetic", "optimizer", "by hand"]


@dataclass(frozen=True)
class PlannedSaving:
    """A saving as a plan sees it.

    Attributes:
        saving: its name, its cost, and the functions that apply it.
        stage: where a plan tries it.
        suits: returns True for a request that it can be added to.
        change: returns the request with it. ``None`` for a function, whose name is added, and for
            what no trace can run.
        instead_of: the saving that it replaces.
        line: the line of a program that applies it. Without one, the name is an argument of the
            optimizer.
    """

    saving: Saving
    stage: Stage = "exact"
    suits: Callable[[Request], bool] = lambda request: True
    change: Callable[[Request], Request] | None = None
    instead_of: Saving | None = None
    line: str = ""

    def apply(self, request: Request) -> Request | None:
        """Returns the request with the saving, or None if it does not suit it, or is applied
        already.
        """
        if not self.suits(request):
            return None
        if self.change is not None:
            return self.change(request)
        if not self.saving.is_function or self.saving.name in request.savings:
            return None
        return replace(request, savings=sorted_names([*request.savings, self.saving.name]))


def with_savings(request: Request, savings: Iterable[PlannedSaving]) -> Request | None:
    """Returns the request with all of ``savings``, or None if one of them does not suit it."""
    for saving in savings:
        if (changed := saving.apply(request)) is None:
            return None
        request = changed
    return request


def savings_of(*stages: Stage) -> list[PlannedSaving]:
    """Returns the savings of these stages, in their order."""
    return [planned for planned in PLANNED if planned.stage in stages]


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of functions in the order in which they are applied, if a trace can apply
    all of them.
    """
    requested = [names] if isinstance(names, str) else list(names)
    functions = [saving.name for saving in applied.SAVINGS if saving.is_function]
    for name in requested:
        if name not in functions:
            raise ValueError(
                f"savings has {name!r}, expected functions of balanced_parallel.savings: {', '.join(functions)}"
            )
    return tuple(name for name in functions if name in requested)


def _is_divisible(request: Request) -> bool:
    """Returns True if several devices have the whole state of the optimizer each."""
    return request.devices > 1 and not request.balanced


def _shard(request: Request) -> Request:
    # Shards of matrices are not enough for Muon and others.
    balanced = request.optimizer.needs_whole_parameters
    return replace(request, layout=FSDP, split=None, balanced=balanced)


def _makes_temporaries(classes: tuple[type[optim.Optimizer], ...], request: Request) -> bool:
    """Returns True if the update makes one of ``classes``, which on a GPU have temporaries of all
    parameters by default.
    """
    choice = request.optimizer
    if not isinstance(choice, OptimizerChoice) or choice.plain_make not in classes:
        return False
    return request.kind.like_cuda and choice.settings.keys().isdisjoint(["fused", "foreach"])


def _heads(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if type(child) is nn.Linear and name]


def _remove_logits(request: Request) -> Request:
    """Puts the last linear layer into a :class:`LinearCrossEntropy`."""
    module = copy.deepcopy(request.module)
    place = _heads(module)[-1]
    path, _, name = place.rpartition(".")
    head: Any = module.get_submodule(place)
    setattr(module.get_submodule(path), name, nn.Identity())
    criterion = LinearCrossEntropy(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta"
    )
    return replace(request, module=module, criterion=criterion)


def _other_optimizer(name: str) -> Saving:
    return Saving(f"another optimizer: {name}", name, "another result", "another optimizer")


def _smaller(make: type[optim.Optimizer]) -> PlannedSaving:
    """Returns the saving of an optimizer, for others with more state.

    Those of an existing step stay.
    """

    def suits(request: Request) -> bool:
        choice = request.optimizer
        least = OptimizerChoice(make).state_bytes(2**20)
        return isinstance(choice, OptimizerChoice) and choice.state_bytes(2**20) > least

    def change(request: Request) -> Request:
        return replace(request, optimizer=OptimizerChoice(make))

    return PlannedSaving(_other_optimizer(make.__name__), "optimizer", suits, change)


SPREAD = PlannedSaving(
    applied.BALANCED,
    "layout",
    suits=_is_divisible,
    change=lambda request: replace(request, balanced=True),
)
ON_HOST = PlannedSaving(
    applied.OFFLOAD_OPTIMIZER,
    "layout",
    suits=lambda request: (
        request.kind.like_cuda and not request.balanced and not request.layout.is_sharded
    ),
    line="savings.offload_optimizer(optimizer)",
)
SHARDS = PlannedSaving(
    applied.SHARDED,
    "layout",
    suits=lambda request: _is_divisible(request) and not request.layout.is_sharded,
    change=_shard,
)
CHECKPOINTS = PlannedSaving(
    applied.CHECKPOINT,
    suits=lambda request: has_parts(request.module),
    instead_of=applied.SELECTIVE,
    line="savings.checkpoint_activations(module)",
)
OFFLOADED = PlannedSaving(
    applied.OFFLOAD,
    suits=lambda request: request.kind.like_cuda,  # nothing is offloaded from a CPU
    line="with savings.offload_activations():",
)
PLANNED = (
    PlannedSaving(
        Saving("2 micro-batches", "micro-batches", "smaller kernels"),
        "by hand",
        change=lambda request: replace(request, micro_batches=2),
    ),
    SPREAD,
    ON_HOST,
    SHARDS,
    PlannedSaving(
        applied.FUSED,
        suits=functools.partial(_makes_temporaries, (optim.Adam, optim.AdamW, optim.Adagrad)),
    ),
    PlannedSaving(
        applied.ONE_BY_ONE,
        suits=functools.partial(
            _makes_temporaries,
            (optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta),
        ),
    ),
    PlannedSaving(
        applied.LOGITS,
        suits=lambda request: "labels" in request.batch.inputs.kwargs,
        line="savings.replace_lm_head(module)",
    ),
    PlannedSaving(
        Saving("LinearCrossEntropy", applied.LOGITS.option, applied.LOGITS.cost),
        "by hand",
        suits=lambda request: (
            type(request.criterion) is nn.CrossEntropyLoss and bool(_heads(request.module))
        ),
        change=_remove_logits,
    ),
    PlannedSaving(
        applied.SELECTIVE,
        suits=lambda request: has_parts(request.module),
        line="savings.checkpoint_activations(module, selective=True)",
    ),
    CHECKPOINTS,
    PlannedSaving(
        Saving(
            "nn.LeakyReLU(inplace=True)",
            "activations in place",
            "an error or other numbers where something else reads that input",
        ),
        "by hand",
    ),
    PlannedSaving(
        Saving(
            "register_post_accumulate_grad_hook",
            "updates in the backward",
            "no clipping, no accumulation",
        ),
        "by hand",
    ),
    OFFLOADED,
    PlannedSaving(
        applied.BF16,
        "arithmetic",
        suits=lambda request: request.precision == "fp32",
        change=lambda request: replace(request, precision="bf16"),
    ),
    PlannedSaving(
        applied.BF16_PARAMETERS,
        "arithmetic",
        suits=lambda request: (
            request.precision != "fp16"
            and any(each.dtype == torch.float32 for each in request.module.parameters())
        ),
        line="module.to(torch.bfloat16)",
    ),
    _smaller(optim.SGD),
    _smaller(optim.Adafactor),
    PlannedSaving(_other_optimizer("AdamW8bit"), "optimizer"),
)
