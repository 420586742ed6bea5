"""``memory.fit``: the micro-batches that it chooses fit simulated devices, and one more row does not."""

import functools

import pytest
import torch
from helpers.memory_problems import VOCABULARY, LanguageModel, conv_net, tokens
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, memory, parallelize, simulate


def batch(rows):
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (rows, 16)), torch.randint(VOCABULARY, (rows, 16))


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **settings)


def groups(model):
    named = dict(model.named_parameters())
    some = [{"params": [p for n, p in named.items() if "layers" in n], "amsgrad": True}]
    return torch.optim.AdamW([*some, {"params": [p for n, p in named.items() if "layers" not in n], "foreach": False}])


def several(model):
    first, *others = model.parameters()
    return [torch.optim.SGD([first], momentum=0.9), torch.optim.Adam(others)]


OPTIMIZERS = {
    "AdamW": adamw,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "groups": groups,
    "several": several,
    "BalancedOptimizer": lambda model: BalancedOptimizer(model, torch.optim.AdamW, amsgrad=True),
    "capturable": functools.partial(adamw, capturable=True),
}


def make_step(make_optimizer, devices=None, split=None, weight=None, criterion=None, **settings):
    model = DataParallelModel(LanguageModel(), devices, split=split)
    return TrainStep(model, DataParallelCriterion(criterion or nn.CrossEntropyLoss(), weight=weight), make_optimizer(model), **settings)


def fits(make, size, capacity, rows):
    """Returns True if two steps with micro-batches of ``size`` rows run within the capacity."""
    with simulate(len(capacity), list(capacity)):
        step = make()
        step.micro_batch_size = size
        try:
            for _ in range(2):
                step(*batch(rows))
        except torch.OutOfMemoryError:
            return False
        return True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chosen_rows_fit_and_one_more_does_not(name):
    capacity = ("4MiB",) * 2
    make = functools.partial(make_step, OPTIMIZERS[name])
    with simulate(2, capacity) as cluster:
        step = make()
        report = memory.fit(step, *batch(90))
        size = step.micro_batch_size
        for _ in range(2):
            cluster.reset_peak()
            step(*batch(90))
        assert 1 < size < 45
        assert max(report.peak) == pytest.approx(max(cluster.peak), rel=0.01)
        assert memory.fit(step, *batch(90)).micro_batches == report.micro_batches  # also with the state that exists now
        assert abs(step.micro_batch_size - size) <= 1
    assert not fits(make, size + 1, capacity, (size + 1) * 6)
