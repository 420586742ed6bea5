"""Micro-batches that fit the devices."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net, class_targets
from helpers.steps import make_step
from torch import nn


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "split", "expected"),
    [
        (9, None, None, [[5, 4]]),
        (9, 2, None, [[2, 1], [2, 1], [2, 1]]),
        (4, 2, None, [[2, 2]]),
        (9, 1, None, [[1, 1], [1, 1], [1, 1], [1, 1], [1]]),
        (8, 3, [3, 1], [[3, 1], [3, 1]]),
    ],
)
def test_micro_batches_have_at_most_micro_batch_size_rows_per_device(rows, micro_batch_size, split, expected):
    seen = []
    net = build_net()
    step = make_step(net, split=split, micro_batch_size=micro_batch_size)
    step.model.register_forward_hook(lambda model, inputs, outputs: seen.append([len(output) for output in outputs]))
    step(torch.randn(rows, 4), class_targets(rows))
    assert seen == expected


def test_tuples_and_mappings_are_passed_as_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build_net()

        def forward(self, one, two):
            return self.net(one + two)

    x, target, mask = torch.randn(5, 4), torch.rand(5, 5), torch.ones(5, 1)
    for inputs in ((x, x), {"one": x, "two": x}):
        net = Two()
        step = make_step(net, lambda out, target, mask: F.mse_loss(out * mask, target * mask), micro_batch_size=1)
        with pytest.warns(UserWarning, match="weighted by rows"):
            loss = step(inputs, (target, mask))
        torch.testing.assert_close(loss, F.mse_loss(Two()(x, x), target).detach())
