"""Programs whose current streams are not the default ones: every copy between devices waits for what it reads.

Eight windows each: the checksums of parameters wait for all devices in windows 2, 4 and 8.

One model called from several threads, by another model, and in its own forward.
"""

import contextlib
import functools
import itertools
import threading

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, class_targets, gradients
from helpers.slow import pairs, slow_but
from helpers.updates import SIMULATED
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    gather,
    simulate,
)

WINDOWS = 8
LAYOUTS = [SIMULATED, ["sim:1", "sim:0", "sim:1"], ["sim:1", "sim:2"], ["cpu", "sim:1", "cpu"]]


@contextlib.contextmanager
def own_streams(devices=3):
    """Makes a new stream current on each device."""
    with contextlib.ExitStack() as stack:
        for index in reversed(range(devices)):
            stack.enter_context(torch.Stream(device=f"sim:{index}"))
        yield


def written_on(device, value):
    """Returns ``value`` on ``device``, as the result of a kernel there."""
    return torch.zeros_like(value, device=device) + value.to(device)


def plain_gradients(build, inputs, targets):
    net = build()
    for x, target in zip(inputs, targets, strict=True):
        nn.functional.cross_entropy(net(x), target).backward()
    return gradients(net)


def batches(rows=9):
    return [torch.randn(rows, 4) for _ in range(WINDOWS)], [
        class_targets(rows, ignored) for ignored in range(WINDOWS)
    ]


def as_it_is(value):
    return value


def check(
    build,
    devices,
    place_inputs=as_it_is,
    place_targets=as_it_is,
    convert=as_it_is,
    streams=own_streams,
):
    inputs, targets = batches()
    expected = plain_gradients(build, inputs, targets)
    with simulate(3), streams():
        model = DataParallelModel(convert(build()), devices)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        for x, target in zip(inputs, targets, strict=True):
            x = place_inputs(x)
            target = place_targets(target)
            criterion(model(x), target).backward()
        assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_inputs_and_targets_are_copied_after_they_are_written(double, devices):
    written = functools.partial(written_on, "sim:0")
    check(build_net, devices, place_inputs=written)
    check(build_net, devices, place_targets=written)


class OnItsOwnStreams(nn.Module):
    """Runs an operator between two layers on a stream of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 6)
        self.operator = nn.Tanh()
        self.last = nn.Linear(6, 5)
        self.streams = {}

    def forward(self, x):
        x = self.first(x)
        if x.device.type == "cpu":
            return self.last(self.operator(x))
        current = torch.accelerator.current_stream(x.device)
        own = self.streams.setdefault(x.device, torch.Stream(device=x.device))
        own.wait_stream(current)
        x.record_stream(own)  # the operator saves it, and its backward runs there
        with own:
            y = self.operator(x)
        current.wait_stream(own)
        y.record_stream(current)
        return self.last(y)


class LayersOnTheirOwnStreams(OnItsOwnStreams):
    """Runs a layer with parameters on a stream of its own, twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.operator = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.operator.append(self.operator[0])


MODULES = [OnItsOwnStreams, LayersOnTheirOwnStreams]


@pytest.mark.parametrize(
    ("build", "devices", "streams"),
    pairs(MODULES, LAYOUTS, [own_streams, contextlib.nullcontext], fast=4),
)
def test_modules_may_use_their_own_streams(double, build, devices, streams):
    written = functools.partial(written_on, "sim:0")
    check(build, devices, written, written, streams=streams)


class NormOnItsOwnStream(OnItsOwnStreams):
    """Runs a batch norm on a stream of its own. The other replicas read its moments."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.operator = nn.BatchNorm1d(6)


@pytest.mark.parametrize("devices", [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_moments_are_read_after_the_stream_that_computes_them(double, devices):
    check(NormOnItsOwnStream, devices, convert=convert_sync_batchnorm)


CONCURRENT = [*itertools.product([SIMULATED, ["cpu", "sim:0", "sim:1"]], [False, True])]


def together(*work):
    failures = []

    def call(one):
        try:
            one()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=call, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.mark.usefixtures("double", "buckets")
@pytest.mark.parametrize(
    ("devices", "deferred"), slow_but(CONCURRENT, CONCURRENT[1], CONCURRENT[2])
)
def test_concurrent_forwards_and_backwards_equal_the_plain_program(devices, deferred):
    x = [torch.randn(rows, 4) for rows in (7, 2, 5)]
    net = build_net()
    for batch in x:
        (net(batch).square().sum() * 10).backward()
    expected = gradients(net)
    with simulate(3):
        net = build_net().to(devices[0])
        own = [*net.parameters()]
        model = DataParallelModel(net, devices)

        def work(batch):
            for _ in range(10):
                gather(model(batch), "cpu").square().sum().backward()

        def run():
            together(*(lambda batch=batch: work(batch) for batch in x))

        if deferred:
            with model.no_sync():
                run()
            model.reduce_gradients()
        else:
            run()
        assert [*map(id, net.parameters())] == [*map(id, own)]
        assert_same_gradients(gradients(net), expected)


@pytest.mark.usefixtures("double", "buckets")
@pytest.mark.parametrize("rows", [7, 1])
def test_model_called_in_its_own_forward_raises_an_error(rows):
    class Itself(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return self.call(x) if len(x) > 1 else x

    x = torch.randn(7, 4)
    with simulate(3):
        net = Itself(4, 4)
        own = [*map(id, net.parameters())]
        model = DataParallelModel(net)
        object.__setattr__(net, "call", lambda x: gather(model(x[:rows])))
        with pytest.raises(
            RuntimeError, match="inside of its own forward, expected .* call the module itself"
        ):
            model(x)
        assert [*map(id, net.parameters())] == own
        object.__setattr__(net, "call", lambda x: x)
        model(x)
