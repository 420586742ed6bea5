"""Sums of gradients: sparse, in place, with the strides of their parameters."""

import contextlib

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients
from helpers.replicas import settled
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate

CPUS = ["cpu"] * 3


@pytest.mark.usefixtures("buckets")
def test_sparse_gradients_equal_the_plain_program(double):
    net = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    x = torch.randint(7, (6,))
    net(x).pow(2).sum().backward()
    expected = [parameter.grad.to_dense() for parameter in net.parameters()]
    net.zero_grad()
    model = DataParallelModel(net, CPUS)
    gather(model(x)).pow(2).sum().backward()
    assert net[0].weight.grad.is_sparse
    assert_same_gradients([parameter.grad.to_dense() for parameter in net.parameters()], expected)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_accumulate_in_place(deferred):
    with simulate(3):
        model, x = settled(build_net())
        gather(model(x)).sum().backward()
        first = [parameter.grad for parameter in model.parameters()]
        expected = [gradient.cpu() * 2 for gradient in first]
        with model.no_sync() if deferred else contextlib.nullcontext():
            gather(model(x)).sum().backward()
        model.reduce_gradients()
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), first, strict=True))
        assert_same_gradients([gradient.cpu() for gradient in first], expected)


@pytest.mark.parametrize("balanced", [False, True])
def test_shared_gradient_tensors_are_divided_once(double, balanced):
    """Autograd gives both the same tensor. Where no other replica has a gradient, nothing is added to it, and it would be
    divided twice."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.one, self.other = (nn.Parameter(torch.ones(rows, 4)) for rows in (3, 1, 1))

        def forward(self, inputs):
            return self.always.sum(0) * ((inputs + 1) * (self.one + self.other) if inputs[0, 0] == 0 else inputs)

    inputs = torch.cat([torch.zeros(1, 4), torch.randn(3, 4)])
    plain = Shared()
    (sum(plain(row).sum() for row in inputs.split(1)) / 4).backward()
    with simulate(2):
        model = DataParallelModel(Shared())
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if balanced else kind(model.parameters(), lr=0.1)
        criterion = DataParallelCriterion(lambda output, target: output.sum() / len(output), weight=lambda output, _: len(output))
        TrainStep(model, criterion, optimizer, micro_batch_size=1)(inputs, torch.zeros(4))
        assert_same_gradients([gradient.cpu() for gradient in gradients(model)], gradients(plain))


class RowMajor(torch.autograd.Function):
    """A kernel whose gradients are always laid out row by row."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous(memory_format=torch.contiguous_format)


class Laid(nn.Module):
    """Parameters that are not laid out row by row."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Parameter(torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(CLASSES, 24).T)
        self.gaps = nn.Parameter(torch.randn(CLASSES, CLASSES, 2)[..., 0])

    def forward(self, x):
        x = nn.functional.conv2d(x.view(-1, 2, 4, 4), RowMajor.apply(self.conv)).flatten(1)
        return x @ RowMajor.apply(self.turned) @ RowMajor.apply(self.gaps)


@pytest.mark.usefixtures("double", "buckets")
@pytest.mark.parametrize("how", ["plain loop", "deferred", "balanced", "micro-batches"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_gradients_have_the_strides_of_autograd(how, dtype):
    torch.manual_seed(3)
    x, y = torch.randn(7, 32), torch.randn(7, CLASSES)

    def trained(devices):
        torch.manual_seed(1)
        net = Laid().to(devices[0])
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
        balanced = how == "balanced" and len(devices) > 1
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else torch.optim.SGD(net.parameters(), 0.1)
        if how == "micro-batches":
            precision = "fp16" if dtype is torch.float16 and devices[0] != "cpu" else "fp32"
            TrainStep(model, criterion, optimizer, micro_batch_size=1, precision=precision)(x, y)
        elif how == "deferred" and len(devices) > 1:
            with model.no_sync():
                (criterion(model(x), y) / 2).backward()
            (criterion(model(x), y) / 2).backward()
        else:
            criterion(model(x), y).backward()
        return [parameter.grad for parameter in net.parameters()]

    expected = trained(["cpu"])
    with simulate(3):
        found = trained(["sim:0", "sim:1", "sim:2"])
        for one, other in zip(found, expected, strict=True):
            if dtype is torch.float64:
                torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)
            assert [s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1] == [
                s for s, n in zip(other.stride(), other.shape, strict=True) if n > 1
            ]
