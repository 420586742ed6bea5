"""``DataParallelModel``: a batch over the devices of one process, with every output left where it was computed."""

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..batch.dims import Dims, check_dims
from ..batch.gathering import join
from ..batch.nested import leaves
from ..batch.per_replica import PerReplica
from ..batch.provenance import refuse_list
from ..batch.row_marks import Arguments, dims_of_method, mark
from ..batch.rows import count_rows, cut, move_leaves
from ..batch.splits import Shares, assign_rows
from ..runtime.devices import DeviceLike, resolve_device, resolve_devices
from ..runtime.precision import Precision
from .replicas import Replicas
from .sync_batchnorm import has_layers_over_all_rows

__all__: list[str] = []


class DataParallelModel(nn.DataParallel[nn.Module]):
    """Runs a module on rows of the batch on every device, and returns the list of their outputs, each on its own device.

    A drop-in for ``torch.nn.DataParallel`` (it is one to ``isinstance``, with its ``.module`` and its ``state_dict()``), except
    that outputs are not gathered on the first device. They are a :class:`PerReplica`: a list, which
    :class:`DataParallelCriterion` takes as it is, which :func:`gather` puts together where the results themselves are wanted,
    and which is an input to another ``DataParallelModel`` or to the same one, whose replicas find their rows where they are.
    With ``gather_outputs=True`` the call returns what ``torch.nn.DataParallel`` returns.

    Rows are cut as :func:`scatter` does. Fewer rows than devices use fewer replicas; a batch with no rows, or inputs that
    have no rows, use one. Each replica runs with the caller's gradient mode, inference mode, autocast (flag and dtype) and
    default device. Replicas live between forwards, and follow every change of the module that Python makes. The first replica
    is the module itself, so what it writes to its buffers stays, as in ``nn.DataParallel``.

    Args:
        module: moved to the first device, where its parameters and their gradients live.
        device_ids: integers, strings or devices, of any type; the same one may be named several times (``["cpu"] * 4``).
            ``None`` is every visible accelerator, else the CPU.
        output_device: where ``gather_outputs=True`` puts the outputs; ``None`` is the first device. Without it outputs stay
            where they are, and ``gather(outputs, device)`` names the place.
        dim: the dimension of the rows in inputs and outputs.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for autocast inside every replica. ``None`` is
            the autocast of the caller.
        split: for unequal parts one weight per device, ``"memory"`` (the bytes that each has free) or ``"speed"`` (the rows per
            second that each has shown, measured again ever more rarely); ``None`` cuts into sizes that differ by at most one
            row. The weights that are used now are in ``model.split``, and in ``repr(model)``.
        in_dims: the dimension of the rows, argument by argument, as in ``torch.vmap``: a sequence by position, or a mapping by
            position or name. An entry is a dimension, ``None`` for an argument that every replica needs whole, or a
            sequence or mapping of these for a nested argument. What is not named has its rows in ``dim``. :class:`Whole` and
            :class:`Rows` say the same at the call.
        out_dims: the same for the outputs, by position or name of their entries: where :func:`gather` finds the rows; ``None``
            for an entry that all replicas have alike. Left out, it is ``dim``.
        gather_outputs: returns the outputs gathered on ``output_device``, as ``nn.DataParallel`` does, for wrappers inside of
            models and loops that compute their loss and metrics themselves. That device then holds all of them.

    Raises:
        TypeError: the module is a class, or not a module, or is wrapped already.
        ValueError: a device that this machine does not have; at the call, inputs that disagree about the number of rows.
        BaseException: the first failure of a replica, of its own type, with the replica and its device in the message.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(4, 2), ["cpu"] * 3)
        >>> outputs = model(torch.zeros(7, 4))
        >>> [tuple(output.shape) for output in outputs]
        [(3, 2), (2, 2), (2, 2)]
        >>> outputs.gather().shape
        torch.Size([7, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        precision: str | Precision | None = None,
        split: Sequence[float] | str | None = None,
        in_dims: Dims = None,
        out_dims: Dims = None,
        gather_outputs: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # not nn.DataParallel's, which knows no CPUs
        check_module(module)
        check_dims(in_dims, "in_dims")
        check_dims(out_dims, "out_dims")
        devices = resolve_devices(device_ids)
        self._set_up(
            devices,
            Replicas(),
            dim=dim,
            precision=precision,
            split=split,
            in_dims=in_dims,
            out_dims=out_dims,
            gather_outputs=gather_outputs,
            gather_device=None if output_device is None else resolve_device(output_device),
        )
        self.module = module.to(devices[0])

    def _set_up(
        self,
        devices: list[torch.device],
        replicas: Replicas,
        *,
        dim: int,
        precision: str | Precision | None,
        split: Sequence[float] | str | None,
        in_dims: Dims = None,
        out_dims: Dims = None,
        gather_outputs: bool = False,
        gather_device: torch.device | None = None,
    ) -> None:
        """Sets every attribute but ``module``, for a subclass that has devices and replicas of its own."""
        self.devices = devices
        self.shares = Shares(split, devices)
        self.precision = Precision("fp32" if precision is None else precision)
        self.dim = dim
        self.in_dims = in_dims
        self.out_dims = dim if out_dims is None else out_dims
        self.gather_outputs = gather_outputs
        self.replicas = replicas
        self.device_ids = [0 if device.index is None else device.index for device in devices]
        self._gathers_on = gather_device or devices[0]
        self.output_device = 0 if self._gathers_on.index is None else self._gathers_on.index
        self._warned = False
        self.src_device_obj = devices[0]

    @property
    def split(self) -> tuple[float, ...] | None:
        """The weight of each device in the next forward; None for equal parts."""
        return self.shares.weights

    def extra_repr(self) -> str:
        return f"devices={[str(device) for device in self.devices]}, shares: {self.shares!r}"

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients of forwards in this block stay with the replicas, where later ones add to them, until the next backward
        of a forward outside of it, or :meth:`reduce_gradients`: for micro-batches, whose sum then moves once. To read
        ``parameter.grad`` sums them too; to set it, as ``optimizer.zero_grad()`` does, discards them."""
        return self.replicas.gradients.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none)
        for parameter in self.parameters() if set_to_none else ():
            parameter.grad = None  # without a look at what it was, which may lie on other devices
        self.replicas.gradients.drop()

    def refresh_replicas(self) -> None:
        """Copies all parameters again before the next forward or update. Needed only after a write that Python does not see, such
        as that of a kernel that is given the parameters' addresses."""
        self.replicas.copies.forget_values()

    def reduce_gradients(self) -> None:
        """Sums what the replicas hold after :meth:`no_sync`, where no other backward did."""
        self.replicas.gradients.reduce()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._run(None, Arguments(inputs, kwargs))

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Calls another method of the module than ``forward``, its rows cut and its outputs returned as those of a forward.

        Args:
            method: its name.
            inputs, kwargs: its arguments. What ``in_dims`` says by name is true of them too; its positions are those of
                ``forward``.

        Example:
            >>> features = model.call("encode_image", images)  # doctest: +SKIP
        """
        check_method(self.module, method)
        return self._run(method, Arguments(inputs, kwargs))

    def mark(self, arguments: Arguments, method: str | None = None) -> Arguments:
        """The arguments with what ``in_dims`` says about their rows."""
        return mark_inputs(arguments, self.in_dims, self.module, method)

    def _run(self, method: str | None, arguments: Arguments) -> Any:
        arguments = self.mark(arguments, method)
        rows = count_rows(arguments, self.dim)
        self.shares.begin()
        devices, sizes = assign_rows(rows, self.devices, self.split)
        batches = [arguments] if sizes is None else cut(arguments, sizes, self.dim)
        with self.precision.autocast(devices), self.replicas.of(self.module, devices, self.devices[0]) as modules:
            work = [
                functools.partial(_call, replica, method, batch, device)
                for replica, batch, device in zip(modules, batches, devices, strict=True)
            ]
            timed = self.shares.timed(list(work), devices, sizes)
            together = len(work) > 1 and has_layers_over_all_rows(self.replicas.modules_of(self.module))
            outputs = self.replicas.workers(timed, devices, together=together)
        if self.gather_outputs:
            return self._gather(outputs)
        return PerReplica.of_forward(outputs, sizes or [None], self.out_dims)

    def _gather(self, outputs: list[Any]) -> Any:
        if len(outputs) == 1:
            return move_leaves(outputs[0], self._gathers_on)
        scalars = [place for place, leaf in leaves(outputs[0]) if isinstance(leaf, torch.Tensor) and leaf.dim() == 0]
        if scalars and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                f"the output{scalars[0]} is a scalar per replica, and gathered a vector of them. If it is a loss, their mean is "
                "not that of the batch where replicas count differently: use weighted_mean(losses, weights), or a "
                "DataParallelCriterion with weight= and no gather_outputs",
                stacklevel=6,
            )
        return join(outputs, self._gathers_on, self.out_dims)


def _call(replica: nn.Module, method: str | None, batch: Arguments, device: torch.device) -> Any:
    inputs, kwargs = move_leaves(batch.inputs, device), move_leaves(batch.kwargs, device)
    return (replica if method is None else getattr(replica, method))(*inputs, **kwargs)


def mark_inputs(arguments: Arguments, dims: Dims, module: nn.Module, method: str | None) -> Arguments:
    """The arguments of a module's ``forward``, or another method, marked with ``dims``.

    Raises:
        ValueError: a list of the outputs of replicas that is not a ``PerReplica`` any more.
    """
    for place, value in (*enumerate(arguments.inputs), *arguments.kwargs.items()):
        refuse_list(value, f"inputs[{place}]" if isinstance(place, int) else f"kwargs[{place!r}]")
    function = getattr(module, method or "forward")
    return mark(arguments, dims if method is None else dims_of_method(dims, function, method), function)


def check_method(module: nn.Module, name: str) -> None:
    """Raises ``ValueError`` where ``module`` has no method ``name``."""
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method {name!r} to call")


def check_module(module: Any) -> None:
    """Raises ``TypeError`` for what cannot be wrapped: a class, another object, a module that is wrapped already."""
    name = getattr(module, "__name__", type(module).__name__)
    if isinstance(module, type):
        raise TypeError(f"the module is the class {name}, expected an instance: write {name}(...)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the module is an object of type {name}, expected a torch.nn.Module")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the module is wrapped in {name} already, expected a plain one: pass its .module")
