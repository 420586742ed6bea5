"""Tensors and modules that a model holds unregistered, and models that hold none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from balanced_parallel.diagnostics.reasons import unregistered_tensors


class Correct(nn.Module):
    """A module with writes that are correct under replicas."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = type("Config", (), {})()
        self.register_buffer("scale", torch.ones(3))
        self.names = ["a"]

    def forward(self, x):
        x = self.linear(x).relu_()
        x.add_(1)
        outputs = []
        outputs.append(self.scale.add(1))
        self.config.kind = "x"
        y = x.new_zeros(3) + torch.zeros(3, device=x.device)
        return self._tail(x) + y + outputs[0]

    def _tail(self, x):
        tail: int = len(self.names)
        return F.dropout(x, 0.5) * tail


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_correct_models_have_no_findings(device):
    with torch.device(device):
        module = nn.Sequential(
            Correct(),
            nn.Dropout(0.1),
            nn.LayerNorm(3),
            nn.TransformerEncoderLayer(3, 1, 4),
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        )
    assert not list(unregistered_tensors(module))


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.ones(3)
        self.layers = [nn.Linear(3, 3)]
        self.weights = {"a": nn.Parameter(torch.ones(3))}
        self.scale = torch.ones(3, requires_grad=True)
        self.same = [self.linear, self.linear.weight]

    def forward(self, x):
        return self.linear(x)


def test_unregistered_tensors_and_modules_are_found():
    mask, layers, weights, scale = unregistered_tensors(nn.Sequential(Unregistered()))
    assert "mask of 0 (Unregistered) holds tensors" in mask
    assert "register_buffer" in mask
    assert "nn.ModuleList" in layers
    assert "nn.ParameterDict" in weights
    assert scale == "unregistered: scale of 0 (Unregistered) holds tensors that require gradients: use nn.Parameter"
