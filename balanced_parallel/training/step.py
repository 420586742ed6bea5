"""``TrainStep``: an effective batch in micro-batches that fit, and one exact update.

Its state between two updates has the state of an optimizer by the names of the parameters, so it does not depend on their order.
"""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batch.containers import spread
from ..batch.outputs import PerReplica
from ..batch.plan import Combine
from ..batch.rows import join_outputs
from ..loss.criterion import DataParallelCriterion, losses_of_batch
from ..loss.sums import Weight
from ..optim.balanced import BalancedOptimizer
from ..replicas.replicas import parameter_window
from ..runtime import collectives
from ..runtime.random_numbers import generator_states, seed_anew, set_generators
from ..runtime.torch_private import is_sharded, uncompiled_name
from ..runtime.values import Precision
from .accumulation import Accumulation, Batch, Model, Window, run_forward
from .cost_batches import Collate, Cost, CostOptions, Cuts, Trim, Unit, make_cuts
from .recovery import Attempts, recovering
from .settings import Settings, check_arguments, check_micro_batch_cost, check_micro_batch_size, check_optimizers
from .state_trees import check_same_tensors
from .strategy import GradientSync, gradient_sync
from .two_passes import TwoPasses
from .update import (
    Optimizers,
    Schedulers,
    Update,
    each_optimizer,
    each_scheduler,
    refuse_released_gradients,
    trained_tensors,
)

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
    _sync: GradientSync
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
            "optimizers": [state_by_name(optimizer, self._trained) for optimizer in each_optimizer(self.optimizer)],
            "schedulers": [
                {"class": class_name(scheduler), **scheduler.state_dict()} for scheduler in each_scheduler(self.scheduler)
            ],
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": {f"rank{rank}": generator_states(self.model.devices)},
            "python": random.getstate(),
            "numpy": _numpy_state(),
            "layout": self._layout(),
            "updates": collectives.updates(),
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
        collectives.continue_from(state_dict["updates"])
        self._window.weight_before = state_dict["weight_before"]
        self._failure = ""
        if self._attempts.run_again:  # "auto"; a number given by hand stays, and rows are not a cost
            self._attempts.limit = state_dict["limit"].get(self._cuts.unit)
        self._load_random_numbers(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises the errors of :meth:`load_state_dict`, without changing anything."""
        if missing := _ENTRIES - state_dict.keys():
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}, expected what a TrainStep's state_dict() returns")
        for name, parts in (("optimizers", each_optimizer(self.optimizer)), ("schedulers", each_scheduler(self.scheduler))):
            classes, expected = [state["class"] for state in state_dict[name]], [class_name(part) for part in parts]
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
            like = {uncompiled_name(name): tensor for name, tensor in self._trained.items()}.get(path[3])
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
        refuse_released_gradients(update.optimizers)
        update.forget_gradients()
        return Accumulation(self._sync, self.criterion, self._trained, self.model.devices[0], self.precision, weight_before)

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


class TrainStep(StepState):
    """Trains on one effective batch per call, in micro-batches, with the loss and the gradients of the whole batch.

    ``loss = step(inputs, targets)`` cuts the batch, runs forward and backward of each micro-batch, and updates once.
    ``step.add(inputs, targets)`` and ``step.apply()`` are its two halves, for a loader that yields micro-batches. A batch without
    a counted target changes nothing: its loss is nan, with a warning. A step that failed before its update can be repeated.

    A loss whose rows depend on each other (``whole=True``, :class:`AdditiveLoss`) takes two forwards for each of several
    micro-batches, and ``add`` keeps its rows until ``apply``.

    Under torchrun each rank passes its own rows, or none. Ranks compare their settings, and make the same sequence of
    ``step(...)`` or ``apply()`` calls. Gradients are reduced once per update, shards (FSDP) in every micro-batch. A failure of
    DDP raises on every rank.

    Args:
        model: a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        criterion: a :class:`DataParallelCriterion`.
        optimizer: one or a list. They step together: with ``"fp16"`` an overflow in the gradients of one skips all.
        micro_batch_size: rows per device at most in one forward; ``None`` runs the whole batch at once. ``"auto"`` begins with
            that, and halves the number after each ``torch.OutOfMemoryError``. The same effective batch runs again then.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for every replica.
        max_grad_norm: clips the norm of the true gradient over all optimizers, as ``torch.nn.utils.clip_grad_norm_`` does.
            ``step.grad_norm`` is that of the last update before it was clipped, a tensor.
        scheduler: one or a list, stepped once after each update that was made.
        cost: cuts the batch by the cost of its rows, so all devices carry the same: ``cost(inputs)``, or of each sample.
        collate: makes ``(inputs, targets)`` of any list of samples. A batch is such a list then: ``step(samples)``.
        trim: dimension that is cut to the largest cost in a shard, or a mapping to it from the names of arguments.
        combine: cost of a shard, from the costs of its rows; ``None`` is rows x longest, the size of a padded shard.
        micro_batch_cost: cost per device at most in one forward, in place of ``micro_batch_size``.

    Raises:
        TypeError: a model, a criterion, an optimizer or a scheduler of another kind.
        ValueError: a setting out of its range, a parameter in two optimizers, or inputs and targets whose rows do not fit.

    Example:
        >>> net = torch.nn.Linear(4, 3)
        >>> model, criterion = DataParallelModel(net, ["cpu"] * 2), DataParallelCriterion(torch.nn.CrossEntropyLoss())
        >>> step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=2)
        >>> step(torch.zeros(7, 4), torch.tensor([0, 1, 2, 0, 1, -100, -100])).shape  # the mean over 5 of 7 rows
        torch.Size([])
    """

    def __init__(
        self,
        model: Model,
        criterion: DataParallelCriterion,
        optimizer: Optimizers,
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        precision: str | Precision = "fp32",
        max_grad_norm: float | None = None,
        scheduler: Schedulers | None = None,
        cost: Cost | None = None,
        collate: Collate | None = None,
        trim: Trim | None = None,
        combine: Combine | None = None,
        micro_batch_cost: float | None = None,
    ) -> None:
        self._sync = gradient_sync(model, criterion)
        check_arguments(criterion, micro_batch_size, max_grad_norm, scheduler)
        options = CostOptions(cost, collate, trim, combine, micro_batch_cost)
        self._cuts = make_cuts(model, criterion, self._sync, options, micro_batch_size)
        self.model, self.criterion, self.optimizer, self.scheduler = model, criterion, optimizer, scheduler
        self.max_grad_norm = max_grad_norm
        self.precision, self._trained = Precision(precision), trained_tensors(model, criterion)
        self._window = Window(self._sync)
        limit = micro_batch_size if micro_batch_cost is None else micro_batch_cost
        self._attempts = recovering(model, criterion, self._cuts, self._sync, limit)
        if criterion.is_coupled:
            self._attempts = TwoPasses(
                model, criterion, self.precision, self._cuts, self._sync, self._window, self._adding, self._attempts
            )
        self._check_optimizers()

    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[True]) -> tuple[Tensor, PerReplica]: ...
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: bool = False) -> Tensor | tuple[Tensor, PerReplica]:
        """Trains on one effective batch, or on this rank's rows of it. Returns its loss, a detached scalar.

        Args:
            inputs: of the model; a tuple fills its positional arguments, a mapping its keyword arguments; or samples.
            targets: arguments of the criterion after the output; a tuple fills several, ``()`` none. ``collate`` makes them.
            return_outputs: returns the detached outputs of this rank's rows too, one entry for each micro-batch and replica.
                11 rows with ``micro_batch_size=2`` on three devices make entries of 2, 2, 2, 2, 2 and 1 rows.
        """
        self._compare_settings()
        outputs: list[PerReplica] = []
        batch = Batch(inputs, spread(targets), True, outputs if return_outputs else None)
        with parameter_window(self.model, self.criterion):
            self._attempts.accumulate(self._accumulate, batch)
            loss = self._apply()
        return (loss, join_outputs(outputs, self.model.out_dims)) if return_outputs else loss

    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows; nothing is updated before :meth:`apply`.

        An ``add`` that fails drops all rows since the last update, with a note on its error.
        """
        self._compare_settings()
        with parameter_window(self.model, self.criterion):
            self._attempts.accumulate(self._accumulate, Batch(inputs, spread(targets), is_whole=False, outputs=None))

    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added, and returns their loss."""
        self._compare_settings()
        with parameter_window(self.model, self.criterion):
            return self._apply()

    def _accumulate(self, batch: Batch) -> None:
        with self._adding() as accumulation:
            micro_batches, targets = self._cuts.cut(batch, self._attempts.limit)
            losses = batch.losses or losses_of_batch(self.criterion, targets, is_whole=batch.is_whole)
            accumulation.begin_batch(losses)
            for micro_batch in micro_batches:
                last = batch.is_whole and micro_batch.followers == 0
                with nullcontext() if last else self._sync.accumulating():
                    sums = run_forward(self.model, self.precision, micro_batch, losses, batch.outputs)
                    accumulation.backward(sums, micro_batch.followers, last=last)

    def _apply(self) -> Tensor:
        loss, weight, factor = self._attempts.finish(self._accumulate, self._finish)
        update = self._update()
        with self._window.ending(weight):
            if weight == 0:
                update.forget_gradients()
                warnings.warn("no target of this batch was counted: nothing is updated, and its loss is nan", stacklevel=3)
                return loss
            with self._telling_failures(), self._attempts.retrying():
                update.run(self._sync, factor, self.precision.scaler, self.max_grad_norm)
            for scheduler in each_scheduler(self.scheduler) if update.has_stepped else ():
                scheduler.step()
            self.grad_norm = update.grad_norm
            return loss

    def _finish(self) -> tuple[Tensor, float, Weight]:
        with self._adding() as accumulation:
            return accumulation.finish(self.criterion.minimum, self._settings())


def state_by_name(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the state of an optimizer, with names where ``torch.optim`` has numbers.

    Args:
        optimizer: of torch, or a :class:`BalancedOptimizer`.
        trained: the parameters by name. Others are called by their number.
    """
    names, state = _names(optimizer, trained), optimizer.state_dict()
    return {
        "class": class_name(optimizer),
        "state": {names[number]: entries for number, entries in state["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]],
    }


def numbered_state(optimizer: Optimizer, trained: Mapping[str, Tensor], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state from :func:`state_by_name` as the optimizer's ``load_state_dict()`` takes it.

    Raises:
        ValueError: the param groups have other parameters.
    """
    names, groups = _names(optimizer, trained), _whole_groups(optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    loaded, first = [], 0
    if len(groups) != len(state_dict["param_groups"]):
        raise ValueError(f"the state has {len(state_dict['param_groups'])} param groups, expected {len(groups)}")
    for place, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        expected = names[first : first + len(group["params"])]
        first += len(expected)
        different = sorted({*expected} ^ {*saved["params"]})
        if different:
            raise ValueError(
                f"param group {place} of the state has {len(saved['params'])} parameters, expected the {len(expected)} of the "
                f"optimizer: only one of them has {', '.join(different[:3])}"
            )
        loaded.append({**saved, "params": [numbers[name] for name in expected]})
    return {"state": {numbers[name]: value for name, value in state_dict["state"].items()}, "param_groups": loaded}


def class_name(optimizer: Any) -> str:
    """Returns the class of a scheduler, or of the plain optimizer, however it is spread over devices or ranks."""
    if isinstance(optimizer, BalancedOptimizer):
        return optimizer.recipe[0].__name__
    return type(getattr(optimizer, "optim", optimizer)).__name__  # of a ZeroRedundancyOptimizer


def _names(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the parameters, in the order in which a ``state_dict()`` numbers them."""
    names = {id(parameter): uncompiled_name(name) for name, parameter in trained.items()}
    parameters = [parameter for group in _whole_groups(optimizer) for parameter in group["params"]]
    return [names.get(id(parameter), f"parameter {number}") for number, parameter in enumerate(parameters)]


def _whole_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.recipe[1] if isinstance(optimizer, BalancedOptimizer) else optimizer.param_groups
