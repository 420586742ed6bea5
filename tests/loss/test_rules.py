"""Every loss of torch on simulated devices: loss and gradients of the plain program."""

import pytest
import torch
from helpers.problems import LOSSES, OnTop, assert_same_gradients, make_targets, plain_program
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, simulate


@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_simulated_devices_equal_the_plain_program(double, name):
    build, kind = LOSSES[name]
    module, criterion = OnTop(name), build()
    inputs, targets = torch.randn(7, 4), make_targets(kind, 7, ignored=3)
    loss, expected = plain_program(module, criterion, inputs, targets)
    with simulate(3):
        modules = [each.to("sim:0") for each in (module, criterion) if isinstance(each, nn.Module)]
        found = DataParallelCriterion(criterion)(DataParallelModel(module)(inputs), *targets)
        found.backward()
        torch.testing.assert_close(found.detach().cpu(), loss, rtol=1e-10, atol=1e-10)
        gradients = [parameter.grad for each in modules for parameter in each.parameters()]
        assert_same_gradients([None if gradient is None else gradient.cpu() for gradient in gradients], expected)
