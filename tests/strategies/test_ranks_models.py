"""Several models in one loss, and a rank without rows: a backward goes through the models in one order on all ranks."""

import pytest
import torch
import torch.nn.functional as F
from helpers.fsdp import whole
from helpers.problems import assert_equal
from helpers.ranks import on_ranks
from helpers.slow import pairs
from torch import nn

from balanced_parallel import DataParallelCriterion, parallelize
from balanced_parallel.batch.outputs import PerReplica


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


class Chosen(nn.Module):
    """Uses one of two inputs, and returns two outputs."""

    def __init__(self, seed):
        super().__init__()
        self.first = net(seed)
        self.second = net(seed + 1)

    def forward(self, left, right=None):
        return self.first(left), self.second(left.detach() if right is None else right.detach())


class Annealed(nn.Module):
    """Divides by the number of its forwards, which it has in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.net = net(0)
        self.forwards = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.forwards += 1
        self.count += 1
        return self.net(x) / (self.forwards + self.count)


def apply(function, *outputs):
    """Applies a function to outputs of models, which are lists of one output on ranks."""
    first, *others = outputs
    if not isinstance(first, PerReplica):
        return function(*outputs)
    return join(function, first.zip(*others)) if others else first.map(function)


def join(function, outputs):
    if isinstance(outputs, PerReplica):
        return outputs.map(lambda pair: function(*pair), dim=0)
    return function(*outputs)


def cycle(a, b, loss, x, y):
    return loss(b(a(x)), x) + loss(a(b(y)), y)


def generator(a, b, loss, x, y):
    """Two discriminators of equal size see the output of a generator."""
    fake = a[0](x)
    return loss(a[1](fake), y) + loss(b(fake), y)


def heads(a, b, loss, x, y):
    """The second head is in the loss, the first one is not. Outputs pass functions of the program."""
    hidden = apply(torch.tanh, a(x))
    b[0](hidden)
    return loss(b[1](apply(lambda output: 2 * output, hidden)), y)


def detached(a, b, loss, x, y):
    """A model detaches one of its inputs, so the model behind it gets no gradient."""
    outputs = b(a[0](x), a[1](y))
    return loss(join(torch.add, outputs), y)


def skipped(a, b, loss, x, y):
    """An output of a model leads to nothing, another to the model behind it."""
    outputs = b(a[0](x), a[1](y))
    return loss(join(lambda first, second: second, outputs), y)


def halves(a, b, loss, x, y):
    """The model runs all rows and some of them: the first row of the batch, which one rank has."""
    some = y[:, 0] == 1
    return (
        loss(a(x[some]), y[some])
        + loss(a(x), y)
        + loss(b(apply(torch.tanh, a(x[some]))), y[some])
        + loss(b(x), y)
    )


def annealed(a, b, loss, x, y):
    """A rank without rows in the first of two forwards was one behind in the second, silently after the first update."""
    some = y[:, 0] == 1
    return loss(a(x[some]), y[some]) + loss(a(x), y)


def teacher(a, b, loss, x, y):
    with torch.no_grad():
        soft = b(x)
    return loss(a(x), y) + loss(apply(torch.sub, a(x), soft), y)


def penalty(a, b, loss, x, y):
    """The penalty of a critic: its gradient at the inputs is in the loss, which FSDP2 cannot differentiate."""
    mixed = x.clone().requires_grad_()
    scores = b(mixed)
    total = (scores[0] if isinstance(scores, PerReplica) else scores).sum()
    (slopes,) = torch.autograd.grad(total, mixed, create_graph=True)
    return loss([slopes] if isinstance(scores, PerReplica) else slopes, y) + loss(b(a(x)), y)


def towers(a, b, loss, x, y):
    """The targets are outputs too, of the same model and of another."""
    return loss(a(x), b(y)) + loss(a(y), a(x))


def critic(a, b, loss, x, y):
    """The loss of a generator has no targets, and an output of one feature for each row, which looked like a loss."""
    return loss(b(a(x)))


PROGRAMS = {
    critic: lambda: (net(0), nn.Sequential(net(1), nn.Linear(4, 1).double())),
    towers: lambda: (net(0), net(1)),
    cycle: lambda: (net(0), net(1)),
    generator: lambda: ([net(0), net(1)], net(2)),
    heads: lambda: (net(0), [net(1), net(2)]),
    detached: lambda: ([net(0), net(1)], Chosen(2)),
    skipped: lambda: ([net(0), net(1)], Chosen(2)),
    halves: lambda: (net(0), net(1)),
    annealed: lambda: (Annealed(), net(1)),
    teacher: lambda: (net(0), net(1)),
    penalty: lambda: (net(0), net(1)),
}


def flat(models):
    return [model for each in models for model in (each if isinstance(each, list) else [each])]


def train(program, models, loss, batches):
    results = []
    for x, y in batches:
        for model in flat(models):
            model.zero_grad()
        value = program(*models, loss, x, y)
        value.backward()
        parameters = [parameter for model in flat(models) for parameter in model.parameters()]
        results += [
            value.detach(),
            *(None if each.grad is None else whole(each.grad).clone() for each in parameters),
        ]
    return results


def wrapped(models, strategy):
    if isinstance(models, list):
        return [wrapped(model, strategy) for model in models]
    return parallelize(models, None, ["cpu"], strategy=strategy)


SIZES = [[[2, 2], [1, 0], [2, 1]], [[0, 1], [2, 2]]]


@pytest.mark.parametrize(
    ("program", "strategy", "sizes"),
    [case for case in pairs([*PROGRAMS], ["ddp", "fsdp"], SIZES) if case[:2] != (penalty, "fsdp")],
)
@on_ranks(2)
def test_models_of_one_loss_with_a_rank_without_rows_equal_the_plain_program(
    rank, program, strategy, sizes
):
    batches = [torch.randn(2, sum(each), 4).double().unbind() for each in sizes]
    for _, y in batches:
        y[:, 0] = torch.arange(len(y)) == 0
    loss = F.mse_loss if program != critic else lambda scores: (1 - scores).square().mean()
    expected = train(program, PROGRAMS[program](), loss, batches)
    models = [wrapped(each, strategy) for each in PROGRAMS[program]()]
    cuts = zip(batches, sizes, strict=True)
    parts = [[tensor.split(each)[rank] for tensor in batch] for batch, each in cuts]
    results = train(program, models, DataParallelCriterion(loss), parts)
    for result, value in zip(results, expected, strict=True):
        if value is None or result is None:
            assert not any(each.any() for each in (result, value) if each is not None)
        else:
            assert_equal(result, value)
