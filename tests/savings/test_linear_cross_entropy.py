"""The head of a language model with its loss: replicas, ranks, tied weights, memory."""

import contextlib

import pytest
import torch
from helpers.problems import assert_equal
from helpers.slow import slow
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    simulate,
)
from balanced_parallel.savings import LinearCrossEntropy


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
