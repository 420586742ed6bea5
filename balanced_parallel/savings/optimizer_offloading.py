"""``offload_optimizer``: an optimizer keeps its state on the host, and updates copies of the parameters there.

::

    device | gradients                                      parameters
           |     \\                                          /
    host   |      gradients -> step() with its state -> parameters

The optimizer stays what it is. While it steps, copies take the place of its parameters, by torch's hooks around ``step()``.
torchao's ``CPUOffloadOptimizer`` copies each gradient in a hook of the backward instead: before gradients are summed over ranks,
divided, unscaled and clipped.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..runtime.torch_private import is_sharded, map_tensors
from .saving import Saving


def offload_optimizer(optimizer: Optimizer) -> None:
    """Keeps the state of an optimizer on the host, and runs its step there. The update is the same, up to rounding.

    Each step copies gradients and parameters to pinned memory of the host, and the parameters back, and waits for the copies: 12
    bytes of traffic per parameter in float32. With AdamW the host holds 16 bytes per parameter: the state, and copies of
    parameter and gradient. Under torchrun each rank has them. ``state_dict()`` stays the same. Parameters on the CPU are
    updated in place. After a ``step()`` that raised an error, clear the gradients with ``zero_grad()`` of the model.

    Args:
        optimizer: an optimizer of whole parameters.

    Raises:
        TypeError: a :class:`BalancedOptimizer`, or sharded parameters. At a step: a closure was given.
        ValueError: the optimizer is offloaded already.

    Example:
        >>> with simulate(devices=1) as cluster:
        ...     net = torch.nn.Linear(512, 512).to("sim:0")
        ...     optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        ...     savings.offload_optimizer(optimizer)
        ...     net(torch.ones(2, 512, device="sim:0")).sum().backward()
        ...     optimizer.step()
        ...     [state["exp_avg"].device.type for state in optimizer.state.values()]
        ['cpu', 'cpu']
    """
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "shards"):
        raise TypeError(
            f"the optimizer is an object of type {type(optimizer).__name__}, expected an optimizer of whole parameters, such as "
            "torch.optim.AdamW: a BalancedOptimizer spreads its state over the devices"
        )
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise TypeError("the parameters are shards of FSDP2, expected whole ones: the ranks share the state already")
    if is_offloaded(optimizer):
        raise ValueError("the state of this optimizer is on the host already, expected one call of offload_optimizer")
    _HostStep(optimizer)


def is_offloaded(optimizer: Optimizer) -> bool:
    """Returns True after :func:`offload_optimizer`."""
    return optimizer in _offloaded


_offloaded: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class _HostStep:
    """The hooks of an optimizer, and the copies of its parameters on the host. In a trace, ``host`` is a fake device."""

    def __init__(self, optimizer: Optimizer, host: torch.device | None = None) -> None:
        self._is_traced, self._host = host is not None, host or torch.device("cpu")
        self._copies: dict[Tensor, Tensor] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)
        optimizer.register_load_state_dict_pre_hook(self._to_host)  # torch moves what it loads to the parameters
        optimizer.register_load_state_dict_post_hook(self._to_devices)
        _offloaded.add(optimizer)

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        if any(value is not None for value in (*arguments[1:], settings.get("closure"))):
            raise TypeError("step() got a closure, whose backward does not reach the copies on the host: expected step()")
        self._to_host(optimizer)
        for parameter, copy in self._copies.items():
            copy.copy_(parameter)  # a checkpoint may have been loaded since the last step
            copy.grad = self._gradient(parameter)

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        self._to_devices(optimizer)
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                parameter.copy_(copy)

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return None if gradient is None else gradient.to(self._host)
        return self._empty(gradient).copy_(gradient)

    def _empty(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self._host, pin_memory=not self._is_traced)

    def _to_host(self, optimizer: Optimizer, state_dict: Any = None) -> None:
        """Lets copies take the place of the parameters, in the groups and as keys of the state."""
        self._to_devices(optimizer)  # after a step that raised an error
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            is_there = parameter.device == self._host if self._is_traced else parameter.is_cpu
            if not is_there and parameter not in self._copies:
                self._copies[parameter] = nn.Parameter(self._empty(parameter.detach()), parameter.requires_grad)
        _replace(optimizer, self._copies)
        for copy in self._copies.values():
            if copy in optimizer.state:
                optimizer.state[copy] = map_tensors(lambda tensor: tensor.to(self._host), optimizer.state[copy])

    def _to_devices(self, optimizer: Optimizer) -> None:
        _replace(optimizer, {copy: parameter for parameter, copy in self._copies.items()})


def _replace(optimizer: Optimizer, others: dict[Tensor, Tensor]) -> None:
    """Replaces parameters of an optimizer, which keeps its settings and its state."""
    for group in optimizer.param_groups:
        group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
    state = {others.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


OFFLOAD_OPTIMIZER = Saving(
    name="offload_optimizer",
    option="optimizer on the host",
    saves="the optimizer's state",
    cost="traffic of gradients and parameters; the CPU updates",
    needs="whole parameters, and 16 bytes of host memory for each with AdamW",
    order=105,
    stage="layout",
    suits=lambda step: step.kind.like_cuda and not step.balanced and not step.layout.is_sharded,
    change_optimizer=_HostStep,
    lines=("savings.offload_optimizer(optimizer)",),
)
