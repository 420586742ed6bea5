"""``DataParallelModel``: a batch over the devices of one process.

Each output stays on the device of its replica.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..batch.containers import Dims, check_dim, check_dims, leaf_dims, leaves
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica
from ..batch.plan import check_split, share_by_memory
from ..batch.rows import Batch, Noting, ParallelModel, Shard, move_arguments
from ..runtime.collectives import OnCollective
from ..runtime.devices import NO_BLOCK, DeviceLike, resolve_device, resolve_devices
from ..runtime.module_state import refuse_setting
from ..runtime.random_numbers import offset_seeds
from ..runtime.torch_private import children_of, is_profiled, profiled
from ..runtime.values import Precision, PrecisionName, check_type, naming_arguments
from .all_rows import SumOverRows
from .batchnorm import AllRowsBatchNorm
from .module_tree import check_module
from .recorded import Refresh
from .replicas import Replicas, window


class DataParallelModel(ParallelModel, nn.DataParallel[nn.Module]):
    """Runs a module on rows of the batch on every device, and returns the list of their outputs,
    each on its own device.

    Replaces ``torch.nn.DataParallel``. It is a subclass, with the same ``.module`` and
    ``state_dict()``, but outputs are not gathered on the first device. They are a
    :class:`PerReplica`, a list with one output per replica. Pass it to a
    :class:`DataParallelCriterion`, to :func:`gather`, or to another ``DataParallelModel``.

    Rows are split as by :func:`scatter`. A batch with fewer rows than devices uses fewer replicas.
    A batch without rows uses one. Each replica runs in a thread of its own, with the caller's
    gradient mode, autocast, default device, streams, context variables, hooks of saved tensors, and
    modes of torch. Replicas persist between forwards and follow every change of the module that
    Python makes. The first one is the module itself, so writes to its buffers stay, as in
    ``nn.DataParallel``.

    Args:
        module: moved to the first device. Parameters and their gradients stay there.
        device_ids: integers, strings or devices, of any type. A device may be named several times
            (``["cpu"] * 4``). ``None`` is every visible accelerator, else the CPU.
        output_device: device of the outputs if ``gather_outputs=True``; ``None`` is the first
            device.
        dim: the dimension of the rows in inputs and outputs. At the call, :class:`Along`,
            :class:`Whole` and :class:`Rows` mark arguments that are different.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for autocast inside
            every replica. ``None`` is the autocast of the caller.
        split: for unequal shards one weight per device, or ``"memory"``, the free bytes of each
            device when the model is made. ``None`` is equal shards. The weights are in
            ``model.split`` and ``repr(model)``.
        out_dims: the dimension of the rows in outputs, for :func:`gather`, or ``None`` for outputs
            that are the same on all replicas. For several outputs, a sequence of these in their
            order. The default is ``dim``.
        gather_outputs: returns the outputs gathered on ``output_device``, as ``nn.DataParallel``
            does, for loops that compute their loss themselves. That device then stores all of them.
        refresh: when a parameter is copied to the other devices, before a forward by hand or a call
            of :class:`TrainStep`. ``"recorded"`` is after a write: frozen weights are copied once,
            and those of a :class:`BalancedOptimizer` not at all, since it copies them itself. Torch
            records most writes. Sums of the bits of the weights show the others, such as
            ``parameter.data.mul_()``. The first device computes them, and the host waits for it
            before the forward. What a plain optimizer trains is copied, without a sum.
            ``"always"`` copies all parameters, and waits for nothing. Buffers are copied at every
            forward.

    Raises:
        TypeError: the module is a class, or not a module, or is wrapped already.
        ValueError: this machine does not have one of the devices; another ``refresh``; at the call,
            inputs have different numbers of rows.
        BaseException: the first failure of a replica. A note on it names the replica and its
            device.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(4, 2), ["cpu"] * 3)
        >>> outputs = model(torch.zeros(7, 4))
        >>> [tuple(output.shape) for output in outputs]
        [(3, 2), (2, 2), (2, 2)]
        >>> outputs.gather().shape
        torch.Size([7, 2])
    """

    @naming_arguments
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        precision: PrecisionName | Precision | None = None,
        split: Sequence[float] | str | None = None,
        out_dims: Dims = None,
        gather_outputs: bool = False,
        refresh: Refresh = "recorded",
    ) -> None:
        nn.Module.__init__(self)  # nn.DataParallel's refuses CPUs
        check_module(module)
        check_dim(dim)
        check_type("gather_outputs", gather_outputs, bool, "True or False")
        check_dims(out_dims, "out_dims")
        devices = resolve_devices(device_ids)
        self._set_up(devices, split, Replicas(refresh), dim, precision)
        self.out_dims = dim if out_dims is None else out_dims
        self.gather_outputs = gather_outputs
        self._gathers_on = devices[0] if output_device is None else resolve_device(output_device)
        self.output_device = 0 if self._gathers_on.index is None else self._gathers_on.index
        self.module = module.to(devices[0])

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, but for those of the module."""
        refuse_setting(self, name)
        super().__setattr__(name, value)

    def _set_up(
        self, devices: list[torch.device], split: Any, replicas: Replicas, dim: int, precision: Any
    ) -> None:
        """Sets what a forward needs, but for ``module``.

        A subclass passes its own devices and replicas.
        """
        self.devices = devices
        self.replicas = replicas
        # the weight of each device; None for equal parts
        self.split = (
            share_by_memory(devices) if split == "memory" else check_split(split, len(devices))
        )
        self.precision = Precision(precision or "fp32")
        self.dim = self.out_dims = dim
        self.gather_outputs = False
        self._warned = False
        self.runs = {}
        self.device_ids = [0 if device.index is None else device.index for device in devices]
        self.src_device_obj = devices[0]

    def extra_repr(self) -> str:
        """Returns the devices and their shares, for ``repr(model)``."""
        shares = (
            ", ".join(f"{weight / sum(self.split):.1%}" for weight in self.split)
            if self.split
            else "equal"
        )
        return f"devices={[str(device) for device in self.devices]}, shares: {shares}"

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Defers the reduction of gradients, so that those of several micro-batches are reduced
        once.

        Gradients of forwards in this block accumulate on the replicas, those of the first one in
        ``parameter.grad``. The next backward of a forward outside of the block reduces them, and so
        does :meth:`reduce_gradients`. ``optimizer.zero_grad()`` discards them; with
        ``set_to_none=False``, call :meth:`zero_grad` of the model.

        Example:
            >>> model = DataParallelModel(torch.nn.Linear(4, 1), ["cpu"] * 2)
            >>> with model.no_sync():  # the first of two micro-batches
            ...     weighted_mean([output.sum() for output in model(torch.ones(3, 4))], [1, 1]).backward()
            >>> weighted_mean([output.sum() for output in model(torch.ones(3, 4))], [1, 1]).backward()  # reduces both
            >>> model.module.bias.grad
            tensor([3.])
        """
        return window(self, deferred=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters, those that have accumulated on the replicas, and
        those that are sharded.
        """
        super().zero_grad(set_to_none)
        self.replicas.gradients.drop()

    def refresh_replicas(self) -> None:
        """Copies all parameters again before the next forward or update.

        This is needed after a write that torch's version counters do not record, such as
        ``parameter.data.clamp_(...)``, in a block of :meth:`no_sync` or ``savings.inference``,
        where only the first forward looks for them.
        """
        self.replicas.forget_values()

    def reduce_gradients(self) -> None:
        """Sums the gradients that have accumulated on the replicas under :meth:`no_sync`, if no
        backward has done so.
        """
        self.replicas.gradients.reduce()

    def _run_by_hand(self, method: str | None, arguments: Arguments) -> Any:
        if len(self.devices) > 1 and torch.compiler.is_compiling():
            # the compiler does not trace it, so its error is raised
            torch.compiler.disable(_refuse_compilation)()
        batch = Batch(arguments, dims=(self.dim, 0))
        # the forward may ask for gradients of its inputs under no_grad too
        with torch.enable_grad():
            shards = batch.split(self.devices, self.split)
        try:
            outputs = self._run_shards(shards, method)
        except RuntimeError as error:
            if self.dim:
                error.add_note(f"dim={self.dim} has split the inputs along dimension {self.dim}")
            raise
        return self._gather(outputs) if self.gather_outputs else outputs

    def _run_shards(self, shards: Sequence[Shard], method: str | None = None) -> PerReplica:
        """Runs a replica on each shard of one forward, which are in the order of the ``devices``.

        Returns their outputs.
        """
        devices = [shard.device for shard in shards]
        sizes = [None if shard.rows is None else len(shard.rows) for shard in shards]
        if len(devices) > 1 and {device.type for device in devices} != {"cpu"}:
            offset_seeds(self.devices)
        module: Any = children_of(self)["module"]  # self.module would call __getattr__
        with (
            self.precision.autocast(devices),
            self.replicas.of(module, devices, self.devices[0]) as modules,
        ):
            work = [
                functools.partial(_call, method, self.noting, *replica)
                for replica in zip(modules, shards, strict=True)
            ]
            tree = self.replicas.tree  # always there if several replicas run
            parts = [] if tree is None else tree.modules
            meets = [isinstance(part, (AllRowsBatchNorm, SumOverRows)) for part in parts]
            kind = method, module.training
            run = functools.partial(self.replicas.run, work, devices, together=any(meets))
            has_run = len(devices) == 1 or kind in self.runs
            outputs = run() if has_run else self._run_first(kind, run)
        if self.noting is not None:
            return self._open(self.noting, outputs, sizes)
        return PerReplica(outputs, sizes, self.out_dims)

    def _run_first(self, kind: tuple[str | None, bool], run: Callable[[], list[Any]]) -> list[Any]:
        """Runs the first forward of a method on several devices, which must rescale no weight."""
        tree = self.replicas.tree
        is_watched = tree is not None and not (tree.is_compiled or tree.rescaled)
        with OnCollective(bool) if is_watched else NO_BLOCK:
            outputs = run()
        self.runs[kind] = False
        return outputs

    def _gather(self, outputs: PerReplica) -> Any:
        gathered = outputs.on(self._gathers_on)
        count = len(outputs)
        has_more_rows = count != sum(size or 0 for size in outputs.sizes)
        may_warn = count > 1 and has_more_rows and torch.is_grad_enabled() and not self._warned
        for (place, leaf), dim in zip(
            leaves(gathered) if may_warn else (), leaf_dims(gathered, self.out_dims), strict=False
        ):
            shape = leaf.shape if dim is not None and isinstance(leaf, torch.Tensor) else ()
            if shape == (count,) or shape[dim:][:1] == (count,):
                self._warned = True
                warnings.warn(
                    f"the output{place} has one value per replica. If it is a loss, the mean of the gathered values is not the "
                    "loss of the batch if replicas have different weights: use weighted_mean(losses, weights), or a "
                    "DataParallelCriterion with weight= and no gather_outputs",
                    stacklevel=7,
                )
        return gathered


def _refuse_compilation() -> None:
    raise RuntimeError(
        "torch.compile was given a model on several devices, whose replicas it cannot trace, expected the module alone: call "
        "model.compile(), and do not compile the function that calls the model"
    )


def _call(method: str | None, noting: Noting | None, replica: nn.Module, shard: Shard) -> Any:
    with torch.enable_grad():
        inputs, kwargs = move_arguments(shard.inputs, shard.device)
    function = replica if method is None else getattr(replica, method)
    if noting is not None:
        function = functools.partial(noting.call, replica, function)
    with shard.context(), profiled(f"replica on {shard.device}") if is_profiled() else NO_BLOCK:
        return function(*inputs, **kwargs)
