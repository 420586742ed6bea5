"""Copies of a step."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net, class_targets
from helpers.steps import run
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize

CPUS = ["cpu"] * 3


def make_update_step(net, optimizer, **settings):
    return TrainStep(DataParallelModel(net, CPUS), DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, **settings)


def by_deepcopy(parts):
    return copy.deepcopy(parts)


def by_pickle(parts):
    return pickle.loads(pickle.dumps(parts))


def train(step, numbers, mine=slice(None)):
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        inputs, targets = torch.randn(7, 4), class_targets(7, ignored=1)
        losses.append(step(inputs[mine], targets[mine]))
    return torch.stack([*losses, *(parameter.detach().sum() for parameter in step.model.parameters())])


def check_copied(rank, ranks, duplicate, whole, precision):
    """The copy and the original go on as one that was never copied."""
    mine = slice(None) if ranks == 1 else [slice(0, 3), slice(3, 7)][rank]

    def make():
        net = build_net()
        model, criterion = parallelize(net, nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5)), CPUS if ranks == 1 else None)
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
        other = torch.optim.SGD(net[2].parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        settings = {"micro_batch_size": 2, "precision": precision, "scheduler": scheduler}
        return model, criterion, [optimizer, other], TrainStep(model, criterion, [optimizer, other], **settings)

    expected = train(make()[-1], range(5), mine)
    parts = make()
    step = parts[-1]
    train(step, range(2), mine)
    copied = duplicate(parts)[-1] if whole else duplicate(step)
    assert not {id(p) for p in copied.model.parameters()} & {id(p) for p in step.model.parameters()}
    for one in (copied, step):
        torch.testing.assert_close(train(one, range(2, 5), mine), expected[2:], rtol=0, atol=0)
    return True


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("duplicate", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_of_a_step_train_like_the_original(ranks, whole, duplicate, precision):
    run(ranks, check_copied, duplicate, whole, precision)


def test_copy_of_a_step_does_not_share_the_accumulation(double):
    net = build_net()
    step = make_update_step(net, torch.optim.SGD(net.parameters(), lr=0.0))
    step.add(torch.randn(5, 4), class_targets(5))
    copied = copy.deepcopy(step)
    inputs, targets = torch.randn(7, 4), class_targets(7)
    torch.testing.assert_close(copied(inputs, targets), F.cross_entropy(net(inputs), targets).detach())
    assert step._window._accumulation is not None
