"""Subclasses of batch norm: conversion keeps what their forward adds, or refuses them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_same_gradients, class_targets, gradients, plain_program
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, verify
from balanced_parallel.diagnostics.doctor import examine
from balanced_parallel.replicas.sync_batchnorm import use_torch_sync_batchnorm

CPUS = ["cpu"] * 3


class NormAct(nn.BatchNorm2d):
    """Adds an activation to the layer of torch, as ``SyncBatchNormAct`` of timm does."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, input):
        return self.act(super().forward(input))


class SyncNormAct(nn.SyncBatchNorm):
    def forward(self, input):
        return F.silu(super().forward(input))


class Steeper(NormAct):
    def forward(self, input):
        return 3 * super().forward(input)


class Named(nn.BatchNorm2d):
    """Keeps the forward of torch."""

    def scale(self):
        return 2.0


class OwnStatistics(nn.BatchNorm2d):
    """Repeats the code of torch, as ``BatchNormAct2d`` of timm does."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, input):
        statistics = self.running_mean, self.running_var
        output = F.batch_norm(input, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(output)


class Ghost(nn.BatchNorm2d):
    """Calls ``super().forward`` in evaluation only."""

    def forward(self, input):
        if self.training:
            return torch.cat([F.batch_norm(part, None, None, training=True) for part in input.chunk(2)])
        return super().forward(input)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), norm, nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, NormAct, Steeper, Named])
def test_a_converted_subclass_equals_the_plain_program(kind, double):
    net, x, target = Net(kind(4)), torch.randn(7, 2, 5, 5), class_targets(7)
    converted = convert_sync_batchnorm(copy.deepcopy(net))
    loss, expected = plain_program(net, F.cross_entropy, x, target)
    found = DataParallelCriterion(nn.CrossEntropyLoss())(DataParallelModel(converted, CPUS)(x), target)
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(converted), expected, 1e-9)
    torch.testing.assert_close(converted.norm.running_var, net.norm.running_var)
    if kind is not nn.BatchNorm2d:
        assert isinstance(converted.norm, kind)
    assert type(convert_sync_batchnorm(converted).norm) is type(converted.norm)


def test_a_subclass_of_sync_batch_norm_runs_on_the_cpu(double):
    net, x = convert_sync_batchnorm(Net(SyncNormAct(4))), torch.randn(7, 2, 5, 5)
    expected = Net(NormAct(4))(x)
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(DataParallelModel(net, CPUS)(x).gather(), expected)


def test_verify_compares_with_the_net_as_it_was_given(double):
    net, x, target = Net(NormAct(4)), torch.randn(7, 2, 5, 5), class_targets(7)
    loss = F.cross_entropy(copy.deepcopy(net)(x), target).item()
    report = verify(convert_sync_batchnorm(net), nn.CrossEntropyLoss(), x, target, device_ids=CPUS)
    assert report.equal
    assert report.plain_loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("kind", [OwnStatistics, Ghost])
def test_a_subclass_with_statistics_of_its_own_is_refused(kind, double):
    net = Net(nn.Sequential(nn.BatchNorm2d(4), kind(4)))
    with pytest.raises(TypeError, match=rf"norm\.1 is a {kind.__name__}, whose forward computes .*call super\(\)\.forward"):
        convert_sync_batchnorm(net)
    assert type(net.norm[0]) is nn.BatchNorm2d  # nothing is converted by half
    (finding,) = [line for line in examine(Net(kind(4))) if line.startswith("batch norm")]
    assert "has none: forward computes statistics itself" in finding
    assert "use convert_sync_batchnorm" not in finding
    report = verify(Net(kind(4)), nn.CrossEntropyLoss(), torch.randn(7, 2, 5, 5), class_targets(7), device_ids=CPUS)
    assert not report.equal
    assert "use convert_sync_batchnorm" not in str(report)


def test_a_forward_of_one_layer_is_refused():
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda input: input * 2
    with pytest.raises(TypeError, match="the module is a BatchNorm2d, whose forward computes statistics itself"):
        convert_sync_batchnorm(layer)


@pytest.mark.parametrize("exchange", [convert_sync_batchnorm, use_torch_sync_batchnorm])
def test_a_converted_subclass_is_copied_and_pickled(exchange):
    net = convert_sync_batchnorm(Net(Steeper(4)))
    exchange(net)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(copied.norm) is type(net.norm)
        assert isinstance(copied.norm, Steeper)
        assert isinstance(copied.norm, nn.SyncBatchNorm) == (exchange is use_torch_sync_batchnorm)
        x = torch.randn(3, 2, 5, 5)
        torch.testing.assert_close(copied.eval()(x), net.eval()(x))
