"""The head of a language model with its loss: replicas, ranks, tied weights, memory."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.ranks import on_ranks
from helpers.slow import slow
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)
from balanced_parallel.savings import LinearCrossEntropy

WORDS = 13
WIDTH = 6
POSITIONS = 5


class Body(nn.Module):
    """Hidden states of tokens, [rows, positions, width]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return torch.tanh(self.layer(self.embedding(tokens)))


class Plain(nn.Module):
    """The same loss of a linear layer and cross entropy."""

    def __init__(self, head):
        super().__init__()
        self.linear = head.linear
        self.head = [head]

    def forward(self, hidden, target):
        (head,) = self.head
        settings = {"label_smoothing": head.label_smoothing, "ignore_index": head.ignore_index}
        return F.cross_entropy(
            self.linear(hidden).flatten(0, 1), target.flatten(), head.weight, **settings
        )


def tied_or_not(tied, **settings):
    """Returns a body and its head, which may share their first and last parameter."""
    body = Body()
    torch.manual_seed(2)
    head = LinearCrossEntropy(WIDTH, WORDS, weight=torch.linspace(0.5, 2, WORDS), **settings)
    if tied:
        head.linear.weight = body.embedding.weight
    return body, head


def batch(ignored_rows=3):
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(WORDS, (7, POSITIONS), generator=generator) for _ in range(2))
    targets[:ignored_rows], targets[-1, 2:] = (
        -100,
        -100,
    )  # Almost all of the first of two shards are ignored.
    return tokens, targets


def expected_of(body, head, tokens, targets):
    body, head = copy.deepcopy((body, head))
    loss = Plain(head)(body(tokens), targets)
    loss.backward()
    return loss.detach(), gradients(body, head)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
def test_training_equals_the_plain_loop(double, tied, micro_batch_size):
    body, head = tied_or_not(tied, label_smoothing=0.1)
    plain_body, plain_head = copy.deepcopy((body, head))
    learning = list(dict.fromkeys([*body.parameters(), *head.parameters()]))
    plain_learning = list(dict.fromkeys([*plain_body.parameters(), *plain_head.parameters()]))
    assert len(learning) == 4 - tied
    optimizer, plain_optimizer = (
        torch.optim.Adam(some, lr=0.1) for some in (learning, plain_learning)
    )
    model = DataParallelModel(body, ["cpu"] * 2)
    step = TrainStep(
        model, DataParallelCriterion(head), optimizer, micro_batch_size=micro_batch_size
    )
    for ignored in (3, 0, 6):
        tokens, targets = batch(ignored)
        plain_optimizer.zero_grad()
        loss = Plain(plain_head)(plain_body(tokens), targets)
        loss.backward()
        plain_optimizer.step()
        assert_equal(step(tokens, targets), loss)
        assert_close(learning, plain_learning, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_ranks_equal_the_plain_layers(rank, tied):
    torch.set_default_dtype(torch.float64)
    body, head = tied_or_not(tied, bias=True)
    tokens, targets = batch()
    loss, expected = expected_of(body, head, tokens, targets)
    model, criterion = parallelize(body, head)
    mine = slice(0, 3) if rank == 0 else slice(3, 7)  # no label of the first rank counts
    found = criterion(model(tokens[mine]), targets[mine])
    found.backward()
    assert_equal(found, loss)
    assert_same_gradients(gradients(body, head), expected)
    optimizer = torch.optim.SGD(
        list(dict.fromkeys([*body.parameters(), *head.parameters()])), lr=0.1
    )
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2)
    assert_equal(step(tokens[mine], targets[mine]), loss)
    assert_same_gradients(gradients(body, head), expected)


@pytest.mark.parametrize("precision", [slow("fp32"), "bf16", slow("fp16")])
def test_simulated_devices_never_have_the_logits_of_all_rows(precision):
    words = 4096
    rows = 32
    positions = 64
    tokens = torch.randint(words, (rows, positions + 1))
    peaks = []
    losses = []
    for make in (lambda: LinearCrossEntropy(32, words), None):
        torch.manual_seed(0)
        body = nn.Embedding(words, 32)
        with simulate(2) as cluster:
            head = nn.Linear(32, words, bias=False) if make is None else make()
            net = nn.Sequential(body, head, Transposed()) if make is None else body
            criterion = DataParallelCriterion(
                nn.CrossEntropyLoss() if make is None else head.to(cluster.devices[0])
            )
            model = DataParallelModel(net, cluster.devices)
            step = TrainStep(
                model,
                criterion,
                torch.optim.SGD([*body.parameters(), *head.parameters()]),
                precision=precision,
            )
            inputs, targets = (
                some.contiguous().pin_memory() for some in (tokens[:, :-1], tokens[:, 1:])
            )
            with (
                contextlib.nullcontext() if precision == "fp16" else cluster.forbidding_waits()
            ):  # The scaler waits.
                loss = step(inputs, targets)
            losses.append(loss.cpu())
        peaks.append(max(cluster.peak))
    assert_close(losses[0], losses[1], rtol=1e-5 if precision == "fp32" else 1e-2, atol=0)
    assert peaks[1] >= 2 * rows // 2 * positions * words * 4
    assert peaks[0] <= 0.35 * peaks[1]  # there are 4 chunks only


class Transposed(nn.Module):
    """Moves classes to the dimension where nn.CrossEntropyLoss expects them."""

    def forward(self, logits):
        return logits.transpose(1, 2)


def test_parameters_have_the_names_of_torch():
    head = LinearCrossEntropy(4, 3, bias=True, weight=torch.ones(3))
    assert list(head.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    assert "label_smoothing=0.0" in repr(head)


def test_a_tied_head_is_updated_in_the_backward_by_hooks_of_its_parameter(double):
    """The recipe of torch: the hook runs once in a backward, with the sum of all replicas' gradients."""
    weights = []
    for in_backward in (False, True):
        torch.manual_seed(1)
        net = nn.Embedding(11, 6)
        head = LinearCrossEntropy(6, 11)
        head.linear.weight = net.weight  # both the first and the last layer
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        if in_backward:

            def update(weight, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            net.weight.register_post_accumulate_grad_hook(update)
        model = DataParallelModel(net, ["cpu"] * 2)
        criterion = DataParallelCriterion(head)
        for _ in range(3):
            criterion(model(torch.arange(7)), torch.arange(1, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(net.weight.detach())
    assert_equal(weights[1], weights[0])
