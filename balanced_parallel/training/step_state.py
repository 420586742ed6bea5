"""The state of a :class:`TrainStep` between two updates."""

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..loss.criterion import DataParallelCriterion
from ..runtime import collectives, progress
from ..runtime.precision import Precision
from ..runtime.random_numbers import generator_states, seed_anew, set_generators
from ..runtime.tensors import is_sharded
from .accumulation import Accumulation
from .arguments import check_micro_batch_cost, check_micro_batch_size
from .cuts import Cuts, Unit
from .optimizer_checks import check_optimizers
from .optimizer_states import class_name, numbered_state, state_by_name
from .recovery import Attempts
from .releasing_sync import releasing
from .settings import Settings
from .state_trees import check_same_tensors
from .update import Optimizers, Schedulers, Update, each_optimizer, each_scheduler
from .window import Window

__all__: list[str] = []


_ENTRIES = {"model", "criterion", "optimizers", "schedulers", "scaler", "random", "python", "numpy", "layout", "updates"}
_ENTRIES |= {"weight_before", "limit"}


class StepState:
    """State of model, criterion, optimizers, schedulers, gradient scaler, random numbers, and of the step itself."""

    model: Any
    criterion: DataParallelCriterion
    optimizer: Optimizers
    scheduler: Schedulers | None
    precision: Precision
    _trained: dict[str, Tensor]
    _attempts: Attempts
    _window: Window
    _cuts: Cuts
    _has_compared = False  # the settings of the ranks
    _failure = ""  # of the last update of the optimizers, which the other ranks learn of
    max_grad_norm: float | None
    grad_norm: Tensor | None = None

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per device at most in one forward. With ``"auto"``, the number settled on so far."""
        return int(limit) if self._cuts.unit == "rows" and (limit := self._attempts.limit) is not None else None

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int | None) -> None:
        check_micro_batch_size(rows, "or None for the whole batch")
        self._set_limit("rows", rows)

    @property
    def micro_batch_cost(self) -> float | None:
        """Cost per device at most in one forward. With ``"auto"``, the cost settled on so far."""
        return self._attempts.limit if self._cuts.unit == "cost" else None

    @micro_batch_cost.setter
    def micro_batch_cost(self, cost: float | None) -> None:
        check_micro_batch_cost(cost)
        self._set_limit("cost", cost)

    def _set_limit(self, unit: Unit, limit: float | None) -> None:
        if unit != self._cuts.unit:
            raise ValueError(f"micro-batches are limited by {self._cuts.unit}, expected a limit of that, not of {unit}")
        self._attempts.limit = limit

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two updates, for :class:`Checkpoints`. Under torchrun every rank must call this.

        The names are those of the module, with any number of devices or ranks. Tensors are not copied.

        Raises:
            RuntimeError: rows were added and not applied.
        """
        if not self._window.is_empty:
            raise RuntimeError("rows were added that are not in an update yet, expected apply() before state_dict()")
        scaler = self.precision.scaler
        rank = collectives.rank()
        return {
            "model": _module_state(self.model.module),
            "criterion": dict(self.criterion.state_dict()),
            "optimizers": [state_by_name(one, self._trained) for one in each_optimizer(self.optimizer)],
            "schedulers": [{"class": class_name(one), **one.state_dict()} for one in each_scheduler(self.scheduler)],
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": {f"rank{rank}": generator_states(self.model.devices)},
            "python": random.getstate(),
            "numpy": _numpy_state(),
            "layout": self._layout(),
            "updates": progress.updates(),
            "weight_before": self._window.weight_before,
            "limit": {self._cuts.unit: self._attempts.limit},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state, which any number of devices or ranks may have saved.

        With another number, accelerators get new seeds from the state of the CPU's generator, all different, and the random
        numbers of Python and numpy stay.

        Raises:
            ValueError: optimizers or schedulers of another number or class or with other parameters, or not a whole state.
            RuntimeError: the module has other parameters.
        """
        self.check_state_dict(state_dict)
        _load_module_state(self.model.module, state_dict["model"])
        self.criterion.load_state_dict(state_dict["criterion"])
        for optimizer, state in zip(each_optimizer(self.optimizer), state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(numbered_state(optimizer, self._trained, state))
        for scheduler, state in zip(each_scheduler(self.scheduler), state_dict["schedulers"], strict=True):
            scheduler.load_state_dict({name: value for name, value in state.items() if name != "class"})
        scaler = self.precision.scaler_on(self.model.devices[0])
        if scaler is not None and state_dict["scaler"]:
            scaler.load_state_dict(state_dict["scaler"])
        progress.continue_from(state_dict["updates"])
        self._window.weight_before = state_dict["weight_before"]
        self._failure = ""
        if self._attempts.run_again:  # "auto"; a number given by hand stays, and rows are not a cost
            self._attempts.limit = state_dict["limit"].get(self._cuts.unit)
        self._load_random_numbers(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises the errors of :meth:`load_state_dict`, without changing anything."""
        if missing := _ENTRIES - state_dict.keys():
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}, expected what a TrainStep's state_dict() returns")
        for name, mine in (("optimizers", each_optimizer(self.optimizer)), ("schedulers", each_scheduler(self.scheduler))):
            classes, expected = [state["class"] for state in state_dict[name]], [class_name(one) for one in mine]
            if classes != expected:
                raise ValueError(f"the state has the {name} {classes}, expected {expected}")
        for optimizer, state in zip(each_optimizer(self.optimizer), state_dict["optimizers"], strict=True):
            numbered_state(optimizer, self._trained, state)
        check_same_tensors("model", _module_state(self.model.module), state_dict["model"])
        check_same_tensors("criterion", self.criterion.state_dict(), state_dict["criterion"])

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Returns memory for a saved tensor, laid out as its parameter if that is sharded over ranks; otherwise None."""
        if path[0] == "model":
            like: Any = self.model.module.state_dict().get(path[1])
        elif path[0] == "optimizers" and path[2] == "state":
            like = {name.replace("_orig_mod.", ""): tensor for name, tensor in self._trained.items()}.get(path[3])
        else:
            return None
        if not is_sharded(like) or like.shape != size:
            return None
        return torch.empty_like(like, dtype=dtype, requires_grad=False)

    def _check_optimizers(self) -> None:
        check_optimizers(self._update(), each_scheduler(self.scheduler))

    def _update(self) -> Update:
        return Update(each_optimizer(self.optimizer), self._trained)

    def _settings(self) -> Settings:
        return Settings(
            criterion=self.criterion,
            optimizers=each_optimizer(self.optimizer),
            schedulers=each_scheduler(self.scheduler),
            precision=self.precision.name,
            max_grad_norm=self.max_grad_norm,
            is_auto=self._attempts.run_again,
            unit=self._cuts.unit,
            failure=self._failure,
        )

    def _compare_settings(self) -> None:
        """Compares all settings before the first update. All ranks call this."""
        if not self._has_compared and collectives.world_size() > 1:
            self._settings().compare()
        self._has_compared = True

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Keeps a failure of the optimizers on this rank for the others, which learn of it in the next reduction."""
        try:
            yield
        except BaseException as error:
            self._failure = f"failed with {type(error).__name__}: {error}"
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(
                    "This was the optimizer's step, which may have changed some parameters and not others: go on from a "
                    "checkpoint. BalancedOptimizer spreads its state over the devices; smaller micro-batches do not help"
                )
            raise
        self._failure = ""

    def _adding(self) -> AbstractContextManager[Accumulation]:
        return self._window.adding(self._begin)

    def _begin(self, weight_before: float) -> Accumulation:
        update = self._update()
        update.forget_gradients()
        sync, run_again = self._window.sync, self._attempts.run_again
        sync = releasing(sync, update.optimizers, self.criterion.minimum, self.max_grad_norm, run_again)
        return Accumulation(sync, self.criterion, self._trained, self.model.devices[0], self.precision, weight_before)

    def _layout(self) -> list[Any]:
        return [collectives.world_size(), [device.type for device in dict.fromkeys(self.model.devices)]]

    def _load_random_numbers(self, state_dict: Mapping[str, Any]) -> None:
        rank, saved, devices = collectives.rank(), state_dict["random"], self.model.devices
        if state_dict["layout"] != self._layout():
            (of_one,) = saved.values()  # the CPU's generator is the same on all ranks
            seed_anew(of_one["cpu"], devices, rank * len(devices))
            return
        set_generators(saved[f"rank{rank}"], devices)
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])


def _module_state(module: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # takes seconds to import

    return dict(get_model_state_dict(module))


def _load_module_state(module: nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(module, state)


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *others = np.random.get_state(legacy=True)
    return (name, np.asarray(keys).tolist(), *others)
