"""Replicas that live between steps, and follow every change of the module.

Copies of parameters on other devices, refreshed where the parameters have changed.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import build_net
from helpers.releases import released_at_once
from helpers.replicas import assert_follows, outputs_of, settled
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelModel,
    convert_sync_batchnorm,
    gather,
    savings,
    simulate,
)

CPUS = ["cpu"] * 3
RESIZED = "a parameter of another size"  # The graph of the forward before must be gone.
CHANGES = {
    "an optimizer's step": lambda net: sgd(net, lr=1.0).step(),
    RESIZED: lambda net: (
        setattr(net[0].weight, "data", torch.ones(8, 4, device="sim:0")),
        setattr(net[0].bias, "data", torch.ones(8, device="sim:0")),
        setattr(net[2].weight, "data", torch.ones(5, 8, device="sim:0")),
    ),
    "a parameter removed": lambda net: net[0].register_parameter("bias", None),
    "a submodule replaced": lambda net: net.__setitem__(1, nn.ReLU()),
    "a submodule added": lambda net: net.append(nn.Linear(5, 2).to("sim:0")),
    "a submodule removed": lambda net: net.__delitem__(2),
    "weights tied": lambda net: setattr(
        net[2], "weight", nn.Parameter(torch.ones(5, 6, device="sim:0"))
    ),
    "a forward hook": lambda net: net[0].register_forward_hook(
        lambda module, inputs, output: output * 3
    ),
    "another dtype": lambda net: net.double().float(),
    "a plain attribute": lambda net: setattr(net[1], "scale", 3.0),
    "a method": lambda net: setattr(net[1], "forward", torch.sigmoid),
}


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return torch.tanh(x) * self.scale


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=released_at_once) if name == RESIZED else name for name in CHANGES],
)
def test_replicas_follow_changes_of_the_module(name):
    with simulate(3):
        net = build_net()
        net[1] = Scaled()
        model, x = settled(net)
        gather(model(x)).sum().backward()
        before = outputs_of(model, x)
        CHANGES[name](net)
        assert_follows(model, net, x)
        changed = outputs_of(model, x)
        assert name == "another dtype" or changed.shape != before.shape or not changed.equal(before)
        net.zero_grad()
        gather(model(x)).sum().backward()


@pytest.mark.parametrize("devices", [CPUS, None])
def test_only_the_first_replica_writes_to_the_module(devices):
    class Counts(nn.Module):
        average = None

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            self.seen += 1
            self.calls += 1
            self.average = torch.zeros(4, device=x.device) if self.average is None else self.average
            self.average += x.mean(0)
            self.last = x.sum()
            return x

    x = torch.randn(7, 4)
    with simulate(3):
        net = Counts()
        model = DataParallelModel(net, devices)
        for _ in range(2):
            model(x)
        assert (net.seen.item(), net.calls, net.last.device) == (2, 2, model.devices[0])
        assert_close(net.average.cpu(), 2 * x[:3].mean(0))


@released_at_once
@pytest.mark.usefixtures("buckets")
def test_replicas_are_freed_with_the_model():
    with simulate(3) as cluster:
        net = nn.Linear(64, 64).to("sim:0")
        alone = cluster.live
        model = DataParallelModel(net)
        gather(model(torch.ones(6, 64))).sum().backward()
        net.zero_grad()
        assert cluster.live[1] >= net.weight.nbytes
        shell = weakref.ref(model.replicas._skeletons[0][0][1])
        gc.collect()
        gc.disable()
        try:
            del model
            assert shell() is None
            assert cluster.live == alone
        finally:
            gc.enable()


@pytest.mark.usefixtures("buckets")
def test_copies_and_pickles_of_the_model_have_no_replicas():
    model = DataParallelModel(build_net(), CPUS)
    x = torch.randn(6, 4)
    gather(model(x)).sum().backward()
    size = len(pickle.dumps(DataParallelModel(build_net(), CPUS)))
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.replicas.tree is None
        assert outputs_of(other, x).equal(outputs_of(model, x))
        assert other.module[0].weight is not model.module[0].weight
    assert len(pickle.dumps(model)) < size * 1.1


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_device_has_a_row_and_writes_the_buffers(rows):
    with simulate(2):
        model = DataParallelModel(convert_sync_batchnorm(nn.BatchNorm2d(4)), split=[0.1, 9])
        outputs = model(torch.randn(rows, 4, 2, 2))
        assert model.module.num_batches_tracked == 1
        assert not torch.equal(model.module.running_mean.cpu(), torch.zeros(4))
    assert outputs.sizes == (1, rows - 1)[: len(outputs)]
    assert len(outputs) == min(rows, 2)


class Moved:
    """A model that refreshes its replicas always, and the bytes that go to its second device."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.net = build_net().to("sim:0")
        self.model = DataParallelModel(self.net, refresh="always")
        self.x = torch.randn(6, 4)
        self.model(self.x)
        self.size = sum(parameter.nbytes for parameter in self.net.parameters())

    def by(self, run):
        before = self.cluster.moved
        run()
        return (self.cluster.moved - before)["sim:0", "sim:1"]

    def by_forwards(self, count=1):
        return self.by(lambda: [self.model(self.x) for _ in range(count)])


@pytest.mark.usefixtures("buckets")
def test_parameters_are_copied_by_every_forward_and_in_a_window_where_torch_records_a_write():
    with simulate(3) as cluster:
        moved = Moved(cluster)
        weight = moved.net[0].weight
        with moved.model.no_sync():
            moved.by_forwards()
            other = moved.by_forwards()
            assert other < moved.size
            weight.detach().mul_(2)
            assert moved.by_forwards() == other + weight.nbytes
        assert moved.by_forwards() == other + moved.size


WINDOWS = {
    "no_sync": DataParallelModel.no_sync,
    "inference": savings.inference,
    "inference of an outer module": lambda model: savings.inference(nn.ModuleList([model])),
}


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("name", WINDOWS)
def test_parameters_are_copied_once_in_each_window(name):
    with simulate(3) as cluster:
        moved = Moved(cluster)
        three = moved.by_forwards(3)
        for _ in range(2):
            with WINDOWS[name](moved.model):
                assert moved.by_forwards(3) == three - 2 * moved.size
        assert moved.by_forwards(3) == three


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("fused", [False, True])
def test_a_refresh_without_memory_is_made_again(fused):
    """A change that was seen, but not copied to every device, is not forgotten."""
    with simulate(3) as cluster:
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        x = torch.randn(6, 4)
        optimizer = sgd(net)
        failures = 0
        for number in range(1, 12):
            gather(model(x)).sum().backward()
            if fused:
                for parameter in net.parameters():
                    parameter.data.sub_(parameter.grad)  # Torch counts no version.
            else:
                optimizer.step()
            optimizer.zero_grad()
            cluster.fail_allocation(number)
            try:
                found = gather(model(x), "cpu")
            except torch.OutOfMemoryError:
                failures += 1
                found = gather(model(x), "cpu")
            assert_close(found, net(x.to("sim:0")).cpu())
        assert failures > 3
