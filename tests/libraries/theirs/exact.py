"""Trainers with ``BalancedTrainer`` before them, for the tests of TRL and of transformers."""

import copy

from transformers import TrainingArguments

SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "generation_batch_size")


def divide(args, number: int):
    """Returns arguments with a part of the rows for each device, if their numbers can be divided."""
    sizes = {name: getattr(args, name, None) or 0 for name in SIZES}
    if not isinstance(args, TrainingArguments) or any(size % number for size in sizes.values()):
        return args
    divided = copy.copy(args)
    vars(divided).update({name: size // number for name, size in sizes.items() if size})
    return divided


def exact(kind, number: int):
    """Returns a subclass of a trainer on a number of devices, with ``BalancedTrainer`` before it."""
    from balanced_parallel.integrations.transformers import BalancedTrainer

    class Exact(BalancedTrainer, kind):
        def __init__(self, *arguments, **settings):
            if number > 1:
                arguments = [divide(value, number) for value in arguments]
                settings = {name: divide(value, number) for name, value in settings.items()}
                settings["device_ids"] = ["cpu"] * number
            super().__init__(*arguments, **settings)

    Exact.__name__ = kind.__name__
    return Exact
