"""``release_gradients_in_backward``: updates in the backward, so that all gradients never exist at once."""

import copy
import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..runtime.collectives import world_size
from .saving import Saving

RELEASES: "weakref.WeakKeyDictionary[Optimizer, GradientRelease]" = weakref.WeakKeyDictionary()


def release_gradients_in_backward(optimizer: Optimizer) -> "GradientRelease":
    """Updates each parameter in the backward, as soon as its gradient is final, and frees the gradient.

    A loop by hand stays as it is, and so do its result, schedulers and ``optimizer.state_dict()``. ``optimizer.step()`` updates
    nothing more, but marks the end of the step: two backwards before it raise ``RuntimeError``. Gradients cannot be clipped,
    unscaled or read after the backward. :class:`TrainStep` raises ``TypeError``. A backward that fails has updated some of the
    parameters.

    Args:
        optimizer: one of ``torch.optim``, except LBFGS. Parameters that are frozen now or added later are updated by ``step()``.

    Returns:
        A handle. ``handle.remove()`` brings back the plain optimizer.

    Raises:
        TypeError: another optimizer, whose updates may depend on all gradients.
        ValueError: the gradients of this optimizer are released already.
        RuntimeError: several ranks are running. Their gradients are reduced after the backward has made them.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> handle = savings.release_gradients_in_backward(optimizer)
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> [parameter.grad for parameter in net.parameters()]
        [None, None, None, None]
        >>> optimizer.step()
    """
    step = getattr(type(optimizer), "step", None)
    if not isinstance(optimizer, Optimizer) or not str(step.__module__).startswith("torch.optim."):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}, expected one of torch.optim")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS needs the gradients of all parameters at once, expected an optimizer that updates each alone")
    if optimizer in RELEASES:
        raise ValueError("the gradients of this optimizer are released already: call this once, or handle.remove() before")
    _refuse_ranks()
    RELEASES[optimizer] = release = GradientRelease(optimizer)
    return release


class GradientRelease:
    """A handle of :func:`release_gradients_in_backward`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._updated: set[int] = set()  # since the last step
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._refuse_gradients),
            optimizer.register_step_post_hook(lambda *_: self._updated.clear()),
        ]
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    hook = functools.partial(self._update, copy.copy(optimizer), number)  # the copy shares the state
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Keeps gradients until ``optimizer.step()`` again."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            RELEASES.pop(optimizer, None)

    def _update(self, single: Any, group: int, parameter: Tensor) -> None:
        """Updates a parameter with its own copy of the optimizer. Device threads of the backward may run several at once."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        _refuse_ranks()
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient before optimizer.step(): call this after "
                "each backward. To accumulate gradients, leave out release_gradients_in_backward"
            )
        self._updated.add(id(parameter))
        single.state = optimizer.state  # load_state_dict() replaces it
        single.param_groups = [{**optimizer.param_groups[group], "params": [parameter]}]
        type(optimizer).step(single)
        parameter.grad = None

    def _refuse_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._updated:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} was updated in the backward, and has a gradient again: "
                        "it would be updated twice. Set its grad to None, or leave out release_gradients_in_backward"
                    )


def _refuse_ranks() -> None:
    if world_size() > 1:
        raise RuntimeError(
            f"release_gradients_in_backward needs one process, {world_size()} ranks reduce their gradients after the backward"
        )


RELEASE = Saving(
    name="release_gradients_in_backward",
    option="gradients released in the backward",
    saves="the gradients, but the largest",
    cost="no clipping, no accumulation",
    needs="one process, and a loop by hand",
    order=330,
    stage="by hand",
)
