"""Models and updates of the tests of ``DistributedDataParallel``."""

import torch
from helpers.fsdp import whole_gradients
from helpers.optimizers import sgd
from helpers.problems import CLASSES, assert_same_gradients
from torch import nn

from balanced_parallel import TrainStep, parallelize

WAYS = ["step", "micro-batches", "criterion"]


def make_update(way, module, criterion, *, strategy="ddp", **settings):
    """Returns the model, and one update with lr=0: by TrainStep at once or in micro-batches, or by hand."""
    model, criterion = parallelize(module, criterion, strategy=strategy)
    optimizer = sgd(model, criterion, lr=0.0)
    step = TrainStep(
        model,
        criterion,
        optimizer,
        micro_batch_size=2 if way == "micro-batches" else None,
        **settings,
    )

    def by_hand(inputs, targets):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return model, by_hand if way == "criterion" else step


def calls_of(work, *names):
    """Returns how often operations of these names ran in the work, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key in names)


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
