"""Models and updates of the tests of ``DistributedDataParallel``."""

import torch
from helpers.fsdp import whole_gradients
from helpers.problems import CLASSES, assert_same_gradients, build_net
from torch import nn

from balanced_parallel import TrainStep, parallelize

WAYS = ["step", "micro-batches", "criterion"]


def make_update(way, module, criterion, *, strategy="ddp", **settings):
    """Returns the model, and one update with lr=0: by TrainStep at once or in micro-batches, or by hand."""
    model, criterion = parallelize(module, criterion, strategy=strategy)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.0)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2 if way == "micro-batches" else None, **settings)

    def by_hand(inputs, targets):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return model, by_hand if way == "criterion" else step


class Chosen(nn.Module):
    """Uses one of its branches, or none, as it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, CLASSES).double()
        self.branches = nn.ModuleList(nn.Linear(CLASSES, CLASSES).double() for _ in range(60))
        self.chosen = 0

    def forward(self, inputs):
        hidden = self.first(inputs)
        return hidden if self.chosen is None else self.branches[self.chosen](hidden)


def cut_over_ranks(tensor, sizes, rank):
    return tensor.split(sizes)[rank]


def assert_update(update, module, batch, sizes, rank, expected, tolerance=1e-10):
    """Runs an update on this rank's rows of a batch. Compares it with the loss and the gradients that are expected."""
    loss, expected_gradients = expected
    found = update(*(cut_over_ranks(tensor, sizes, rank) for tensor in batch))
    torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
    assert_same_gradients(whole_gradients(module), expected_gradients, tolerance)


class Partly(torch.nn.Module):
    """One layer is never used, one only where a rank has enough rows, and a buffer counts the forwards."""

    def __init__(self):
        super().__init__()
        self.net, self.never, self.sometimes = build_net(), torch.nn.Linear(2, 2), torch.nn.Linear(5, 5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs):
        self.forwards += 1
        outputs = self.net(inputs)
        return outputs + self.sometimes(outputs) if len(inputs) > 2 else outputs


class Changing(nn.Module):
    """Uses its second layer for a while."""

    uses_second = True

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden
