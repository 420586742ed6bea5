"""Static checks: faults of a model are found without running it, and correct models have no findings."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from balanced_parallel import convert_sync_batchnorm
from balanced_parallel.diagnostics.reasons import examine


def only(findings):
    (finding,) = findings
    return finding


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
    assert examine(module) == ()
    assert examine(module, nn.CrossEntropyLoss(ignore_index=0)) == ()
    assert examine(module, functools.partial(F.mse_loss, reduction="sum")) == ()


def test_batch_norms_are_found_unless_converted_or_in_eval_mode():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    finding = only(examine(module))
    assert finding.startswith("batch norm: 1, 2.0: ")
    assert "convert_sync_batchnorm(module)" in finding
    assert "a single row has none" in finding
    assert examine(module.eval()) == ()
    assert examine(convert_sync_batchnorm(module.train())) == ()


def test_many_batch_norms_are_one_finding():
    assert "0, 1, 2 and 47 more" in only(examine(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(50)))))


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
    mask, layers, weights, scale = examine(nn.Sequential(Unregistered()))
    assert "mask of 0 (Unregistered) holds tensors" in mask
    assert "register_buffer" in mask
    assert "nn.ModuleList" in layers
    assert "nn.ParameterDict" in weights
    assert scale == "unregistered: scale of 0 (Unregistered) holds tensors that require gradients: use nn.Parameter"


def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit.script"):  # the second in torch 2.15
        return torch.jit.script(nn.Sequential(nn.Linear(3, 3)))


def test_modules_that_cannot_be_replicated_are_found():
    finding = only(examine(nn.Sequential(nn.ReLU(), scripted())))
    assert finding.startswith("weights: 1: ")
    assert "cannot be replicated" in finding


def test_lazy_parameters_are_found():
    weight, bias = examine(nn.Sequential(nn.LazyLinear(3)))
    assert weight.startswith("weights: weight of 0 (LazyLinear) is not initialised yet: run the model once")
    assert "bias of 0" in bias


def test_weights_on_several_devices_are_found():
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="cpu:1"))
        assert "they are on cpu, cpu:1: move the model to one device" in only(examine(module))


class ContrastiveLoss(nn.Module):
    def forward(self, output, target):
        return (output @ output.T).mean()


@pytest.mark.parametrize(
    ("criterion", "wanted"),
    [
        (ContrastiveLoss(), "the loss: .*criterion\\(gather\\(outputs\\), targets\\)"),
        (lambda output, target: output.mean(), "note: the loss: <lambda> is exact .* if it is a sum of means, .* weight="),
    ],
)
def test_coupled_and_unknown_criteria_are_found(criterion, wanted):
    finding = only(examine(nn.Linear(3, 3), criterion))
    assert re.match(wanted, finding)
