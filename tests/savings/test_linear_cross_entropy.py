"""The head of a language model with its loss: replicas, ranks, tied weights, memory."""

import torch
from helpers.problems import assert_equal
from helpers.steps import make_step
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    simulate,
)
from balanced_parallel.savings import LinearCrossEntropy


def test_devices_never_have_the_logits_of_all_rows_and_wait_nowhere():
    words, rows, positions = 4096, 32, 64
    with simulate(2) as cluster:
        inputs, targets = (torch.randint(words, (rows, positions)).pin_memory() for _ in range(2))
        criterion = DataParallelCriterion(LinearCrossEntropy(32, words).to("sim:0"))
        net = nn.Embedding(words, 32)
        step = make_step(net, criterion, devices=cluster.devices, precision="bf16")
        with cluster.forbidding_waits():
            step(inputs, targets)
    logits = rows // 2 * positions * words * 4
    assert max(cluster.peak) <= 0.7 * logits  # There are 4 chunks, and gradients beside them.


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
