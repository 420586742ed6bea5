"""The time at which a bucket is reduced.

Gradients of replicas: repeated, partial and double backwards, in buckets of bounded size.

Sums of gradients: sparse, in place, with the strides of their parameters.
"""

import threading

import pytest
import torch
from helpers.optimizers import balanced_or_plain
from helpers.problems import (
    CLASSES,
    assert_equal,
    assert_same_gradients,
    gradients,
)
from helpers.updates import SIMULATED
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate
from balanced_parallel.replicas import buckets
from balanced_parallel.runtime import transport


@pytest.mark.usefixtures("buckets")
def test_bucket_is_reduced_once_every_replica_has_its_gradients(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 25 * 2**20)
    with simulate(2):
        net = nn.Sequential(nn.Linear(4, 2600), nn.Linear(2600, 2600), nn.Linear(2600, 4)).to(
            "sim:0"
        )  # 27 MB in the middle
        model = DataParallelModel(net)
        events = []
        reduce = transport.reduce
        last = threading.Event()

        def watched(tensors, output):
            reduce(tensors, output)
            events.append(output.numel())
            if len(events) == 1:
                last.set()

        monkeypatch.setattr(transport, "reduce", watched)

        def watch(module, inputs, output):
            """The first layer of the second replica waits until the last layers were reduced."""
            if output.device.index == 1:
                output.register_hook(
                    lambda gradient: events.append("waited" if last.wait(20) else "in vain")
                )

        net[0].register_forward_hook(watch)
        gather(model(torch.ones(4, 4))).sum().backward()
        assert events[0] == 2600 + 2600 * 4 + 4
        assert "in vain" not in events


@pytest.mark.parametrize("balanced", [False, True])
def test_shared_gradient_tensors_are_divided_once(double, balanced):
    """Autograd gives both the same tensor. Where no other replica has a gradient, nothing is added to it, and it would be
    divided twice."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.one, self.other = (
                nn.Parameter(torch.ones(rows, 4)) for rows in (3, 1, 1)
            )

        def forward(self, inputs):
            return self.always.sum(0) * (
                (inputs + 1) * (self.one + self.other) if inputs[0, 0] == 0 else inputs
            )

    inputs = torch.cat([torch.zeros(1, 4), torch.randn(3, 4)])
    plain = Shared()
    (sum(plain(row).sum() for row in inputs.split(1)) / 4).backward()
    with simulate(2):
        model = DataParallelModel(Shared())
        optimizer = balanced_or_plain(model, torch.optim.SGD, balanced)
        criterion = DataParallelCriterion(
            lambda output, target: output.sum() / len(output), weight=lambda output, _: len(output)
        )
        TrainStep(model, criterion, optimizer, micro_batch_size=1)(inputs, torch.zeros(4))
        assert_same_gradients(gradients(model, optimizer=optimizer), gradients(plain))


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
@pytest.mark.parametrize("how", ["plain loop", "deferred", "balanced", "micro-batches in fp16"])
def test_gradients_have_the_strides_of_autograd(how):
    torch.manual_seed(3)
    x = torch.randn(7, 32)
    y = torch.randn(7, CLASSES)

    def trained(devices):
        torch.manual_seed(1)
        net = Laid().to(devices[0])
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(nn.MSELoss())
        is_split = len(devices) > 1
        optimizer = balanced_or_plain(model, torch.optim.SGD, is_split and how == "balanced")
        if how == "micro-batches in fp16":
            precision = "fp16" if is_split else "fp32"
            TrainStep(model, criterion, optimizer, micro_batch_size=1, precision=precision)(x, y)
        elif how == "deferred" and is_split:
            with model.no_sync():
                (criterion(model(x), y) / 2).backward()
            (criterion(model(x), y) / 2).backward()
        else:
            criterion(model(x), y).backward()
        return gradients(net, optimizer=optimizer)

    def strides(tensor):
        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        return [stride for stride, size in sizes if size > 1]

    expected = trained(["cpu"])
    with simulate(3):
        found = trained(SIMULATED)
    if how != "micro-batches in fp16":
        assert_equal(found, expected)
    assert [*map(strides, found)] == [*map(strides, expected)]
