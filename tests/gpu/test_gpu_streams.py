"""Work that runs while the host goes on: waits, races between streams, and memory that is used too early or too late."""

import contextlib
import ctypes
import functools
import hashlib

import pytest
import torch
from helpers.gpu import labels, make_step, networks, on, parameters_of, relative_error, sleep
from helpers.ranks import run_ranks
from helpers.slow import slow
from torch import nn

RACE_LIMIT = (
    1e-5  # relative; the same kernels run in the same order, and a race reads zeros or old values
)
SETTINGS = "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"


def warm_step(machine, place, precision):
    """Returns a step after three updates, which allocate and search, and its batch."""
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))
    move = (
        torch.Tensor.pin_memory
        if place == "pinned host"
        else functools.partial(torch.Tensor.to, device=machine.first)
    )
    batch = move(torch.randn(24, 64)), move(labels(24))
    step = make_step(net, machine.devices, precision, optimizer=torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        step(*batch)
    machine.synchronize()
    return step, batch


@on("one", "twice", "all")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["pinned host", "device"])
def test_updates_never_wait(machine, place, precision):
    step, batch = warm_step(machine, place, precision)
    with machine.forbidding_waits():
        losses = [step(*batch) for _ in range(2)]
    assert torch.stack(losses).isfinite().all()


@on("one", "twice", "all")
def test_the_scaler_of_fp16_waits_once_per_device(machine, at_most):
    step, batch = warm_step(machine, "device", "fp16")
    at_most(
        "waits of an update", machine.count_waits(lambda: step(*batch)), len(set(machine.devices))
    )


class Late(torch.autograd.Function):
    """The identity. A GPU sleeps before its result is there, and before its gradient is."""

    @staticmethod
    def forward(ctx, tensor):
        sleep(tensor.device)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleep(gradient.device)
        return gradient.clone()


class LateLayer(nn.Linear):
    """A layer whose outputs, and the gradients below it, come late."""

    def forward(self, inputs):
        return Late.apply(super().forward(inputs))


class OwnStream(nn.Linear):
    """A layer that computes on another stream than the replica's."""

    def forward(self, inputs):
        if inputs.device.type == "cpu":
            return super().forward(inputs)
        computing = torch.accelerator.current_stream(inputs.device)
        side = torch.Stream(inputs.device)
        side.wait_stream(computing)
        with side:
            sleep(inputs.device)
            outputs = super().forward(inputs)
        computing.wait_stream(side)
        outputs.record_stream(computing)
        inputs.record_stream(side)
        return outputs


@on("twice", "beside the CPU", "behind the CPU", "all", "all in reverse")
@pytest.mark.parametrize("layer", [nn.Linear, LateLayer, OwnStream])
@pytest.mark.parametrize("end", [0, -1])
def test_work_that_comes_late_changes_no_bit_of_an_update(machine, layer, end, at_most):
    """Inputs, parameters, outputs and gradients come late, or a layer computes on a stream of its own."""
    home = machine.devices[end]
    nets = []
    for kind in (layer, nn.Linear):
        torch.manual_seed(0)
        nets.append(
            nn.Sequential(
                nn.Linear(64, 256), kind(256, 256), nn.GELU(), kind(256, 256), nn.Linear(256, 10)
            )
        )
    late, plain = nets
    error = relative_error(
        train(machine, late, home, late=True), train(machine, plain, home, late=False)
    )
    at_most("error of losses and parameters", error, RACE_LIMIT)


def train(machine, net, home, *, late):
    """Returns the losses of some updates and the parameters after them.

    Args:
        home: device of the inputs.
        late: each device has a stream of the caller, which sleeps before inputs and parameters are written.
    """
    step = make_step(net, machine.devices)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 64, generator=generator).to(home)
    wanted = labels(24).to(home)
    used = machine.accelerators if late else []
    machine.synchronize()
    losses = []
    with contextlib.ExitStack() as stack:
        for device in reversed(used):  # the first device is entered last, and is the current one
            stack.enter_context(torch.Stream(device))
        for _ in range(machine.size(3, 2)):
            inputs = torch.zeros_like(rows)
            targets = torch.zeros_like(wanted)
            for device in used:
                sleep(device)
            inputs.copy_(rows)
            targets.copy_(wanted)
            with torch.no_grad():
                for parameter in step.model.parameters():
                    parameter.mul_(0.9)
            losses.append(step(inputs, targets))
        found = torch.cat([torch.stack(losses).cpu(), parameters_of(step)])
        machine.synchronize()
    return found


@on("twice", "all")
@pytest.mark.parametrize("setting", [None, *map(slow, SETTINGS)])
def test_bits_are_those_of_another_process(machine, setting, monkeypatch):
    """Processes that wait after each kernel, or keep no memory, have the bits of one that does neither.

    Simulated devices do not read these settings, and stay in this process.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic
    run = (lambda *_, **__: digest(0, machine)) if machine.cluster else run_ranks
    expected = run(1, digest, machine, fresh=True)
    if setting:
        monkeypatch.setenv(setting, "1")
    assert run(1, digest, machine, fresh=True) == expected


def digest(rank, machine):
    """Returns a checksum of all bits of the parameters after three updates of each network."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would hide early reads
    try:
        sums = hashlib.sha256()
        for net, inputs in networks(machine).values():
            step = make_step(net, machine.devices)
            for _ in range(3):
                step(inputs, labels(len(inputs)))
            parameters = parameters_of(step)
            sums.update(ctypes.string_at(parameters.data_ptr(), parameters.nbytes))
        return sums.hexdigest()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
