"""Models and batches of the tests of ``memory.estimate``."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory
from balanced_parallel.memory.trace import tracer
from balanced_parallel.memory.trace.allocations import ordered

VOCABULARY = 600
LENGTH = 16


class LanguageModel(nn.Module):
    def __init__(self, dropout=0.0, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
                for _ in range(layers)
            ]
        )
        self.output = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.layers(self.embedding(tokens))).transpose(1, 2)


def tokens(rows):
    return torch.zeros(rows, LENGTH, dtype=torch.int64)


def conv_net():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, 2),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 10)
    )


PROBLEMS = {
    "perceptron": (
        perceptron,
        lambda rows: (torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.int64)),
    ),
    "language model": (
        functools.partial(LanguageModel, layers=2),
        lambda rows: (tokens(rows), tokens(rows)),
    ),
    "convolutions": (
        conv_net,
        lambda rows: (torch.zeros(rows, 3, 16, 16), torch.zeros(rows, dtype=torch.int64)),
    ),
}


def estimated(problem, rows=6, criterion=F.cross_entropy, **settings):
    """Returns the estimate of a model and a batch of so many rows."""
    build, batch = PROBLEMS[problem]
    settings = {"keeps_gradients": False} | settings
    return memory.estimate(build(), criterion, *batch(rows), **settings)


def peak_of_updates(cluster, step, *batch, updates=2):
    """Runs updates on simulated devices. Returns the peaks of the last."""
    for _ in range(updates):
        cluster.reset_peak()
        step(*batch)
    return cluster.peak


class WordModel(LanguageModel):
    """A language model whose blocks are perceptrons of each word."""

    def __init__(self, blocks=2):
        super().__init__(layers=0)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(blocks)]
        )


def words(rows):
    """Returns random inputs and targets of a language model."""
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (rows, LENGTH)), torch.randint(VOCABULARY, (rows, LENGTH))


def rows_of(request):
    """Returns the rows of a micro-batch."""
    return -(-request.rows // request.micro_batches)


def leave_untraced(request, rows):
    """Traces nothing, in the place of a trace of all blocks."""


def trace_both(request, times=(1, 2)):
    """Returns traces from few blocks and from all, for some times the rows, as tuples of what an estimate reads."""
    numbers = [count * rows_of(request) for count in times]
    whole = [tracer._trace(request, rows) for rows in numbers]
    few = tracer._traces_of([(request, rows) for rows in numbers], leave_untraced)
    return [
        [
            trace and (trace.blocks, ordered(trace.events), trace.marks, trace.flops)
            for trace in traces
        ]
        for traces in (few, whole)
    ]
