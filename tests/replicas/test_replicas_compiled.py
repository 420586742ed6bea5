"""Compiled modules as replicas: the results of the plain program, a bounded number of graphs, and what is refused."""

import contextlib
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from helpers import caches
from helpers.compiled import ROWS, Graphs, Net, assert_same_run, batches, build, plain_run
from helpers.optimizers import sgd
from helpers.problems import assert_equal
from helpers.slow import slow
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    simulate,
)
from balanced_parallel.replicas.replicas import window
from balanced_parallel.savings import inference

CPUS = ["cpu"] * 3
pytestmark = [
    pytest.mark.usefixtures("double", "fresh_compiler"),
    # The simulation has global hooks, and the compiler reads gradients.
    pytest.mark.filterwarnings("ignore:.*global hooks on modules"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def wrap(net, devices, way, **settings):
    if way == "torch.compile(module)":
        return DataParallelModel(torch.compile(net, **settings), devices)
    if way == "module.compile()":
        net.compile(**settings)
    elif way == "forward":
        net.forward = torch.compile(net.forward, **settings)
    elif way == "a submodule":
        net.first.forward = torch.compile(net.first.forward, **settings)
    model = DataParallelModel(net, devices)
    if way == "model.compile()":
        model(torch.zeros(4, 13))
        net.total.zero_()
        model.compile(**settings)
    return model


def train_step(model, net, **settings):
    return TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), sgd(net), **settings)


def train(model, net, rows=ROWS, **settings):
    step = train_step(model, net, **settings)
    return [step(*batch) for batch in batches(rows)]


@pytest.mark.parametrize(
    ("way", "micro_batch_size", "dynamic"),
    [
        ("torch.compile(module)", 2, True),
        slow("module.compile()", None, True),
        slow("model.compile()", 2, True),
        slow("forward", 2, True),
        slow("a submodule", 2, True),
        slow("module.compile()", None, None),
    ],
)
def test_ragged_batches_take_two_graphs(way, micro_batch_size, dynamic):
    """One for a single row, one for any other number of rows, and none for each replica. One more without dynamic shapes."""
    net = build()
    graphs = Graphs()
    model = wrap(net, CPUS, way, backend=graphs, dynamic=dynamic)
    graphs.count = 0
    losses = train(model, net, micro_batch_size=micro_batch_size)
    assert_same_run(losses, net)
    assert 1 <= graphs.count <= (2 if dynamic else 3)


@pytest.mark.parametrize("way", ["module.compile()", slow("torch.compile(module)")])
def test_steps_on_several_devices(way):
    """Compiled backwards on several devices failed: "cannot enter context: ... is already entered" (pytorch#185372)."""
    graphs = Graphs()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graphs(graph, inputs)))
    with simulate(3) as cluster:
        net = build()
        model = wrap(net, cluster.devices, way, backend=backend, dynamic=True)
        rows = [7, 5, 1, 12]
        assert_same_run(train(model, net, rows), net, rows)
        assert torch.autograd.is_multithreading_enabled()
    # two of each direction for each device, and one for a batch of one row, whose parameters the first device does not share
    assert graphs.count <= 2 * (2 * 3 + 1)


@pytest.mark.slow
def test_threads_of_autograd_are_on_after_a_backward_that_fails():
    with simulate(2) as cluster:
        net = build()
        model = wrap(net, cluster.devices, "module.compile()", backend="aot_eager", dynamic=True)
        inputs = torch.ones(4, 13, requires_grad=True)
        inputs.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_step(model, net)(inputs, torch.zeros(4, dtype=torch.long))
        assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize("way", ["module.compile()", "torch.compile(module)"])
def test_forwards_by_hand_on_several_devices_are_refused(way):
    with simulate(2) as cluster:
        net = build()
        model = wrap(net, cluster.devices, way, backend="eager", dynamic=True)
        with pytest.raises(
            RuntimeError, match=r"compiled, .* by hand on 2 devices, .* expected TrainStep\("
        ):
            model(torch.ones(4, 13))
        assert torch.autograd.is_multithreading_enabled()


def test_evaluations_by_hand_on_several_devices():
    with simulate(2) as cluster:
        net = build()
        model = wrap(net, cluster.devices, "module.compile()", backend="eager", dynamic=True)
        inputs = torch.randn(5, 13)
        with torch.no_grad():
            outputs = model(inputs).gather("cpu")
            expected = net.last(torch.tanh(net.first(inputs.to(cluster.devices[0])))).cpu()
        assert_close(outputs, expected)
        with inference(model):
            assert_close(model(inputs).gather("cpu"), expected)


def test_buffers_and_attributes_are_those_of_the_first_replica():
    results = []
    for backend in (None, "eager"):
        net = build()
        if backend:
            net.compile(backend=backend)
        model = DataParallelModel(net, CPUS)
        for inputs, _ in batches([7, 5]):
            model(inputs)
        results.append(
            (net.total, net.last_rows, sorted(net.__dict__.keys() - {"_compiled_call_impl"}))
        )
    assert results[0] == results[1]


@contextlib.contextmanager
def as_in_a_step(model):
    with window(model, in_step=True), torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(caches.Rotary, (1, 7)), slow(caches.Pairs, (7, 1, 7)), slow(caches.Learned, (7, 7, 7))],
)
def test_tensors_in_plain_attributes_are_on_the_device_of_their_replica(kind, rows):
    caches.check_caches(kind, rows, lambda net: net.compile(backend="eager"), as_in_a_step)


def test_a_failing_forward_leaves_the_module_as_it_was():
    class Failing(Net):
        def forward(self, inputs):
            if inputs.size(0) == 2:
                raise KeyError("two rows")
            return super().forward(inputs)

    with simulate(2) as cluster:
        net = Failing()
        model = wrap(net, cluster.devices, "module.compile()", backend="eager")
        before = {
            name: id(tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers())
        }
        with pytest.raises(Exception, match="two rows"):
            train_step(model, net)(torch.zeros(5, 13), torch.zeros(5, dtype=torch.long))
        assert before == {
            name: id(tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers())
        }


@pytest.mark.slow
def test_balanced_optimizer_and_rows_that_are_not_on_the_first_device():
    with simulate(3) as cluster:
        net = build()
        model = DataParallelModel(
            torch.compile(net, backend="aot_eager", dynamic=True), cluster.devices, split=[1, 2, 3]
        )
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer)
        assert_same_run([step(*batch) for batch in batches()], net)


@pytest.mark.slow
def test_inductor():
    """The compiler itself, on the CPU."""
    net = build()
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        assert_same_run(
            train(wrap(net, CPUS, "torch.compile(module)", dynamic=True), net, micro_batch_size=2),
            net,
        )


COMPILED_LOSSES = {
    "a function": lambda: torch.compile(F.cross_entropy, backend="eager"),
    "a module": lambda: torch.compile(nn.CrossEntropyLoss(), backend="eager"),
    "in place": lambda: compiled_in_place(nn.CrossEntropyLoss()),
}


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("name", COMPILED_LOSSES)
def test_compiled_criteria_need_a_divisor(name):
    with pytest.raises(
        TypeError, match=r"the criterion is compiled .*: pass it without torch.compile .*weight="
    ):
        DataParallelCriterion(COMPILED_LOSSES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_LOSSES)
def test_compiled_criteria_with_a_divisor(name):
    criterion = DataParallelCriterion(
        COMPILED_LOSSES[name](), weight=lambda output, targets: (targets != -100).sum()
    )
    net = build()
    for (inputs, targets), expected in zip(
        batches([7, 5]), plain_run([7, 5], lr=0.0)[0], strict=True
    ):
        assert_equal(criterion(DataParallelModel(net, CPUS)(inputs), targets), expected)


def test_batch_norm_over_all_rows_is_refused():
    class Normed(nn.Sequential):
        """A class of its own, as ``helpers.compiled.Net``."""

    net = convert_sync_batchnorm(Normed(nn.BatchNorm1d(13)))
    net.compile(backend="eager")
    with pytest.raises(
        TypeError,
        match=r"compiled, and its batch norm over all rows .* leave out torch.compile, or ",
    ):
        DataParallelModel(net, CPUS)(torch.randn(6, 13))


def test_a_compiled_wrapper_is_refused_by_a_step():
    model = DataParallelModel(build(), CPUS)
    compiled = torch.compile(model, backend="eager")
    text = r"OptimizedModule, expected .* without torch.compile: .* by model.compile\(\.\.\.\) of"
    with pytest.raises(TypeError, match=text):
        train_step(compiled, model)
