"""``Saving``: a way to need less memory, as one object. The list of them is read by everything that names a saving.

``memory.plan`` tries them in their order, ``tricks`` measures each, an out of memory error and ``memory.fit`` advise them. A
new saving is one file in this folder with a ``Saving`` at its top level: the list finds it there. docs/savings.md has a row for
each. Those at the end of this file are settings of a step, and not functions: layouts, precision, optimizers.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn, optim

Result = Literal["exact", "other arithmetic", "another optimizer"]
# Where a plan tries it: how devices share the work, what leaves the result as it is, what rounds otherwise, other optimizers.
# The last kind is a change of the user's program, which a plan only names.
Stage = Literal["layout", "exact", "arithmetic", "optimizer", "by hand"]


@dataclass(frozen=True)
class Saving:
    """A way to need less memory.

    Attributes:
        name: the function, the class or the setting.
        option: its name in a plan.
        cost: in time and in numbers, as text.
        order: of savings that are applied together, the smallest first. A plan tries them in this order.
        stage: where a plan tries it.
        result: what becomes of loss, gradients and update.
        change: of a setting. Takes a step that is to be traced, and returns the fields of it that differ with the saving, or
            ``None`` if it does not suit the step or is applied already. A function adds its name to ``savings`` of the step.
        suits: of a function. Takes a step that is to be traced, and returns True if the function suits it.
        change_module: applies it to a module in place. A trace calls it with a fake copy.
        change_optimizer: applies it to an optimizer in place. In a trace, the second argument is the fake device of the host.
        surround: makes a block around an update. In a trace, its argument is the fake device of the host, otherwise ``None``.
        instead_of: names of savings that it replaces.
        lines: the lines of a program that apply it to ``module``. Without them, ``name`` is an argument of the optimizer.
        bytes_of: for a saving that no trace can run: the bytes that it saves, from the parts of the peak.
    """

    name: str
    option: str
    cost: str
    order: int
    stage: Stage = "exact"
    result: Result = "exact"
    change: Callable[[Any], Mapping[str, Any] | None] | None = None
    suits: Callable[[Any], bool] = lambda step: True
    change_module: Callable[[nn.Module], object] | None = None
    change_optimizer: Callable[[torch.optim.Optimizer, torch.device | None], object] | None = None
    surround: Callable[[torch.device | None], AbstractContextManager[Any]] | None = None
    instead_of: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    bytes_of: Callable[[Mapping[str, int]], int] | None = None

    def changes(self, step: Any) -> Mapping[str, Any] | None:
        """Returns the fields of a traced step that differ with the saving, or None if it does not suit the step."""
        if self.change is not None:
            return self.change(step)
        is_possible = self.is_function and self.name not in step.savings and self.suits(step)
        return {"savings": sorted_names([*step.savings, self.name])} if is_possible else None

    @property
    def is_function(self) -> bool:
        """True if it changes a module or an optimizer, or surrounds an update."""
        return any(each is not None for each in (self.change_module, self.change_optimizer, self.surround))


@functools.cache
def all_savings() -> tuple[Saving, ...]:
    """Returns the savings of all files of this folder, in their order."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f".{name}", __package__) for name in names]
    savings = [value for module in modules for value in vars(module).values() if isinstance(value, Saving)]
    return tuple(sorted(savings, key=lambda saving: saving.order))


def savings_of(*stages: Stage) -> list[Saving]:
    """Returns the savings of these stages, in their order."""
    return [saving for saving in all_savings() if saving.stage in stages]


def find_saving(name: str) -> Saving:
    """Returns the saving with this name."""
    return next(saving for saving in all_savings() if saving.name == name)


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of functions in the order in which they are applied, if a trace can apply all of them."""
    requested = [names] if isinstance(names, str) else list(names)
    functions = [saving.name for saving in all_savings() if saving.is_function]
    for name in requested:
        if name not in functions:
            raise ValueError(f"savings has {name!r}, expected functions of balanced_parallel.savings: {', '.join(functions)}")
    return tuple(name for name in functions if name in requested)


def change_module(module: nn.Module, names: Iterable[str]) -> None:
    """Applies the savings that change a module."""
    for saving in map(find_saving, names):
        if saving.change_module is not None:
            saving.change_module(module)


def change_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], names: Iterable[str], host: torch.device | None = None
) -> None:
    """Applies the savings that change an optimizer. In a trace, ``host`` is the fake device of the host."""
    for optimizer, saving in itertools.product(optimizers, map(find_saving, names)):
        if saving.change_optimizer is not None:
            saving.change_optimizer(optimizer, host)


@contextlib.contextmanager
def around_update(names: Iterable[str], host: torch.device | None = None) -> Iterator[None]:
    """Applies the savings that surround an update. In a trace, ``host`` is the fake device of the host."""
    with contextlib.ExitStack() as blocks:
        for saving in map(find_saving, names):
            if saving.surround is not None:
                blocks.enter_context(saving.surround(host))
        yield


def advice() -> str:
    """Returns the savings that leave the result as it is, with their costs, for an error."""
    return "; ".join(f"{saving.name} ({saving.cost})" for saving in savings_of("exact", "layout"))


def _spread_state(step: Any) -> Mapping[str, Any] | None:
    is_possible = step.devices > 1 and step.layout.takes_balanced_optimizer and not step.balanced
    return {"balanced": True} if is_possible else None


def _shard(step: Any) -> Mapping[str, Any] | None:
    is_possible = step.devices > 1 and not step.layout.is_sharded and not step.balanced
    balanced = getattr(step.optimizer, "needs_whole_parameters", False)  # of matrices
    return {"layout": "fsdp", "split": None, "balanced": balanced} if is_possible else None


def _makes_temporaries(classes: tuple[type[torch.optim.Optimizer], ...], step: Any) -> bool:
    """Returns True if the step makes one of ``classes``, which on a GPU have temporaries of all parameters by default."""
    choice = step.optimizer
    is_one = step.kind.like_cuda and getattr(choice, "plain_make", None) in classes
    return is_one and choice.settings.keys().isdisjoint(["fused", "foreach"])


def _use(kernels: Mapping[str, bool], optimizer: torch.optim.Optimizer, host: torch.device | None) -> None:
    for group in optimizer.param_groups:
        group.update(kernels)


def use_bf16_parameters(module: nn.Module) -> None:
    """Converts parameters and buffers in place, as ``module.to(torch.bfloat16)``, which refuses the copies of a trace."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


def _use_optimizer(make: Callable[..., torch.optim.Optimizer], smaller: tuple[str, ...], step: Any) -> Mapping[str, Any] | None:
    """Replaces an optimizer that is not among those with as little state. Those of an existing step stay."""
    choice = step.optimizer
    if not hasattr(choice, "make") or choice.name in smaller:
        return None
    if choice.name == "SGD" and not choice.plain([nn.Parameter(torch.zeros(1))])[0].param_groups[0]["momentum"]:
        return None
    return {"optimizer": dataclasses.replace(choice, make=make)}


MICRO_BATCHES = Saving(
    name="2 micro-batches",
    option="micro-batches",
    cost="smaller kernels",
    order=0,
    stage="by hand",
    change=lambda step: {"micro_batches": 2},
)
BALANCED = Saving(
    name="BalancedOptimizer",
    option="BalancedOptimizer",
    cost="traffic of the updated parameters",
    order=100,
    stage="layout",
    change=_spread_state,
)
SHARDED = Saving(
    name='strategy="fsdp"',
    option="FSDP2",
    cost="traffic of all parameters in every micro-batch",
    order=110,
    stage="layout",
    change=_shard,
)
_FUSED = Saving(
    name="fused=True",
    option="fused optimizer",
    cost="nothing; Adam, AdamW and Adagrad of torch have it",
    order=150,
    suits=functools.partial(_makes_temporaries, (optim.Adam, optim.AdamW, optim.Adagrad)),
    change_optimizer=functools.partial(_use, {"fused": True, "foreach": False}),
)
_ONE_BY_ONE = dataclasses.replace(
    _FUSED,
    name="foreach=False",
    option="optimizer of one parameter at a time",
    cost="more kernels in the update",
    order=160,
    suits=functools.partial(_makes_temporaries, (optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta)),
    change_optimizer=functools.partial(_use, {"foreach": False}),
)
BF16 = Saving(
    name='precision="bf16"',
    option="bf16",
    cost="other arithmetic",
    order=500,
    stage="arithmetic",
    result="other arithmetic",
    change=lambda step: {"precision": "bf16"} if step.precision == "fp32" else None,
)
BF16_PARAMETERS = Saving(
    name="module.to(torch.bfloat16)",
    option="bf16 parameters",
    cost="updates of three digits: small ones are lost",
    order=510,
    stage="arithmetic",
    result="other arithmetic",
    suits=lambda step: step.precision != "fp16" and any(each.dtype == torch.float32 for each in step.module.parameters()),
    change_module=use_bf16_parameters,
    lines=("module.to(torch.bfloat16)",),
)
_SGD = Saving(
    name="another optimizer: SGD",
    option="SGD",
    cost="another result",
    order=600,
    stage="optimizer",
    result="another optimizer",
    change=functools.partial(_use_optimizer, torch.optim.SGD, ()),
)
_ADAFACTOR = dataclasses.replace(
    _SGD,
    name="another optimizer: Adafactor",
    option="Adafactor",
    order=610,
    change=functools.partial(_use_optimizer, torch.optim.Adafactor, ("Adafactor",)),
)
_ADAMW8BIT = dataclasses.replace(
    _SGD,
    name="another optimizer: AdamW8bit",
    option="AdamW8bit",
    order=620,
    change=None,
    bytes_of=lambda parts: parts["optimizer state"] * 3 // 4,
)
_IN_PLACE = Saving(
    name="nn.LeakyReLU(inplace=True)",
    option="activations in place",
    cost="an error or other numbers where something else reads that input",
    order=320,
    stage="by hand",
)
_UPDATES_IN_BACKWARD = Saving(
    name="register_post_accumulate_grad_hook",
    option="updates in the backward",
    cost="no clipping, no accumulation",
    order=330,
    stage="by hand",
)
