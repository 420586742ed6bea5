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
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import Metric

from .. import (
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    TrainStep,
    convert_sync_batchnorm,
)
from ..batch.outputs import detach_outputs, join
from ..batch.rows import move_leaves, take
from ..loss.copies import ShardLoss
from ..loss.inside import ForwardNotes
from ..loss.names import UnknownMeanError
from ..optim.balanced import refuse_closures
from ..replicas.module_tree import ModuleTree
from ..replicas.replicas import copy_buffers
from ..runtime.devices import DeviceLike, resolve_devices
from ..strategies.ddp import DistributedModel

LOSS = object()  # Stands for the loss in logged values.


class StepTask(nn.Module):
    """Calls ``training_step`` of a module on a shard."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: tuple[object, ...]) -> tuple[Any, object]:
        """Returns the loss, and what Lightning gets after the update: other results of the step, and
        calls of log().
        """
        # The first of two passes leaves no trace.
        module = self.module if torch.is_grad_enabled() else twin(self.module)
        updates = count_updates(module)
        calls: list[Any] = []

        def log(name: str, value: object, *positional: object, **settings: object) -> None:
            calls.append((name, value, positional, settings))

        device = next(module.parameters()).device
        for part in module.modules():
            if "_device" in vars(part):  # self.device of a LightningModule
                vars(part)["_device"] = device
        vars(module)["log"] = log
        try:
            loss = module.training_step(*in_columns(module, inputs, tuple, list))
        finally:
            del vars(module)["log"]
        if len(module.trainer.strategy.replica_devices) > 1 and updates != count_updates(module):
            raise TypeError(
                "training_step updates a torchmetrics.Metric, of which each replica has a copy, expected none with several "
                "devices in one process: log the mean of a batch, or update it in on_train_batch_end, from outputs"
            )
        output = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        loss = output.pop("loss", None)
        logged = [
            (name, LOSS if is_loss(value, loss) else value, *more) for name, value, *more in calls
        ]
        return loss, (output, logged)


def scaled_loss(scale: Tensor, loss: Any, result: object) -> Any:
    """Returns the loss that a step has computed, times the scale of a scaler."""
    return loss * scale


class NoLoss(Exception):
    """Ends an update with what ``training_step`` has returned: None, or no loss."""


def in_columns(module: Any, inputs: tuple[Any, ...], old: type, new: type) -> tuple[Any, ...]:
    """Returns a batch in another container, if its entries are columns, not rows."""
    loader = module.trainer.train_dataloader
    has_columns = isinstance(loader, list) or getattr(loader, "collate_fn", None) is default_collate
    batch, *others = inputs
    return (new(batch), *others) if has_columns and type(batch) is old else inputs


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
    _layer_sync = None  # Lightning sets it for sync_batchnorm=True.

    def setup(self, trainer: Any) -> None:
        """Sets up the module and its optimizers, and the :class:`TrainStep` of a fit."""
        if self._layer_sync:
            convert_sync_batchnorm(self.lightning_module)
            self._layer_sync = None
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        self._results: list[Any] = []  # The results of the shards of this window.
        self._scale = torch.ones((), device=self.root_device)
        module: Any = self.lightning_module
        self._devices = self.replica_devices or [self.root_device]
        self._is_alone = len(self._devices) * trainer.world_size == 1
        if self._is_alone and not module.automatic_optimization:
            return  # One device alone may run any loop.
        if not module.automatic_optimization or module._compiler_ctx is not None:
            raise TypeError(
                f"{type(module).__name__} is compiled, or has automatic_optimization=False, expected neither: compile a part of "
                "it, or call a TrainStep in its training_step, with a strategy of Lightning"
            )
        self._trained = -1
        self._wrap(module)
        # Lightning calls it between forward and backward, and a TrainStep clears itself.
        self._zero_grad = module.optimizer_zero_grad
        vars(module)["optimizer_zero_grad"] = lambda *arguments: None

    def _wrap(self, module: Any) -> None:
        """Wraps the module, again if other parameters are trained: ranks share these gradients."""
        trained = sum(parameter.requires_grad for parameter in module.parameters())
        if trained == self._trained:
            return
        self._trained = trained
        task = StepTask(module)
        self._replicas = (
            DistributedModel(task, self.root_device, None)
            if module.trainer.world_size > 1
            else DataParallelModel(task, self._devices)
        )
        self._replicas.note(ForwardNotes(may_stop=False), anew=True)  # Parts may be compiled.
        self._replicas.register_forward_hook(self._keep_results)
        self._step: TrainStep | None = None

    def _make_step(self, inputs: tuple[object, ...], *, is_split: bool) -> TrainStep:
        for user in self.optimizers:
            refuse_closures(type(user), type(self).__name__)
        criterion = DataParallelCriterion(partial(scaled_loss, self._scale))
        if is_split:
            task = StepTask(twin(self.lightning_module).eval())
            row = move_leaves(take(inputs, range(1)), self.root_device)
            with suppress(Exception):  # It may have no loss in evaluation mode.
                criterion.learn(ShardLoss(lambda *row: task(row)[0], 1, row, (), {}))
        parameters = self.lightning_module.parameters()
        return TrainStep(self._replicas, criterion, NoOptimizer(parameters, {}))

    def _keep_results(self, model: nn.Module, inputs: object, outputs: PerReplica) -> None:
        results = [
            (rows, *result)
            for rows, (_, result) in zip(outputs.sizes, detach_outputs(outputs, None), strict=True)
        ]
        if torch.is_grad_enabled():
            self._results += results
        without = sum(not isinstance(loss, Tensor) for loss, _ in outputs)
        if not without:
            return
        batches = self.lightning_module.trainer.accumulate_grad_batches
        if without < len(outputs) or batches > 1:
            raise TypeError(
                f"training_step returned no loss for {without} of {len(outputs)} shards of a batch, with "
                f"accumulate_grad_batches={batches}, expected a loss for each, or for none and accumulate_grad_batches=1"
            )
        self._results = results
        raise NoLoss(results[0][1] or outputs[0][0])

    def training_step(self, *inputs: object) -> Any:
        """Makes the gradients of a batch, after the last one those of the update.

        Returns the result of the module. Its loss is that of the update then, and zero before.
        """
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            return super().training_step(*inputs)
        batches = module.trainer.accumulate_grad_batches
        loss = 0 * self._scale
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._scale.fill_(1.0 if scaler is None else scaler.scale(loss + 1))
        before = len(self._results)
        loop = module.trainer.fit_loop
        if loop.batch_idx % batches == 0:
            self._begin(module)
        # The entries of a list may be rows.
        inputs = in_columns(module, inputs, list, tuple)
        is_last = loop._skip_backward or not loop._should_accumulate()
        try:
            with self.precision_plugin.train_step_context():
                self._step = step = self._step or self._make_step(
                    inputs, is_split=batches > 1 or not self._is_alone
                )
                if loop._skip_backward:  # Averaged weights get the statistics of batch norm.
                    loss = step.criterion(self._replicas(inputs)).detach()
                elif is_last:
                    loss = step((inputs,))
                else:
                    step.add((inputs,))
        except NoLoss as error:
            self._log(loss)
            return error.args[0]
        except UnknownMeanError as error:
            error.add_note(
                "In a LightningModule, set automatic_optimization=False, and call a TrainStep with such a criterion in "
                "training_step, with a strategy of Lightning (docs/recipes/lightning.md)"
            )
            raise
        loss = loss / self._scale
        outputs = [output for _, output, _ in self._results[before:]]
        if is_last:
            self._log(loss)
        result: Any = join(outputs, loss.device, 0) if len(outputs) > 1 else dict(*outputs)
        # Lightning divides it by the number of batches, and runs its backward.
        result["loss"] = (loss * batches).requires_grad_()
        return result

    def _begin(self, module: Any) -> None:
        """Begins a window, whose hook clears gradients."""
        if module.trainer.fit_loop._skip_backward:
            return
        self._wrap(module)
        optimizer = self.optimizers[0]
        self._zero_grad(module.current_epoch, module.trainer.fit_loop.batch_idx, optimizer)
        if any(
            parameter.grad is not None and parameter.grad.any()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise ValueError(
                f"optimizer_zero_grad of {type(module).__name__} leaves gradients, expected that it clears them: accumulate over "
                "batches with accumulate_grad_batches"
            )

    def _log(self, loss: Tensor) -> None:
        """Logs the value of the update for a loss, and for others that of all shards."""
        for shard in self._results:
            rows, _, logged = shard
            for name, value, positional, settings in logged:
                settings["batch_size"] = settings.get("batch_size") or rows or 1
                if value is LOSS:  # A sum has it once.
                    is_sum = "sum" in str(settings.get("reduce_fx"))
                    value = loss * (shard is self._results[-1] or not is_sum)
                self.lightning_module.log(name, value, *positional, **settings)
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
