"""Cases of torch's own tests for ``nn.DataParallel`` (test/distributed/test_data_parallel.py) that differ here, or could.

Torch has 36 tests there, and two of spectral norm elsewhere. Their cases were run here on two simulated devices (sparse gradients
on two replicas of the CPU), with ``gather_outputs=True``. A test of this file has the name of torch's. These differ, for a
reason:

- ``test_data_parallel_model_device``: a module on another device is moved to the first one by the wrapper, one step less to
  forget; one that is moved later is an error.
- ``test_data_parallel_function_deletion``: a parameter that the loss does not use keeps ``grad=None`` as in the plain program,
  and an optimizer with momentum or weight decay leaves it alone; torch: zeros.
- ``test_zero_grad``: ``self.zero_grad()`` inside of ``forward`` has no effect on several GPUs, as in torch, with torch's warning
  for tensors that are not leaves: parameters of a replica are part of the graph.
- ``test_parallel_apply_passes_exception``: the error keeps its type, attributes and traceback, and a note says ``in replica 0 on
  device cuda:0``; torch: the text of the traceback in the message.
- ``test_data_parallel_lazy_linear``: ``ValueError``, which names the parameter and says what to do; torch: ``RuntimeError``.
- ``test_gather_cpu``: ``gather(outputs, "cpu")``; torch: ``-1``. An index that came out wrong is not the CPU.
- ``test_replicate``, ``test_replicate_buffers``, ``test_save_replica_module``: replicas cannot be had, since they persist between
  forwards, and a module that holds one would keep old values. Their parameters and buffers are on their devices.
- ``test_parallel_apply``, ``test_parallel_apply_autocast``: no such function. Replicas run with the caller's autocast, also with
  its dtype, which torch loses: bfloat16 becomes float16 in the replicas.

The other tests have the same results. The function ``torch.nn.parallel.data_parallel(net, inputs)`` has no counterpart, because
it copies all parameters at each call.
"""

import gc
import re

import pytest
import torch
from helpers.optimizers import sgd
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate


@pytest.fixture
def devices():
    with simulate(2) as cluster:
        yield cluster.devices


def wrap(module, devices):
    """Returns outputs on the first device, as nn.DataParallel does."""
    return DataParallelModel(module, devices, gather_outputs=True)


class Call(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def test_reasons_name_tests_of_this_file():
    table = re.findall(r"``(test_\w+)``", __doc__)
    assert len(table) >= 10
    others = {"test_replicate", "test_replicate_buffers", "test_save_replica_module"}
    others |= {"test_parallel_apply", "test_parallel_apply_autocast"}
    assert set(table) - others <= set(globals())


def test_data_parallel_model_device(devices):
    layer = nn.Linear(2, 2)
    inputs = torch.ones(2, 2)
    for place in ("cpu", devices[1]):
        model = wrap(layer.to(place), devices)  # torch: RuntimeError in the forward
        assert layer.weight.device == devices[0]
        assert model(inputs).shape == (2, 2)
    model.to("cpu")
    for rows in (inputs, inputs[:1]):
        with pytest.raises(
            ValueError,
            match=r"weight is on cpu, expected every parameter .* on the first device, sim:0: move",
        ):
            model(rows)


@pytest.mark.parametrize("count", [1, 2])
def test_data_parallel_model_no_refcycles(count):
    model = DataParallelModel(nn.Linear(2, 3), ["cpu"] * count)
    criterion = DataParallelCriterion(nn.MSELoss())
    step = TrainStep(model, criterion, sgd(model), micro_batch_size=1)
    inputs = torch.ones(4, 2)
    targets = torch.ones(4, 3)
    runs = [
        lambda: model(inputs).gather(),
        lambda: criterion(model(inputs), targets).backward(),
        lambda: step(inputs, targets),
    ]
    for run in runs:
        model.zero_grad()
        run()
        gc.collect()
        run()
        assert gc.collect() == 0


def test_parallel_apply_passes_exception(devices):
    with pytest.raises(KeyError, match=r"wonderful'\nin replica \d on device sim:\d") as caught:
        wrap(Call(lambda self, inputs: {}["wonderful"]), devices)(torch.ones(4, 1))
    assert type(caught.value) is KeyError


@pytest.mark.usefixtures("double")
def test_data_parallel_function_deletion(devices):
    net = nn.Linear(4, 1)
    inputs = torch.ones(2, 4, requires_grad=True)
    output = wrap(net, devices)(inputs)
    (gradient,) = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)
    gradient.mean().backward()
    assert net.weight.grad.tolist() == [[0.25] * 4]
    assert net.bias.grad is None  # torch: zeros


def test_data_parallel_lazy_linear():
    with pytest.raises(
        ValueError, match="weight is not initialised yet: run the module once on a few rows"
    ):
        wrap(nn.LazyLinear(10), ["cpu"] * 2)(torch.ones(10, 10))


def test_zero_grad(devices):
    net = Call(
        lambda self, inputs: (self.zero_grad(), self.layer(inputs))[1], layer=nn.Linear(5, 5)
    ).to(devices[0])
    net.layer.weight.grad = torch.full((5, 5), 100.0, device=devices[0])
    with pytest.warns(UserWarning, match="not a leaf"):  # torch: a warning of its own
        wrap(net, devices)(torch.ones(4, 5)).sum().backward()
    assert net.layer.weight.grad.min() > 90


def test_gather_cpu(devices):
    parts = [torch.ones(2, 4, device=device, requires_grad=True) for device in devices]
    assert gather(parts, "cpu").device.type == "cpu"
    with pytest.raises(ValueError, match="there is no device -1"):  # torch: the CPU
        gather(parts, -1)
