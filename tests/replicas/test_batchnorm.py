"""Statistics over all rows in flight: outputs, gradients and running statistics of the plain program.

Subclasses of batch norm: conversion keeps what their forward adds, or refuses them.
"""

import copy
import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.problems import (
    assert_equal,
    assert_same_gradients,
    class_targets,
    gradients,
    plain_program,
)
from helpers.ranks import on_ranks
from helpers.steps import parallel_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    gather,
    parallelize,
    verify,
)
from balanced_parallel.replicas.batchnorm import AllRowsBatchNorm, use_torch_sync_batchnorm

CPUS = ["cpu"] * 3


def build(momentum=0.1, affine=True, **settings):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=momentum, affine=affine, **settings),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
        nn.BatchNorm1d(5, momentum=momentum, affine=affine, **settings),
    )


def plain_run(net, x, weights):
    output = net(x)
    (output * weights).pow(3).sum().backward()
    return output.detach(), gradients(net)


def assert_same_buffers(one, other):
    for (name, left), right in zip(one.named_buffers(), other.buffers(), strict=True):
        assert_close(
            left, right, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "rows", [2, 3, 4, 7, 9]
)  # three replicas: one row in a shard, uneven shards, fewer replicas
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_three_replicas_equal_the_plain_program(rows, settings, double):
    plain = build(**settings)
    x = torch.randn(rows, 2, 3, 3, requires_grad=True)
    weights = torch.randn(rows, 5)
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    for _ in range(3):
        output, expected = plain_run(plain, x, weights)
        expected_input = x.grad
        x.grad = None
        found = gather(DataParallelModel(net, CPUS)(x))
        (found * weights).pow(3).sum().backward()
        assert_equal(found, output)
        assert_same_gradients(gradients(net), expected, 1e-9)
        assert_close(x.grad, expected_input, rtol=1e-9, atol=1e-9)
        assert_same_buffers(net, plain)
        x.grad = None
    plain.eval()
    net.eval()
    assert_equal(gather(DataParallelModel(net, CPUS)(x)), plain(x))


def test_conversion_keeps_names_parameters_and_hooks():
    net = build()
    names = list(net.state_dict())
    first = net[1].weight
    net[1].register_forward_hook(lambda *_: None)
    assert convert_sync_batchnorm(net) is net
    assert list(net.state_dict()) == names
    assert net[1].weight is first
    assert len(net[1]._forward_hooks) == 1
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm1d(3)), nn.modules.batchnorm._BatchNorm)


@pytest.mark.parametrize(
    ("sizes", "micro_batch_size"), [([4, 3], None), ([6, 1], 2), ([5, 0, 2], None)]
)
@on_ranks(lambda sizes, micro_batch_size: len(sizes))
def test_ranks_equal_the_plain_program(rank, sizes, micro_batch_size):
    torch.set_default_dtype(torch.float64)
    plain = build()
    x = torch.randn(7, 2, 3, 3, generator=torch.Generator().manual_seed(6))
    target = class_targets(7, 2)
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    step = parallel_step(net, lr=0.0, micro_batch_size=micro_batch_size)
    mine = x.split(sizes)[rank]
    labels = target.split(sizes)[rank]
    pieces = max(-(-size // micro_batch_size) if micro_batch_size else 1 for size in sizes)
    for _ in range(3):
        plain.zero_grad()
        total = 0
        for piece in range(pieces):  # the rows that are in flight together, of all ranks
            parts = torch.arange(7).split(sizes)
            rows = torch.cat([part.tensor_split(pieces)[piece] for part in parts])
            total += F.cross_entropy(plain(x[rows]), target[rows], reduction="sum")
        loss = total / (target != -100).sum()
        loss.backward()
        assert_equal(step(mine, labels), loss)
        assert_same_gradients(gradients(net), gradients(plain), 1e-9)
        assert_same_buffers(net, plain)


@pytest.mark.timeout(60)
@on_ranks(2, timeout=30)
def test_collectives_of_a_layer_do_not_change_places_with_others(rank):
    """Rank 0 starts a sum before the forward and before the backward of the layer, rank 1 after them."""
    parallelize(nn.Linear(2, 2))
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2))
    x = torch.arange(8.0).view(4, 2)
    mine = x[2 * rank : 2 * rank + 2].clone().requires_grad_()
    many = [torch.full((1000,), float(rank)) for _ in range(2)]
    works = [dist.all_reduce(many[0], async_op=True)] if rank == 0 else []
    output = layer(mine)
    works += [dist.all_reduce(many[rank == 0], async_op=True)]
    output.pow(3).sum().backward()
    works += [] if rank == 0 else [dist.all_reduce(many[1], async_op=True)]
    for work in works:
        work.wait()
    assert [set(tensor.tolist()) for tensor in many] == [{1.0}, {1.0}]
    plain = nn.BatchNorm1d(2)
    whole = x.clone().requires_grad_()
    plain(whole).pow(3).sum().backward()
    assert_close(output, plain(x).detach()[2 * rank : 2 * rank + 2])
    assert_close(mine.grad, whole.grad[2 * rank : 2 * rank + 2], rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_a_layer_with_a_process_group_is_copied_and_pickled(rank):
    """The process group is no part of the layer: models are copied and saved as before."""
    net = convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = parallelize(net)
    model(torch.randn(3, 2))
    use_torch_sync_batchnorm(net)
    group = net[1].process_group
    assert group is not dist.group.WORLD
    assert group.size() == 2
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert copied[1].process_group is group
        assert list(copied.state_dict()) == list(net.state_dict())


@on_ranks(2, fresh=True)
def test_a_process_group_that_is_started_again_gets_a_new_group(rank):
    """A second process group of the same process has statistics groups of its own."""
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2))
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    for start in ("one", "two"):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(start, store), rank=rank, world_size=2
        )
        layer(torch.randn(3, 2))
        dist.barrier()
        dist.destroy_process_group()


class NormAct(nn.BatchNorm2d):
    """Adds an activation to the layer of torch, as ``SyncBatchNormAct`` of timm does."""

    def forward(self, input):
        return F.silu(super().forward(input))


class SyncNormAct(nn.SyncBatchNorm):
    def forward(self, input):
        return F.silu(super().forward(input))


class Steeper(NormAct):
    def forward(self, input):
        return 3 * super().forward(input)


class OwnStatistics(nn.BatchNorm2d):
    """Repeats the code of torch, as ``BatchNormAct2d`` of timm does."""

    def forward(self, input):
        statistics = self.running_mean, self.running_var
        return F.silu(F.batch_norm(input, *statistics, self.weight, self.bias, self.training))


class Ghost(nn.BatchNorm2d):
    """Calls ``super().forward`` in evaluation only."""

    def forward(self, input):
        if self.training:
            return torch.cat(
                [F.batch_norm(part, None, None, training=True) for part in input.chunk(2)]
            )
        return super().forward(input)


def make_net(norm):
    torch.manual_seed(5)
    names = ("conv", nn.Conv2d(2, 4, 3)), ("norm", norm), ("head", nn.Linear(4 * 9, 5))
    return nn.Sequential(OrderedDict([*names[:2], ("flat", nn.Flatten()), names[2]]))


@pytest.mark.parametrize("kind", [NormAct, Steeper])
def test_a_converted_subclass_equals_the_plain_program(kind, double):
    net = make_net(kind(4))
    x = torch.randn(7, 2, 5, 5)
    target = class_targets(7)
    converted = convert_sync_batchnorm(copy.deepcopy(net))
    loss, expected = plain_program(net, F.cross_entropy, x, target)
    found = DataParallelCriterion(nn.CrossEntropyLoss())(
        DataParallelModel(converted, CPUS)(x), target
    )
    found.backward()
    assert_equal(found, loss)
    assert_same_gradients(gradients(converted), expected, 1e-9)
    assert_close(converted.norm.running_var, net.norm.running_var)
    assert isinstance(converted.norm, kind)
    assert type(convert_sync_batchnorm(converted).norm) is type(converted.norm)
    report = verify(converted, nn.CrossEntropyLoss(), x, target, device_ids=CPUS)
    assert report.equal
    assert report.plain_loss == pytest.approx(loss.item(), rel=1e-12)  # of the net as it was given


def test_a_subclass_of_sync_batch_norm_runs_on_the_cpu(double):
    net = convert_sync_batchnorm(make_net(SyncNormAct(4)))
    x = torch.randn(7, 2, 5, 5)
    expected = make_net(NormAct(4))(x)
    assert_close(net(x), expected)
    assert_close(DataParallelModel(net, CPUS)(x).gather(), expected)


@pytest.mark.parametrize("kind", [OwnStatistics, Ghost])
def test_a_subclass_with_statistics_of_its_own_is_refused(kind, double):
    net = make_net(nn.Sequential(nn.BatchNorm2d(4), kind(4)))
    with pytest.raises(
        TypeError,
        match=rf"norm\.1 is a {kind.__name__}, whose forward computes .*call super\(\)\.forward",
    ):
        convert_sync_batchnorm(net)
    assert type(net.norm[0]) is nn.BatchNorm2d  # nothing is converted by half
    report = verify(
        make_net(kind(4)),
        nn.CrossEntropyLoss(),
        torch.randn(7, 2, 5, 5),
        class_targets(7),
        device_ids=CPUS,
    )
    assert not report.equal
    assert "of each replica: forward computes statistics itself" in str(report)
    assert "use convert_sync_batchnorm" not in str(report)


def test_a_forward_of_one_layer_is_refused():
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda input: input * 2
    with pytest.raises(
        TypeError, match="the module is a BatchNorm2d, whose forward computes statistics itself"
    ):
        convert_sync_batchnorm(layer)


@pytest.mark.parametrize("exchange", [convert_sync_batchnorm, use_torch_sync_batchnorm])
def test_a_converted_subclass_is_copied(exchange):
    net = convert_sync_batchnorm(make_net(Steeper(4)))
    exchange(net)
    copied = copy.deepcopy(net)
    assert type(copied.norm) is type(net.norm)
    assert isinstance(copied.norm, Steeper)
    assert isinstance(copied.norm, nn.SyncBatchNorm) == (exchange is use_torch_sync_batchnorm)
    assert isinstance(copied.norm, AllRowsBatchNorm) == (exchange is convert_sync_batchnorm)
    x = torch.randn(3, 2, 5, 5)
    assert_close(copied.eval()(x), net.eval()(x))
