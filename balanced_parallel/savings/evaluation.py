"""Evaluation and logging: ``inference`` runs models without a graph, ``RunningLoss`` is the mean of the losses of many steps."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..replicas.replicas import window
from ..runtime.collectives import rank, sum_over_ranks
from ..runtime.devices import widest_float


@contextlib.contextmanager
def inference(*modules: nn.Module) -> Iterator[None]:
    """Keeps no activations in this block, and puts modules in evaluation mode until its end.

    Afterwards each submodule is in the mode that it had before, so a frozen batch norm stays frozen. Replicas of a
    :class:`DataParallelModel` get the parameters once; after a write through ``.data`` in this block, call
    ``model.refresh_replicas()``. Results are inference tensors, and cannot be part of a later graph. It is also a decorator.

    Args:
        modules: models and criteria, in :class:`DataParallelModel` and so on or not.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> with savings.inference(model):
        ...     output = gather(model(torch.zeros(3, 4)))
        >>> output.requires_grad, net.training
        (False, True)
    """
    before = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    try:
        for module in modules:
            module.eval()
        with window(*(submodule for submodule, _ in before)), torch.inference_mode():
            yield
    finally:
        for submodule, training in before:
            submodule.training = training


class RunningLoss:
    """Weighted mean of losses. It keeps no graph, and waits for no device before :meth:`compute`.

    Sums stay on the devices of the losses, in float64 where a device has it. Under torchrun the mean is over all ranks.

    Example:
        >>> running = savings.RunningLoss()
        >>> running.update(torch.tensor(1.0), weight=3)
        >>> running.update(torch.tensor(5.0), weight=1)
        >>> running.compute()
        2.0
        >>> running.reset()
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all losses."""
        self._sums: dict[torch.device, Tensor] = {}  # weighted sum of losses, sum of weights

    def update(self, loss: Tensor | float, weight: Tensor | float = 1) -> None:
        """Adds the mean loss of some rows.

        Args:
            loss: a scalar.
            weight: number of rows, targets or tokens that it is the mean of. With weight zero, even nan does not count.

        Raises:
            ValueError: the loss or the weight is not a scalar.
        """
        device = torch.device("cpu")
        for name, value in (("loss", loss), ("weight", weight)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"the {name} has shape {tuple(value.shape)}, expected a scalar")
            device = value.device if device.type == "cpu" and isinstance(value, Tensor) else device
        with torch.no_grad():
            mean, count = (_on(each, device) for each in (loss, weight))
            pair = torch.stack([torch.where(count == 0, 0, mean * count), count])
            self._sums[device] = pair + self._sums.get(device, 0)

    def compute(self) -> float:
        """Returns the mean; nan without a loss. This reads each device once. All ranks must call it."""
        sums = self.state_dict()
        return sums["total"] / (sums["weight"] or math.nan)

    def state_dict(self) -> dict[str, float]:
        """Returns the sums over all ranks. All ranks must call it."""
        pairs: list[list[float]] = [[0.0, 0.0], *(pair.tolist() for pair in self._sums.values())]
        sums = torch.tensor([[math.fsum(column)] for column in zip(*pairs, strict=True)], dtype=torch.float64)
        total, weight = sum_over_ranks(sums).flatten().tolist()
        return {"total": total, "weight": weight}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Takes the sums, which any number of ranks may have saved."""
        self.reset()
        if rank() == 0:
            self._sums[torch.device("cpu")] = torch.tensor([state_dict["total"], state_dict["weight"]], dtype=torch.float64)


def _on(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns a number on a device. A number of the host is filled in, and does not wait for the device."""
    dtype = widest_float(device)
    if isinstance(value, Tensor) and not value.is_cpu:
        return value.detach().reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), float(value.detach() if isinstance(value, Tensor) else value), dtype=dtype, device=device)
