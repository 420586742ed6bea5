"""``DataParallelModel``: a batch over the devices of one process, with every output left where it was computed."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .batchnorm import has_layers_over_all_rows
from .devices import DeviceLike, resolve_device, resolve_devices
from .execution import run_replicas
from .precision import Precision
from .replication import Replicas
from .scattering import Arguments, Pieces, assign_rows, count_rows, cut, move_leaves
from .shares import Shares

__all__: list[str] = []


class DataParallelModel(nn.DataParallel[nn.Module]):
    """Runs a module on rows of the batch on every device, and returns the list of their outputs, each on its own device.

    A drop-in for ``torch.nn.DataParallel`` (it is one to ``isinstance``, with its ``.module`` and its ``state_dict()``), except
    that outputs are not gathered on the first device. :class:`DataParallelCriterion` takes them as they are; :func:`gather` puts
    them together where the results themselves are wanted.

    Rows are cut as :func:`scatter` does. Fewer rows than devices use fewer replicas; a batch with no rows, or inputs that
    have no rows, use one. Each replica runs with the caller's gradient mode, inference mode, autocast (flag and dtype) and
    default device. Replicas live between forwards, and follow every change of the module that Python makes. The first replica
    is the module itself, so what it writes to its buffers stays, as in ``nn.DataParallel``.

    Args:
        module: moved to the first device, where its parameters and their gradients live.
        device_ids: integers, strings or devices, of any type; the same one may be named several times (``["cpu"] * 4``).
            ``None`` is every visible accelerator, else the CPU.
        output_device: kept for the signature of ``nn.DataParallel``: outputs stay where they are, and
            ``gather(outputs, device)`` names the place.
        dim: the dimension of the rows in the inputs.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for autocast inside every replica. ``None`` is
            the autocast of the caller.
        split: for unequal parts one weight per device, ``"memory"`` (the bytes that each has free) or ``"speed"`` (the rows per
            second that each has shown, measured again ever more rarely); ``None`` cuts into sizes that differ by at most one
            row. The weights that are used now are in ``model.split``, and in ``repr(model)``.

    Raises:
        ValueError: a device that this machine does not have; at the call, inputs that disagree about the number of rows.
        BaseException: the first failure of a replica, of its own type, with the replica and its device in the message.
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
    ) -> None:
        nn.Module.__init__(self)  # not nn.DataParallel's, which knows no CPUs
        self.devices = resolve_devices(device_ids)
        self.shares = Shares(split, self.devices)
        self.precision = Precision("fp32" if precision is None else precision)
        self.dim = dim
        self.replicas = Replicas()
        self.module = module.to(self.devices[0])
        self.device_ids = [0 if device.index is None else device.index for device in self.devices]
        place = self.devices[0] if output_device is None else resolve_device(output_device)
        self.output_device = 0 if place.index is None else place.index
        self.src_device_obj = self.devices[0]

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
        return self.replicas.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none)
        for parameter in self.parameters() if set_to_none else ():
            parameter.grad = None  # without a look at what it was, which may lie on other devices
        self.replicas.drop()

    def refresh_replicas(self) -> None:
        """Copies all parameters again before the next forward or update. Needed only after a write that Python does not see, such
        as that of a kernel that is given the parameters' addresses."""
        self.replicas.forget_values()

    def reduce_gradients(self) -> None:
        """Sums what the replicas hold after :meth:`no_sync`, where no other backward did."""
        self.replicas.reduce()

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        rows = count_rows(Arguments(inputs, kwargs), self.dim)
        self.shares.begin()
        devices, sizes = assign_rows(rows, self.devices, self.split)
        batches = [(inputs, kwargs)] if sizes is None else cut((inputs, kwargs), sizes, self.dim)
        with self.precision.autocast(devices), self.replicas.handed_out(self.module, devices, self.devices[0]) as modules:
            work = [
                functools.partial(_call, replica, batch, device)
                for replica, batch, device in zip(modules, batches, devices, strict=True)
            ]
            timed = self.shares.timed(list(work), devices, sizes)
            together = len(work) > 1 and has_layers_over_all_rows(self.replicas.modules_of(self.module))
            outputs = run_replicas(timed, devices, together=together)
        return Pieces(outputs, sizes or [None])


def _call(replica: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device) -> Any:
    inputs, kwargs = move_leaves(batch, device)
    return replica(*inputs, **kwargs)
