"""Replicas that live between steps, and follow every change of the module.

Copies of parameters on other devices, refreshed where the parameters have changed.

Copies between devices in one step: how many, and how many of them wait for each other.
"""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers.optimizers import balanced_or_plain, sgd
from helpers.problems import build_net
from helpers.releases import released_at_once
from helpers.replicas import assert_follows, outputs_of, settled, write_unseen
from helpers.slow import slow
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    gather,
    savings,
    simulate,
)
from balanced_parallel.replicas.replicas import window

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


@pytest.mark.usefixtures("buckets")
def test_replicas_follow_modes_requires_grad_and_buffers():
    with simulate(3):
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        model, x = settled(net)
        net.eval()
        assert_follows(model, net, x)
        net[1].running_mean.add_(3)
        assert_follows(model, net, x)
        net[1].running_mean = torch.full((5,), 2.0, device="sim:0")
        assert_follows(model, net, x)
        net[0].requires_grad_(False)
        gather(model(x)).sum().backward()
        assert net[0].weight.grad is None
        assert net[1].weight.grad is not None
        net[0].requires_grad_(True)
        gather(model(x)).sum().backward()
        assert net[0].weight.grad is not None


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
def test_parameters_are_copied_once_in_an_update_and_by_each_add():
    with simulate(3) as cluster:
        moved = Moved(cluster)
        criterion = DataParallelCriterion(nn.MSELoss())
        step = TrainStep(moved.model, criterion, sgd(moved.net), micro_batch_size=1)
        batch = moved.x, torch.randn(6, 5)
        for call in (step, step.add):
            assert moved.size <= moved.by(lambda call=call: call(*batch)) < 2 * moved.size
        assert moved.by(lambda: step.add(*batch)) >= moved.size
        step.apply()


@pytest.mark.usefixtures("buckets")
def test_refresh_replicas_copies_unrecorded_writes_in_a_window():
    with simulate(3):
        net = build_net()
        model, x = settled(net)
        for block in (contextlib.nullcontext, model.no_sync):
            with block():
                model(x)
                for parameter in net.parameters():
                    write_unseen(parameter, 3)
                model.refresh_replicas() if block is not contextlib.nullcontext else None
                assert_follows(model, net, x)


@pytest.mark.usefixtures("buckets")
def test_replicas_on_one_device_share_parameters():
    with simulate(1) as cluster:
        net = nn.Linear(512, 512).to("sim:0")
        size = cluster.live[0]
        model = DataParallelModel(net, [0, 0, 0])
        model(torch.ones(3, 512))
        gc.collect()
        assert cluster.live[0] < 1.1 * size


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


def longest_chain(copies):
    """A device takes part in one copy at a time."""
    busy = {}
    for ends in copies:
        for device in ends:
            busy[device] = (
                1 + max(busy.get(end, 0) for end in ends) if device == ends[0] else busy[ends[0]]
            )
    return max(busy.values(), default=0)


class Copies:
    """Copies between devices since the last look."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.seen = 0

    def take(self):
        found = self.cluster.copies[self.seen :]
        self.seen += len(found)
        return [ends for ends in found if "cpu" not in ends]


def build():
    return nn.Sequential(
        nn.Linear(4, 30),
        nn.BatchNorm1d(30),
        nn.Linear(30, 30),
        nn.BatchNorm1d(30),
        nn.Linear(30, 3),
    )


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("count", [slow(2), 3, 4, slow(8)])
def test_copies_of_a_bucket_go_to_the_first_device_or_in_rounds(count, balanced):
    with simulate(count) as cluster:
        model = DataParallelModel(build())
        kind = torch.optim.SGD
        optimizer = balanced_or_plain(model, kind, balanced)
        copies = Copies(cluster)
        x = torch.randn(2 * count, 4)
        losses = [output.sum() for output in model(x)]
        copies.take()
        torch.autograd.backward(losses)
        gradients = copies.take()
        with window(model):
            model(x)
            copies.take()
            optimizer.step()
        parameters = copies.take()
        model(x)
        # parameters, unless the owners have published them, and buffers of two dtypes
        assert len(copies.take()) == (2 if balanced else 3) * (count - 1)
        if not balanced:
            assert sorted(gradients) == sorted(
                (f"sim:{index}", "sim:0") for index in range(1, count)
            )
            assert parameters == []
            return
        rounds = count if count % 2 else count - 1
        for found in (gradients, parameters):
            assert len(found) == len(set(found)) == count * (count - 1)
            assert longest_chain(found) == 2 * rounds  # each pair in both directions


@released_at_once
@pytest.mark.parametrize("balanced", [False, True])
def test_a_large_parameter_is_not_packed(balanced):
    size = 2**20
    with simulate(4) as cluster:
        model = DataParallelModel(nn.Linear(size // 4, 1, bias=False).to("sim:0"))
        optimizer = balanced_or_plain(model, torch.optim.SGD, balanced)
        for _ in range(2):
            losses = [output.sum() for output in model(torch.ones(4, size // 4))]
            cluster.reset_peak()
            torch.autograd.backward(losses)
            del losses
            # parameter, inputs and gradient; the sum and what was received take the place of the inputs
            assert max(cluster.peak) <= (3 if balanced else 4) * size + 4096
            cluster.reset_peak()
            optimizer.step()
            # the sums of the bits take a little memory of the first device
            assert max(cluster.peak) <= (1.35 if balanced else 2) * size + 4096
            assert sorted(cluster.peak)[-2] <= (1.25 if balanced else 2) * size + 4096
            optimizer.zero_grad()


def test_the_first_copies_need_no_other_memory():
    with simulate(3) as cluster:
        model = DataParallelModel(
            nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]).to("sim:0")
        )
        model.replicas.prepare(model.module, model.devices)
        size = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
        assert cluster.peak == [size] * 3
