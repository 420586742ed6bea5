"""Trainers with ``BalancedTrainer`` before them, for the tests of TRL and of transformers."""

import copy

SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "generation_batch_size")


def divide(args, number: int):
    """Returns arguments with a part of the rows for each device, if their numbers can be divided."""
    sizes = {name: getattr(args, name, None) or 0 for name in SIZES}
    if any(size % number for size in sizes.values()):
        return args
    divided = copy.copy(args)
    vars(divided).update({name: size // number for name, size in sizes.items() if size})
    return divided


def exact(kind, number: int):
    """Returns a subclass of a trainer on a number of devices, with ``BalancedTrainer`` before it."""
    from balanced_parallel.integrations.transformers import BalancedTrainer

    class Exact(BalancedTrainer, kind):
        def __init__(self, model=None, args=None, *positional, **settings):
            if args is not None and number > 1:
                args = divide(args, number)
            if number > 1:
                settings["device_ids"] = ["cpu"] * number
            super().__init__(model, args, *positional, **settings)

    Exact.__name__ = kind.__name__
    return Exact
