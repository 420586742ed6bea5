"""Strategies of Lightning whose devices, ranks and accumulation have the loss and the gradients of
the whole batch.

Lightning keeps its loop. Its hooks of an update are::

    training_step      TrainStep makes gradients: it calls training_step of the module on each shard.
                       After the last batch of a window, they are those of the update
    zero_grad          gradients are aside: TrainStep clears them itself
    backward           gradients are back, and there is nothing else to do
    optimizer_step     that of Lightning: clipping, scaler, optimizer, schedulers
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

try:
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
except ImportError:
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from ..batch.outputs import PerReplica, join
from ..batch.rows import Arguments, ParallelModel, count_rows, move_leaves
from ..loss.copies import OwnCollectives, ShardLoss
from ..loss.criterion import DataParallelCriterion
from ..loss.means import FoundMeans, UnknownMeanError, find_means
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import ModuleTree
from ..replicas.replicas import copy_buffers
from ..runtime.collectives import world_size
from ..runtime.devices import DeviceLike, resolve_devices
from ..runtime.values import forget_gradients
from ..strategies.ddp import DistributedModel
from ..training.step import TrainStep

Logged = dict[str, tuple[Any, dict[str, Any]]]  # by name: a value, and the settings of log()


class ShardResult(NamedTuple):
    """The results of ``training_step`` on a shard, beside the means in its loss."""

    rows: int
    loss: Tensor
    extras: dict[str, Any]
    logged: Logged


class Task(nn.Module):
    """Calls ``training_step`` of a module on a shard, and finds the means in its loss."""

    def __init__(self, module: nn.Module, is_shared: bool) -> None:
        super().__init__()
        self.module = module
        self._is_shared = is_shared  # Several replicas have rows of a batch.

    def forward(self, arguments: tuple[Any, ...], scale: Any, is_split: bool) -> FoundMeans:
        """Returns the means, multiplied by ``scale``.

        ``is_split`` tells that the update has other rows.
        """
        # The first of two passes leaves no trace.
        module = self.module if torch.is_grad_enabled() else twin(self.module)
        outputs: list[Any] = []
        logged: Logged = {}

        def compute() -> Any:
            outputs.append(run(module, arguments, logged))
            return loss_of(outputs[0])

        rows = count_rows(Arguments(arguments, {})) or 1
        counts = self._update_counts(module)
        loss, means = find_means(ShardLoss(compute, rows, (), (), {}), is_split=is_split)
        if self._is_shared and counts != self._update_counts(module):
            raise TypeError(
                "training_step updates a torchmetrics.Metric, of which each replica has a copy, expected none with several "
                "devices in one process: log a mean of the batch, or update it in on_train_batch_end, from outputs"
            )
        scaled = {name: mean._replace(factor=mean.factor * scale) for name, mean in means.items()}
        extras = {**outputs[0], "loss": None} if isinstance(outputs[0], dict) else {}
        return FoundMeans(loss, scaled, arguments, ShardResult(rows, loss.detach(), extras, logged))

    def _update_counts(self, module: nn.Module) -> list[int]:
        return [part.update_count for part in module.modules() if isinstance(part, Metric)]


def run(module: nn.Module, arguments: tuple[Any, ...], logged: Logged) -> Any:
    """Calls ``training_step``. Values go to ``logged`` in place of Lightning, which gets those of
    all rows.
    """

    def log(name: str, value: Any, *positional: Any, **settings: Any) -> None:
        if positional:
            raise TypeError(f"log({name!r}, value, {positional[0]!r}), expected names of settings")
        logged[name] = (value.detach() if isinstance(value, Tensor) else value), settings

    device = next(module.parameters()).device
    for part in module.modules():
        if "_device" in vars(part):
            vars(part)["_device"] = device  # self.device of a LightningModule
    vars(module)["log"] = log
    try:
        return module.training_step(*arguments)
    finally:
        del vars(module)["log"]


def loss_of(output: Any) -> Any:
    """Returns the loss in the result of ``training_step``."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {output!r}, expected a loss, or a dictionary with one"
        )
    return loss


def twin(module: nn.Module) -> nn.Module:
    """Returns a module with the same parameters, and with attributes and buffers of its own."""
    tree = ModuleTree(module)
    home = next(module.parameters()).device
    return tree.fill(tree.make_skeletons(), None, *copy_buffers(tree.buffers(home), [home]))


class LossOfModule(DataParallelCriterion):
    """Brings the means in the losses of all shards together.

    Some of them are compared with those of halves, in evaluation mode.
    """

    def __init__(self, module: nn.Module) -> None:
        home = next(module.parameters()).device

        def training_step(*arguments: Any) -> Any:
            return loss_of(run(twin(module).eval(), move_leaves(arguments, home), {}))

        super().__init__(training_step)
        self.copies = dataclasses.replace(self.copies, collectives=OwnCollectives())


class Gradients(torch.optim.Optimizer):
    """Leaves the gradients of an update to the optimizer of Lightning."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates nothing."""


class ExactSteps(Strategy):
    """The training steps of a strategy of Lightning, made by a :class:`TrainStep`.

    ``class BalancedStrategy(ExactSteps, SingleDeviceStrategy)`` has them. A strategy of
    ``pytorch_lightning`` is made in the same way.

    An update has the rows of ``accumulate_grad_batches`` batches, of all devices and ranks.

    Raises:
        TypeError: manual optimization, a compiled module, or options of
            ``DistributedDataParallel``.
        UnknownMeanError: the loss is not a sum of means, or its rows depend on each other. One
            shard alone may have any loss.
    """

    replica_devices: Sequence[DeviceLike] | None = None

    def setup(self, trainer: Any) -> None:
        """Sets up the module and its optimizers, and for a fit the :class:`TrainStep`."""
        super().setup(trainer)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._results: list[ShardResult] = []  # of this window
        self._step = self._make_step() if trainer.state.fn == "fit" else None

    def _make_step(self) -> TrainStep:
        module: Any = self.lightning_module
        if not module.automatic_optimization or module._compiler_ctx is not None:
            raise TypeError(
                f"{type(module).__name__} is compiled, or has automatic_optimization=False, expected neither: compile a part of "
                "it, or call TrainStep in training_step, with a strategy of Lightning"
            )
        devices = self.replica_devices or [self.root_device]
        task = Task(module, is_shared=len(devices) > 1)
        has_ranks = world_size() > 1
        model: ParallelModel = (
            DistributedModel(task, self.root_device, None)
            if has_ranks
            else DataParallelModel(task, devices)
        )
        model.register_forward_hook(self._keep_results)
        return TrainStep(model, LossOfModule(module), Gradients(module))

    def _keep_results(self, model: nn.Module, inputs: Any, outputs: PerReplica) -> None:
        if torch.is_grad_enabled():
            self._results += [found.rest for found in outputs]

    def training_step(self, *arguments: Any, **kwargs: Any) -> Any:
        """Makes the gradients of a batch, or after the last one those of the update.

        Returns the loss of the update then, and zero before, in place of the loss in the result of
        the module.
        """
        assert self._step is not None
        module: Any = self.lightning_module
        trainer = module.trainer
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))
        batches = trainer.accumulate_grad_batches
        inputs = arguments, scale, batches * len(self._step.model.devices) * world_size() > 1
        before = len(self._results)
        loss = torch.zeros((), device=self.root_device)
        is_last = not trainer.fit_loop._should_accumulate()
        with self.precision_plugin.train_step_context():
            if is_last:
                loss = self._step(inputs) / scale
            else:
                self._step.add(inputs)
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        forget_gradients(module.parameters())
        extras = [result.extras for result in self._results[before:]]
        if is_last:
            self._log(module, loss)
        # Lightning divides it by the number of batches, and runs its backward.
        loss = (loss * batches).requires_grad_()
        if not any(extras):
            return loss
        return {**(join(extras, self.root_device, 0) if len(extras) > 1 else extras[0]), "loss": loss}

    def _log(self, module: Any, loss: Tensor) -> None:
        """Logs each value once for all rows of this rank: the loss of the update, or a mean."""
        results, self._results = self._results, []
        for name in dict.fromkeys(name for result in results for name in result.logged):
            having = [result for result in results if name in result.logged]
            values, settings = zip(*(result.logged[name] for result in having), strict=True)
            rows = [settings[0].get("batch_size") or result.rows for result in having]
            is_mean = settings[0].get("reduce_fx", "mean") in ("mean", torch.mean)
            if is_mean and not isinstance(values[0], Metric):
                losses = [result.loss for result in having]
                values = (mean_of(values, losses, torch.tensor(rows), loss),)
                rows = [sum(rows)]
            for value, number in zip(values, rows, strict=True):
                module.log(name, value, **{**settings[0], "batch_size": number})

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Puts the gradients back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        super().pre_backward(closure_loss)

    def teardown(self) -> None:
        """Releases the copies of the module."""
        self._step = None
        super().teardown()


def mean_of(values: Any, losses: Sequence[Tensor], rows: Tensor, loss: Tensor) -> Tensor:
    """Returns ``loss`` if the values of shards are ``losses``, and otherwise their mean over the
    rows of shards with a loss.
    """
    device = loss.device
    numbers = torch.stack([torch.as_tensor(value, device=device).double() for value in values])
    others = torch.stack([each.to(device).double() for each in losses])
    weights = rows.to(device) * ~others.isnan()
    mean = torch.where(weights > 0, numbers * weights, 0).sum() / weights.sum()
    return torch.where((numbers.isclose(others, equal_nan=True)).all(), loss.double(), mean)


class BalancedStrategy(ExactSteps, SingleDeviceStrategy):
    """A strategy of Lightning for one process, with a replica of the module on each device.

    Args:
        device_ids: as in :class:`DataParallelModel`.
        options: those of ``SingleDeviceStrategy``.

    Example:
        >>> trainer = Trainer(strategy=BalancedStrategy(), accumulate_grad_batches=4)  # doctest: +SKIP
    """

    def __init__(self, device_ids: Sequence[DeviceLike] | None = None, **options: Any) -> None:
        self.replica_devices = resolve_devices(device_ids)
        super().__init__(self.replica_devices[0], **options)


class BalancedDDPStrategy(ExactSteps, DDPStrategy):
    """A strategy of Lightning with a process for each device.

    Args:
        options: those of ``DDPStrategy``, but for those of ``DistributedDataParallel`` itself.

    Example:
        >>> trainer = Trainer(strategy=BalancedDDPStrategy(), devices=2)  # doctest: +SKIP
    """

    def _setup_model(self, model: nn.Module) -> Any:
        """Returns the module itself, which the :class:`TrainStep` wraps."""
        if options := [*self._ddp_kwargs, *filter(None, [self._ddp_comm_hook])]:
            raise TypeError(f"{options} were given, expected no options of DistributedDataParallel")
        return model
