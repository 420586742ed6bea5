"""Modules that keep tensors in plain attributes, and their outputs and gradients as replicas, compared with the plain program."""

import contextlib

import torch
from helpers.problems import assert_equal, assert_same_gradients, gradients
from torch import nn

from balanced_parallel import DataParallelModel, gather, simulate


class Rotary(nn.Module):
    """Caches a table when the length changes, as the rotary embeddings of language models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.length = None
        self.cached = None

    def forward(self, x):
        if x.shape[1] != self.length:
            self.length = x.shape[1]
            self.cached = torch.arange(self.length, device=x.device, dtype=x.dtype).cos()
        return self.linear(x) * self.cached[:, None]


class Pairs(Rotary):
    """Caches a tuple, in an attribute that it has not had before, and keeps another tensor on the host."""

    def __init__(self):
        super().__init__()
        self.sizes = torch.tensor([1.0, 2.0])

    def forward(self, x):
        if not hasattr(self, "pair") or len(self.pair[0]) != x.shape[1]:
            steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
            self.pair = steps.cos(), steps.sin()
        assert self.sizes.is_cpu
        cos, sin = self.pair
        return self.linear(x) * cos[:, None] + sin[:, None] * self.sizes[1].item()


class Learned(Rotary):
    """Keeps what it has computed, with a graph, and a leaf that learns and is not registered."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4, requires_grad=True)
        self.last = None

    def forward(self, x):
        self.last = self.linear(x) * self.scale
        return self.last


KINDS = [Rotary, Pairs, Learned]
ROWS = [(7, 7, 7), (1, 7), (2, 7), (7, 1, 7)]


def check_caches(
    kind, rows, prepare=lambda net: None, surround=lambda model: contextlib.nullcontext()
):
    """Compares forwards of ``rows``, two of each length, on three simulated devices."""
    batches = [
        torch.randn(size, 3 + number, 4) for number, size in enumerate(rows) for _ in range(2)
    ]
    torch.manual_seed(1)
    plain = kind()
    expected = [plain(x) for x in batches]
    sum(output.square().sum() for output in expected).backward()
    torch.manual_seed(1)
    with simulate(3):
        net = kind().to("sim:0")
        if kind is Learned:
            net.scale = net.scale.detach().to("sim:0").requires_grad_()
        prepare(net)
        model = DataParallelModel(net)
        with surround(model):
            outputs = [gather(model(x)) for x in batches]
            assert_equal([output.cpu() for output in outputs], expected)
            sum(output.square().sum() for output in outputs).backward()
        assert_same_gradients(gradients(net), gradients(plain))
        if kind is Learned:
            assert_equal(net.scale.grad.cpu(), plain.scale.grad)
