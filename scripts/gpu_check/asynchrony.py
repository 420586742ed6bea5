"""Checks of what runs while the host goes on: waits, races between streams, and memory that is used too early or too late."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from machine import Machine, count_waits, forbidding_waits, names, run_child, sleep
from steps import Batch, Devices, digest, labels, make_step, parameters_of, relative_error
from table import NOT_HERE, Row, at_most, attempt, judge
from torch import Tensor, nn

RACE_LIMIT = 1e-5  # relative; the same kernels run in the same order, and a race reads zeros or old values

SETTINGS = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")


class Late(torch.autograd.Function):
    """The identity. A GPU sleeps before its result is there, and before its gradient is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Sleeps on the stream of the replica."""
        sleep(tensor.device)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Sleeps on the same stream."""
        sleep(gradients[0].device)
        return gradients[0].clone()


class LateLayer(nn.Linear):
    """A layer whose outputs, and the gradients below it, come late."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the outputs, late."""
        outputs: Tensor = Late.apply(super().forward(inputs))
        return outputs


class OwnStream(nn.Linear):
    """A layer that computes on a stream of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the outputs on another stream than the replica's."""
        if inputs.device.type == "cpu":
            return super().forward(inputs)
        computing, side = torch.accelerator.current_stream(inputs.device), torch.Stream(inputs.device)
        side.wait_stream(computing)
        with side:
            sleep(inputs.device)
            outputs = super().forward(inputs)
        computing.wait_stream(side)
        outputs.record_stream(computing)
        inputs.record_stream(side)
        return outputs


def check_waits(machine: Machine, devices: Devices) -> Iterator[Row]:
    """Runs ``TrainStep`` where waits are errors. The loss is read afterwards."""
    for place in ("pinned host", "device"):
        for precision in ("fp32", "bf16"):
            name = f"{names(devices)}: no waits, targets on {place}, {precision}"

            def run(place: str = place, precision: str = precision, name: str = name) -> Row:
                step, batch = _warm_step(machine, devices, place, precision)
                with forbidding_waits(machine):
                    losses = [step(*batch) for _ in range(2)]
                return judge(name, f"two updates without a wait, loss {losses[-1].item():.3f}", True)

            yield attempt(name, run)
    name = f"{names(devices)}: waits of fp16, targets on device"

    def count() -> Row:
        step, batch = _warm_step(machine, devices, "device", "fp16")
        waits = count_waits(machine, lambda: step(*batch))
        return at_most(name, "waits in an update; the scaler reads a number per device", waits, len(set(devices)))

    yield attempt(name, count)


def _warm_step(machine: Machine, devices: Devices, place: str, precision: str) -> tuple[Any, Batch]:
    """Returns a step after three updates, which allocate and search, and its batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))
    inputs, targets = torch.randn(24, 64), labels(24)
    first = machine.devices[0]
    batch = inputs.to(first), targets.to(first)
    if place == "pinned host":
        batch = inputs.pin_memory(), targets.pin_memory()
    step = make_step(net, devices, precision, optimizer=torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        step(*batch)
    machine.synchronize()
    return step, batch


def check_races(machine: Machine, devices: Devices) -> Iterator[Row]:
    """Compares updates whose inputs, parameters, outputs and gradients come late with the same updates without a sleep."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    late = nn.Sequential(nn.Linear(64, 256), LateLayer(256, 256), nn.GELU(), LateLayer(256, 256), nn.Linear(256, 10))
    own = nn.Sequential(nn.Linear(64, 256), OwnStream(256, 256), nn.GELU(), OwnStream(256, 256), nn.Linear(256, 10))
    cases = {"late inputs and parameters": plain, "late outputs and gradients": late, "a stream inside of forward": own}
    homes = list(dict.fromkeys([devices[0], devices[-1]]))
    for text, net in cases.items():
        for home in homes:
            name = f"{names(devices)}: {text}, inputs on {home}"

            def run(net: nn.Sequential = net, home: torch.device = home, name: str = name) -> Row:
                expected = _updates(machine, _without_sleep(net), devices, home, late=False)
                found = _updates(machine, net, devices, home, late=True)
                error = relative_error(found, expected)
                return at_most(name, "relative error of losses and parameters", error, RACE_LIMIT)

            yield attempt(name, run)


def _without_sleep(net: nn.Sequential) -> nn.Sequential:
    """Returns the network with linear layers in place of late ones, with the same weights."""
    layers = []
    for layer in net:
        if isinstance(layer, (LateLayer, OwnStream)):
            linear = nn.Linear(layer.in_features, layer.out_features)
            linear.load_state_dict(layer.state_dict())
            layer = linear
        layers.append(layer)
    return nn.Sequential(*layers)


def _updates(machine: Machine, net: nn.Module, devices: Devices, home: torch.device, *, late: bool) -> Tensor:
    """Returns the losses of some updates and the parameters after them.

    Args:
        machine: its devices.
        net: a copy of it is trained.
        devices: of the replicas.
        home: device of the inputs.
        late: each device has a stream of the caller, which sleeps before inputs and parameters are written.
    """
    step = make_step(net, devices)
    generator = torch.Generator().manual_seed(1)
    rows, wanted = torch.randn(24, 64, generator=generator).to(home), labels(24).to(home)
    accelerators = [device for device in dict.fromkeys([*devices, home]) if device.type != "cpu"]
    machine.synchronize()
    with contextlib.ExitStack() as stack:
        for device in reversed(accelerators) if late else ():  # the first device is entered last, and is the current one
            stack.enter_context(torch.Stream(device))
        losses = []
        for _ in range(machine.size(3, 2)):
            inputs, targets = torch.zeros_like(rows), torch.zeros_like(wanted)
            for device in accelerators if late else ():
                sleep(device)
            inputs.copy_(rows)
            targets.copy_(wanted)
            for parameter in parameters_of(step):
                parameter.mul_(0.9)
            losses.append(step(inputs, targets))
        found = [tensor.detach().cpu().flatten() for tensor in (*losses, *parameters_of(step))]
        machine.synchronize()
    return torch.cat(found)


def check_bits(machine: Machine, devices: Devices) -> Iterator[Row]:
    """Compares all bits of trained parameters with those of processes that wait after each kernel, or keep no memory."""
    if machine.simulated:
        name = f"{names(devices)}: the same bits twice"
        equal = digest(machine, devices) == digest(machine, devices)
        yield judge(name, "parameters after three updates of each network", equal)
        for variable in SETTINGS:
            yield Row(f"{names(devices)}: the same bits with {variable}=1", "", f"{NOT_HERE}: simulated devices do not read it")
        return
    flags = ["digest", "--devices", ",".join(map(str, devices))]
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    expected = run_child(flags, deterministic)["digest"]
    for setting in (None, *SETTINGS):
        name = f"{names(devices)}: the same bits with {setting}=1" if setting else f"{names(devices)}: the same bits twice"

        def run(setting: str | None = setting, name: str = name) -> Row:
            found = run_child(flags, deterministic | ({setting: "1"} if setting else {}))["digest"]
            return judge(
                name, f"parameters after three updates of each network: {found[:8]}, expected {expected[:8]}", found == expected
            )

        yield attempt(name, run)
