"""Programs of the tests of ``verify``."""

import torch
import torch.nn.functional as F
from helpers.problems import class_targets
from torch import nn

from balanced_parallel import verify

CPUS = ["cpu"] * 3


def check(model, criterion=None, rows=7, device_ids=CPUS, **settings):
    return verify(
        model,
        criterion or nn.CrossEntropyLoss(),
        torch.randn(rows, 4),
        class_targets(rows, 2),
        device_ids=device_ids,
        **settings,
    )


def contrastive_loss(output, target):
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


# Rows in another dimension, and other programs


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6)
        self.output = nn.Linear(6, 5)

    def forward(self, x):
        return self.output(self.lstm(x)[0])


def flat_loss(output, target):
    return F.cross_entropy(output.reshape(-1, 5), target.reshape(-1))


def time_major(rows=7):
    return TimeMajor(), torch.randn(3, rows, 4), torch.randint(5, (3, rows))
