"""Models with replicas that have run, and comparisons with the module."""

import torch

from balanced_parallel import DataParallelModel, gather


def outputs_of(model, x):
    return gather(model(x), "cpu").detach()


def settled(net, rows=6):
    """A model that has run once, and its batch."""
    model = DataParallelModel(net.to("sim:0"))
    x = torch.randn(rows, 4)
    model(x)
    return model, x


def assert_follows(model, net, x):
    torch.testing.assert_close(outputs_of(model, x), net(x.to("sim:0")).cpu())
