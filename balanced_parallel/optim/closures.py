"""Optimizers whose step evaluates the loss again."""

import inspect

import torch

__all__: list[str] = []


def refuse_closures(optimizer: torch.optim.Optimizer, caller: str) -> None:
    """Raises ``TypeError`` if ``optimizer.step()`` needs a closure, which ``caller`` does not have.

    Args:
        optimizer: any optimizer.
        caller: name of the class or function for the message.
    """
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if parameters and parameters[0].default is inspect.Parameter.empty and parameters[0].name == "closure":
        raise TypeError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, and {caller} once: expected an optimizer "
            "whose step() needs no closure; otherwise call optimizer.step(closure) in a loop of your own, where the closure "
            "calls criterion(model(inputs), targets).backward()"
        )
