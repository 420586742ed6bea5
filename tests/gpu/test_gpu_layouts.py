"""Losses, gradients and memory of layouts, compared with one device: overflow, out of memory and compiled modules among them."""

import contextlib
import copy
import importlib.util

import pytest
import torch
from helpers.gpu import LOSS_LIMIT, labels, make_step, networks, on, parameters_of, relative_error
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, Precision

GRADIENT_LIMIT = {
    "fp32": 1e-4,
    "bf16": 3e-2,
    "fp16": 5e-3,
}  # relative, of the norm of all gradients


def losses(net, inputs, devices, precision, micro_batch_size, updates):
    step = make_step(net, devices, precision, micro_batch_size)
    return torch.stack([step(inputs, labels(len(inputs))).cpu() for _ in range(updates)])


def gradients(net, inputs, devices, precision):
    model = DataParallelModel(copy.deepcopy(net), list(devices), precision=precision)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), precision=precision)
    criterion(model(inputs), labels(len(inputs))).backward()
    return torch.cat(
        [
            parameter.grad.flatten().cpu()
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
    )


@on("twice", "beside the CPU", "behind the CPU", "all", "all in reverse")
@pytest.mark.parametrize("precision", list(LOSS_LIMIT))
def test_losses_and_gradients_are_those_of_one_device(machine, precision, at_most):
    updates = machine.size(4, 2)
    one = [machine.first]
    for name, (net, inputs) in networks(machine).items():
        found = losses(net, inputs, machine.devices, precision, 5, updates)
        expected = losses(net, inputs, one, precision, None, updates)
        at_most(f"{name}: error of losses", relative_error(found, expected), LOSS_LIMIT[precision])
        found, expected = (
            gradients(net, inputs, devices, precision) for devices in (machine.devices, one)
        )
        at_most(
            f"{name}: error of gradients",
            relative_error(found, expected),
            GRADIENT_LIMIT[precision],
        )


@on("one")
def test_replicas_on_one_device_share_parameters_and_two_devices_share_optimizer_state(
    machine, at_most
):
    def measure(*devices):
        machine.release()
        before = torch.accelerator.memory_allocated(machine.first)
        width = machine.size(4096, 64)
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)], nn.Linear(width, 10))
        step = make_step(net, devices, optimizer=torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            step(torch.randn(8, width), labels(8))
        machine.release()
        return torch.accelerator.memory_allocated(machine.first) - before

    measure(machine.first)  # libraries take their workspaces
    whole = measure(machine.first)
    twice = measure(machine.first, machine.first) / whole
    at_most("bytes of two replicas on one device / alone", twice, 1.15)
    assert twice >= 0.95
    beside = measure(machine.first, torch.device("cpu")) / whole
    at_most("bytes with half of the optimizer state / alone", beside, 0.75)
    assert beside >= 0.45


@on("one", "twice")
def test_an_overflow_of_fp16_skips_the_update_and_halves_the_scale(machine, at_most):
    net, inputs = networks(machine)["mlp"]
    scaler = torch.amp.GradScaler(machine.first.type, init_scale=2.0**60)
    step = make_step(net, machine.devices, Precision("fp16", scaler))
    before = parameters_of(step)
    step(inputs, labels(len(inputs)))
    assert torch.equal(before, parameters_of(step))
    assert scaler.get_scale() == 2.0**59
    scaler.update(new_scale=2.0**10)
    loss = step(inputs, labels(len(inputs)))
    assert not torch.equal(before, parameters_of(step))
    assert parameters_of(step).isfinite().all()
    expected = make_step(net, machine.devices)(inputs, labels(len(inputs)))
    at_most(
        "error of the loss of the next update", relative_error(loss, expected), LOSS_LIMIT["fp16"]
    )


@on("one", "twice")
def test_a_run_that_is_out_of_memory_has_the_losses_of_one_that_is_not(
    machine, at_most, record_property
):
    width = machine.size(4096, 64)
    rows = machine.size(16384, 64)
    torch.manual_seed(0)
    blocks = [
        layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Dropout(0.0), nn.GELU())
    ]
    net = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10))
    inputs = torch.randn(rows, 64)

    def train(bytes_of_activations):
        step = make_step(
            net, machine.devices, micro_batch_size="auto", optimizer=torch.optim.AdamW, lr=1e-3
        )
        results = [
            step(inputs[:2], labels(2)).cpu()
        ]  # libraries take their workspaces, the optimizer makes its state
        machine.release()
        torch.accelerator.reset_peak_memory_stats(machine.first)
        before = torch.accelerator.memory_allocated(machine.first)
        with limited(machine, bytes_of_activations):
            results += [step(inputs, labels(rows)).cpu() for _ in range(3)]
        return (
            torch.stack(results),
            step.micro_batch_size,
            torch.accelerator.max_memory_allocated(machine.first) - before,
        )

    expected, _, needed = train(None)
    found, size, _ = train(needed * 2 // 3)
    record_property("measured", f"settled on {size} of {rows // len(machine.devices)} rows")
    assert size < rows // len(machine.devices)
    at_most("error of the losses", relative_error(found, expected), LOSS_LIMIT["fp32"])


@contextlib.contextmanager
def limited(machine, more):
    """Leaves ``more`` bytes above those in use to the allocator of the first device; all if it is None."""
    device = machine.first
    if more is not None and machine.cluster is not None:
        machine.cluster.fail_allocation(20)
    elif more is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved(device) + more) / total, device
        )
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # hooks of the simulation
@on("one", "twice")
def test_a_compiled_module_has_the_outputs_of_the_module(machine, at_most):
    if machine.cluster is None and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    net, inputs = networks(machine)["mlp"]
    compiled = torch.compile(
        copy.deepcopy(net).to(machine.first), backend=machine.size("inductor", "eager")
    )
    found = DataParallelModel(compiled, machine.devices)(inputs).gather("cpu")
    expected = DataParallelModel(copy.deepcopy(net), [machine.first])(inputs).gather("cpu")
    at_most("error of outputs", relative_error(found, expected), 1e-4)


@on("twice", "all", "all in reverse")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_are_those_of_one_device(machine, precision, monkeypatch):
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # The first product of matrices reads it.
    torch.use_deterministic_algorithms(True)
    try:
        for name, (net, inputs) in networks(machine).items():
            digests = []
            for devices in ([machine.first], machine.devices):
                step = make_step(net, devices, precision, 3, reproducible="bits")
                for _ in range(machine.size(5, 2)):
                    step(inputs, labels(len(inputs)))
                digests.append(step.digest())
            assert digests[0] == digests[1], name
    finally:
        torch.use_deterministic_algorithms(False)
