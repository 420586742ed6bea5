"""Checks of the optimizers of a :class:`TrainStep`."""

from collections.abc import Sequence

from torch.optim.lr_scheduler import LRScheduler

from ..optim.balanced import BalancedOptimizer
from ..optim.closures import refuse_closures
from .update import Update

__all__: list[str] = []


def check_optimizers(update: Update, schedulers: Sequence[LRScheduler]) -> None:
    """Checks that the optimizers update parameters of the model or of the criterion, and the schedulers these optimizers.

    Raises:
        TypeError: an optimizer needs a closure.
        ValueError: an optimizer has parameters, but none of them is trained; a scheduler is that of another optimizer.
    """
    for scheduler in schedulers:  # a wrapper of an optimizer shares its groups
        if not any(scheduler.optimizer.param_groups is optimizer.param_groups for optimizer in update.optimizers):
            raise ValueError(
                f"{type(scheduler).__name__} was made for another {type(scheduler.optimizer).__name__}, expected the optimizer "
                "of this step: its learning rate would never change"
            )
    trained = {id(tensor) for tensor in update.trained.values()}
    for number, optimizer in enumerate(update.optimizers):
        refuse_closures(optimizer, "TrainStep")
        if isinstance(optimizer, BalancedOptimizer):  # its groups have the shards
            continue
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if given and not any(id(parameter) in trained for parameter in given):
            name = f"{type(optimizer).__name__} (optimizer {number})" if number else type(optimizer).__name__
            raise ValueError(
                f"{name} has {len(given)} parameter(s), and none is a parameter of the model or the criterion: nothing would be "
                "trained. Make the optimizer of model.parameters(), after the model was wrapped, moved or sharded"
            )
