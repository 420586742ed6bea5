"""Models and comparisons of the training loops that users have moved to this library."""

from helpers.problems import CLASSES, assert_equal, assert_same_gradients, build_net, gradients
from torch import nn

from balanced_parallel import DataParallelModel

CPUS = ["cpu"] * 3


class Calls(nn.Module):
    """A module whose forward is a function of its net and the arguments."""

    def __init__(self, function, outputs=CLASSES):
        super().__init__()
        self.net = build_net(outputs)
        self.function = function

    def forward(self, *inputs, **kwargs):
        return self.function(self.net, *inputs, **kwargs)


def assert_equal_program(module, criterion, plain, inputs, targets=(), model=None, kwargs=None):
    """``criterion`` on the outputs of the replicas gives the loss and the gradients of ``plain(module, inputs)``."""
    loss = plain(module)
    loss.backward()
    expected = gradients(module)
    module.zero_grad()
    model = model or DataParallelModel(module, CPUS)
    found = criterion(model(*inputs, **(kwargs or {})), *targets)
    found.backward()
    assert_equal(found, loss)
    assert_same_gradients(gradients(module), expected)
