"""One update of the parameters: gradients are unscaled, multiplied and clipped, then all optimizers step together."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..batch.nested import describe
from ..optim.sharded_parameters import ShardedParameter
from .accumulation import scale_gradients

__all__: list[str] = []

_Kind = TypeVar("_Kind")

Optimizers = Optimizer | Sequence[Optimizer]
Schedulers = LRScheduler | Sequence[LRScheduler]


def trained_tensors(model: nn.Module, criterion: nn.Module) -> dict[str, Tensor]:
    """The parameters of both by name, each once, and the buffers that require a gradient."""
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    learning = [(name, buffer) for name, buffer in both.named_buffers() if buffer.requires_grad]
    return {name.replace(".module", "", 1): tensor for name, tensor in (*both.named_parameters(), *learning)}


class Update:
    """One step of several optimizers on the gradients of one window.

    The optimizers are asked for their parameters anew in each update, because groups may be added at any time.

    Args:
        optimizers: those that step, together or not at all.
        trained: the parameters of model and criterion by name, each once.

    Raises:
        ValueError: two optimizers have the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], trained: Mapping[str, Tensor]) -> None:
        self.optimizers = optimizers
        self.trained = trained
        self.has_stepped = False
        if len(optimizers) > 1:
            self._refuse_common_parameters()

    @functools.cached_property
    def parameters(self) -> list[Tensor]:
        """Parameters of the optimizers, each once."""
        return list({id(parameter): parameter for one in self.optimizers for parameter in _parameters_of(one)}.values())

    @functools.cached_property
    def outside(self) -> list[Tensor]:
        """Trained parameters that are not in the optimizers: another one's, which is to find their true gradients."""
        known = set(map(id, self.parameters))
        return [one for one in self.trained.values() if id(one) not in known and not isinstance(one, ShardedParameter)]

    def forget_gradients(self) -> None:
        """Drops the gradients of all parameters, in the optimizers and outside."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for parameter in self.trained.values():
            if not isinstance(parameter, ShardedParameter):  # whose gradient lies with its optimizer
                parameter.grad = None

    @contextlib.contextmanager
    def unscaled(self, scaler: torch.amp.GradScaler | None) -> Iterator[None]:
        """Divides gradients by the scale. A failure in the block leaves the scaler as it was before: the step can be repeated."""
        if scaler is None:
            yield
            return
        try:
            scaler.unscale_(self._as_optimizer())
            if any(parameter.grad is not None for parameter in self.outside):  # asking for the scale waits for the device
                scale_gradients(self.outside, 1 / scaler.get_scale())
            yield
        except BaseException:
            scaler.update(scaler.get_scale())  # the scale it has: this forgets what was unscaled
            raise

    def multiply(self, factor: float, *, bucketed: bool) -> None:
        """Multiplies all gradients.

        Args:
            bucketed: gradients of the trained parameters are views of a reducer's buckets, and there are no others.
        """
        if bucketed:
            self._refuse_strangers()
            scale_gradients(self.trained.values(), factor, bucketed=True)
        elif factor != 1:
            scale_gradients([*self.parameters, *self.outside], factor)

    def clip(self, max_norm: float) -> None:
        """Clips the global norm over the parameters of all optimizers."""
        torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def take(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Steps, unless the scaler found an overflow. Returns whether it did."""
        if scaler is None:
            self.step()
        else:
            scaler.step(self._as_optimizer())
            scaler.update()
        return self.has_stepped

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters, for a scaler."""
        return [{"params": self.parameters}]

    def step(self) -> None:
        """Steps every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.has_stepped = True

    def _as_optimizer(self) -> Optimizer:
        """One optimizer to the scaler, which would decide for each on its own. After an overflow in one, clipping by the global
        norm leaves the others zeros to step with."""
        return cast(Optimizer, self)

    def _refuse_common_parameters(self) -> None:
        owner: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for parameter in _parameters_of(optimizer):
                first = owner.setdefault(id(parameter), number)
                if first != number:
                    names = [name for name, known in self.trained.items() if known is parameter]
                    raise ValueError(
                        f"{names[0] if names else 'a parameter'} of shape {tuple(parameter.shape)} is in the optimizers {first} "
                        f"and {number}, expected in one of them: both would update it"
                    )

    def _refuse_strangers(self) -> None:
        known = set(map(id, self.trained.values()))
        for stranger in [one for one in self.parameters if id(one) not in known and one.grad is not None]:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(stranger.shape)} with a gradient that the ranks would not "
                "share: make it part of the module or of the criterion that parallelize is given"
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def each_optimizer(given: Optimizers) -> list[Optimizer]:
    """The optimizers, where one or several are given.

    Raises:
        TypeError: something else.
        ValueError: none.
    """
    optimizers = _listed(given, Optimizer, "optimizer")
    if not optimizers:
        raise ValueError("no optimizer was given, expected one or more")
    return optimizers


def each_scheduler(given: Schedulers | None) -> list[LRScheduler]:
    """The schedulers, where one, several or none are given.

    Raises:
        TypeError: something else.
        ValueError: one that needs a metric.
    """
    schedulers = [] if given is None else _listed(given, LRScheduler, "scheduler")
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        raise ValueError(
            "ReduceLROnPlateau needs a metric: call its step(metric) after validation, and leave it out of scheduler= here"
        )
    return schedulers


def _listed(given: Any, kind: type[_Kind], name: str) -> list[_Kind]:
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in listed:
        if not isinstance(one, kind):
            raise TypeError(f"the {name} is {describe(one)}, expected {kind.__name__}, or a list of them")
    return listed
