"""Strategies of Lightning whose devices, ranks and accumulation have the loss and the gradients of
the whole batch.

Lightning keeps its loop and its hooks, and a :class:`TrainStep` makes the gradients::

    training_step      that of the module runs on each shard, forward and backward. After the last
                       batch of a window, gradients are those of the update
    zero_grad          that of the module runs before: the TrainStep clears gradients itself
    backward           nothing is left to do
    optimizer_step     that of Lightning: clipping, scaler, optimizer, schedulers
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import Metric

from .. import DataParallelCriterion, DataParallelModel, PerReplica, TrainStep
from ..batch.outputs import detach_outputs, join
from ..batch.rows import count_rows, move_leaves, take
from ..loss.copies import ShardLoss
from ..loss.names import UnknownMeanError
from ..optim.balanced import refuse_closures
from ..replicas.module_tree import ModuleTree
from ..replicas.replicas import copy_buffers
from ..runtime.devices import DeviceLike, resolve_devices
from ..strategies.ddp import DistributedModel

Output = dict[str, object]  # The result of training_step, without the loss.
Logged = list[tuple[str, Any, Any, Any]]  # name, value, and other arguments of log()
LOSS = object()  # Stands for the loss in logged values.


class StepResult(NamedTuple):
    """The loss of a shard. Lightning gets the rest after the update."""

    loss: Any
    rest: tuple[int, Output, Logged]


class StepTask(nn.Module):
    """Calls ``training_step`` of a module on a shard."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: tuple[object, ...]) -> StepResult:
        """Returns the loss, and the rows with what else the step has returned and logged."""
        # The first of two passes leaves no trace.
        module = self.module if torch.is_grad_enabled() else twin(self.module)
        updates = count_updates(module)
        logged: Logged = []
        loss, output = run(module, inputs, logged)
        if len(module.trainer.strategy.replica_devices) > 1 and updates != count_updates(module):
            raise TypeError(
                "training_step updates a torchmetrics.Metric, of which each replica has a copy, expected none with several "
                "devices in one process: log the mean of a batch, or update it in on_train_batch_end, from outputs"
            )
        logged = [
            (name, LOSS if is_loss(value, loss) else value, *more) for name, value, *more in logged
        ]
        return StepResult(loss, (count_rows(inputs) or 1, output, logged))


class StepLoss(nn.Module):
    """Returns the loss that a step has computed, times the scale of a scaler."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, result: StepResult) -> object:
        """Returns the loss of a shard."""
        return result.loss * self.scale


class NoLoss(Exception):
    """Ends an update with what ``training_step`` has returned: None, or no loss."""


def in_columns(module: Any, inputs: tuple[Any, ...], old: type, new: type) -> tuple[Any, ...]:
    """Returns a batch in another container, if its entries are columns, not rows."""
    loader = module.trainer.train_dataloader
    has_columns = isinstance(loader, list) or getattr(loader, "collate_fn", None) is default_collate
    if has_columns and inputs and type(inputs[0]) is old:
        return new(inputs[0]), *inputs[1:]
    return inputs


def run(module: Any, inputs: tuple[object, ...], logged: Logged) -> tuple[Any, Output]:
    """Calls ``training_step``. Returns the loss, and its other results.

    Values that it logs are kept: Lightning gets them after the update.
    """

    def log(name: str, value: object, *positional: object, **settings: object) -> None:
        logged.append((name, value, positional, settings))

    device = next(module.parameters()).device
    for part in module.modules():
        if "_device" in vars(part):  # self.device of a LightningModule
            vars(part)["_device"] = device
    vars(module)["log"] = log
    try:
        output = module.training_step(*in_columns(module, inputs, tuple, list))
    finally:
        del vars(module)["log"]
    if not isinstance(output, Mapping):
        return output, {}
    others = dict(output)
    return others.pop("loss", None), others


def is_loss(value: object, loss: object) -> bool:
    """Returns True if a logged value is that of the loss."""
    if not isinstance(loss, Tensor):
        return False
    if isinstance(value, Tensor):
        return value.data_ptr() == loss.data_ptr()
    return type(value) is float and str(value) == str(loss.item())


def count_updates(module: nn.Module) -> list[int]:
    """Returns the number of updates of each metric."""
    return [part.update_count for part in module.modules() if isinstance(part, Metric)]


def twin(module: nn.Module) -> Any:
    """Returns a module with the same parameters, and with attributes and buffers of its own."""
    tree = ModuleTree(module)
    home = next(module.parameters()).device
    copied = tree.fill(tree.make_skeletons(), None, *copy_buffers(tree.buffers(home), [home]))
    for part in copied.modules():
        vars(part).update(
            {name: copy(value) for name, value in vars(part).items() if type(value) in (dict, list)}
        )
        for name, child in part.named_children():
            # The methods of a metric are bound to the first one.
            if isinstance(child, Metric):
                setattr(part, name, child.clone())
    return copied


class NoOptimizer(torch.optim.Optimizer):
    """Leaves the gradients of an update to the optimizer of Lightning."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Updates nothing."""


class ExactSteps(Strategy):
    """The training steps of a strategy of Lightning, made by a :class:`TrainStep`.

    An update has the rows of ``accumulate_grad_batches`` batches, of all devices and ranks.

    Raises:
        TypeError: manual optimization; a compiled module; a metric that several replicas update.
        UnknownMeanError: the loss is not a function of sums over the rows.
        ValueError: its rows depend on each other. One shard alone may have any loss.
    """

    replica_devices: Sequence[DeviceLike] = ()

    def setup(self, trainer: Any) -> None:
        """Sets up the module and its optimizers, and the :class:`TrainStep` of a fit."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        # rows, output and logged values of each shard of this window
        self._results: list[tuple[int, Output, Logged]] = []
        self._step: TrainStep | None = None
        self._loss = StepLoss()
        module: Any = self.lightning_module
        devices = self.replica_devices or [self.root_device]
        # One device alone may run any loop.
        self._is_by_hand = (
            not module.automatic_optimization and len(devices) * trainer.world_size == 1
        )
        if self._is_by_hand:
            return
        if not module.automatic_optimization or module._compiler_ctx is not None:
            raise TypeError(
                f"{type(module).__name__} is compiled, or has automatic_optimization=False, expected neither: compile a part of "
                "it, or call a TrainStep in its training_step, with a strategy of Lightning"
            )
        task = StepTask(module)
        self._replicas = (
            DistributedModel(task, self.root_device, None)
            if trainer.world_size > 1
            else DataParallelModel(task, devices)
        )
        self._replicas.register_forward_hook(self._keep_results)
        # Lightning calls it between forward and backward, and a TrainStep clears itself.
        self._zero_grad = module.optimizer_zero_grad
        vars(module)["optimizer_zero_grad"] = lambda *arguments: None

    def _make_step(self, inputs: tuple[object, ...], *, is_split: bool) -> TrainStep:
        for user in self.optimizers:
            refuse_closures(type(user), type(self).__name__)
        criterion = DataParallelCriterion(self._loss)
        if is_split:
            task = StepTask(twin(self.lightning_module).eval())
            row = move_leaves(take(inputs, range(1)), self.root_device)
            with suppress(Exception):  # It may have no loss in evaluation mode.
                criterion.learn(ShardLoss(lambda *row: task(row).loss, 1, row, (), {}))
        optimizer = NoOptimizer(self.lightning_module.parameters(), {})
        return TrainStep(self._replicas, criterion, optimizer)

    def _keep_results(self, model: nn.Module, inputs: object, outputs: PerReplica) -> None:
        results = [result.rest for result in detach_outputs(outputs, None)]
        if torch.is_grad_enabled():
            self._results += results
        without = sum(not isinstance(result.loss, Tensor) for result in outputs)
        if not without:
            return
        batches = self.lightning_module.trainer.accumulate_grad_batches
        if without < len(outputs) or batches > 1:
            raise TypeError(
                f"training_step returned no loss for {without} of {len(outputs)} shards of a batch, with "
                f"accumulate_grad_batches={batches}, expected a loss for each, or for none and accumulate_grad_batches=1"
            )
        self._results = results
        raise NoLoss(results[0][1] or outputs[0].loss)

    def training_step(self, *inputs: object, **settings: object) -> Any:
        """Makes the gradients of a batch, after the last one those of the update.

        Returns the result of the module. Its loss is that of the update then, and zero before.
        """
        if self._is_by_hand:
            return super().training_step(*inputs, **settings)
        module: Any = self.lightning_module
        batches = module.trainer.accumulate_grad_batches
        is_split = batches * len(self._replicas.devices) * module.trainer.world_size > 1
        loss = torch.zeros((), device=self.root_device)
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.scale(loss + 1)
        before = len(self._results)
        if module.trainer.fit_loop.batch_idx % batches == 0:
            self._clear_gradients(module)
        # The entries of a list may be rows.
        inputs = in_columns(module, inputs, list, tuple)
        is_last = not module.trainer.fit_loop._should_accumulate()
        try:
            with self.precision_plugin.train_step_context():
                self._step = step = self._step or self._make_step(inputs, is_split=is_split)
                self._loss.scale.fill_(scale)
                if is_last:
                    loss = step((inputs,)) / scale
                else:
                    step.add((inputs,))
        except NoLoss as error:
            vars(self._replicas).pop("noting", None)  # It has seen a forward without sums.
            self._log(loss)
            return error.args[0]
        except UnknownMeanError as error:
            error.add_note(
                "In a LightningModule, set automatic_optimization=False, and call a TrainStep with such a criterion in "
                "training_step, with a strategy of Lightning (docs/recipes/lightning.md)"
            )
            raise
        outputs = [output for _, output, _ in self._results[before:]]
        if is_last:
            self._log(loss)
        result: Output = join(outputs, loss.device, 0) if len(outputs) > 1 else dict(*outputs)
        # Lightning divides it by the number of batches, and runs its backward.
        result["loss"] = (loss * batches).requires_grad_()
        return result

    def _clear_gradients(self, module: Any) -> None:
        """Calls the hook of the module at the beginning of a window."""
        optimizer = self.optimizers[0]
        self._zero_grad(module.current_epoch, module.trainer.fit_loop.batch_idx, optimizer)
        groups = optimizer.param_groups[:1]  # There is none if nothing is optimized.
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        if any(gradient is not None and gradient.any() for gradient in gradients):
            raise ValueError(
                f"optimizer_zero_grad of {type(module).__name__} leaves gradients, expected that it clears them: accumulate over "
                "batches with accumulate_grad_batches"
            )

    def _log(self, loss: Tensor) -> None:
        """Logs the values of each shard, and that of the update for a loss."""
        for rows, _, logged in self._results:
            for name, value, positional, settings in logged:
                number = loss if value is LOSS else value
                settings["batch_size"] = settings.get("batch_size") or rows
                self.lightning_module.log(name, number, *positional, **settings)
        self._results = []

    def teardown(self) -> None:
        """Gives the hook back to the module."""
        self.lightning_module.__dict__.pop("optimizer_zero_grad", None)
        super().teardown()


class BalancedStrategy(ExactSteps, SingleDeviceStrategy):
    """A strategy of Lightning for one process, with a replica of the module on each device.

    Args:
        device_ids: as in :class:`DataParallelModel`.
        settings: those of ``SingleDeviceStrategy``.

    Example:
        >>> trainer = Trainer(strategy=BalancedStrategy(), accumulate_grad_batches=4)  # doctest: +SKIP
    """

    def __init__(self, device_ids: Sequence[DeviceLike] | None = None, **settings: object) -> None:
        self.replica_devices = resolve_devices(device_ids)
        super().__init__(self.replica_devices[0], **settings)

    @property
    def parallel_devices(self) -> None:
        """Lightning sets the devices of its Trainer, if there are none."""

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        counts = 1, self.accelerator.auto_device_count(), len(self.replica_devices)
        if len(devices) not in counts:
            raise ValueError(
                f"Trainer(devices=...) has {len(devices)} devices, expected none given, as BalancedStrategy has "
                f"{len(self.replica_devices)}: write BalancedStrategy(device_ids)"
            )


class BalancedDDPStrategy(ExactSteps, DDPStrategy):
    """A strategy of Lightning with a process for each device.

    Its settings are those of ``DDPStrategy``, without those of ``DistributedDataParallel`` itself.

    Example:
        >>> trainer = Trainer(strategy=BalancedDDPStrategy(), devices=2)  # doctest: +SKIP
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Returns the module, which the :class:`TrainStep` wraps."""
        if self._ddp_kwargs or self._ddp_comm_hook:
            raise TypeError(
                f"{self._ddp_kwargs or self._ddp_comm_hook} was given, expected no settings of DistributedDataParallel"
            )
        return model
