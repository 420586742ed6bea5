"""State that a forward writes in each replica: equal in all of them, or an error.

Writes to parameters that torch does not record: by optimizers and through ``.data``, compared with the plain program.

Evaluation without a graph: modes are put back, replicas follow, and training goes on.
"""

import copy
import io

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import assert_equal, build_net
from helpers.slow import pairs
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate
from balanced_parallel.savings import inference


class Stateful(nn.Module):
    """Calls a function at the end of each forward, which writes state."""

    def __init__(self, write):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("later", None)
        self.penalty = self.temperature = 0.0
        self.write = write

    def forward(self, x):
        output = self.layer(x) + self.shift - self.mean
        self.write(self, output)
        return output


def in_place(module, output):
    module.mean.lerp_(output.detach().mean(0), 0.1)


def replace(module, output):
    module.mean = module.mean + output.detach().mean(0)


def through_data(module, output):
    module.mean.data.add_(output.data.mean(0))


def fill(module, output):
    if module.later is None:
        module.later = output.detach().mean(0)


def later(module, output):
    """A warm-up: the first forward writes nothing."""
    module.temperature += 1
    if module.temperature > 1:
        in_place(module, output)


@torch.no_grad()
def initialise(module, output):
    module.shift.sub_(output.mean(0))


def replace_data(module, output):
    """The constraint of EEGNet: the module kept its weight, and each forward bounded a copy."""
    module.layer.weight.data = module.layer.weight.data.renorm(2, 0, 0.1)


def train(write, devices, *, in_step, updates=4):
    net = Stateful(write)
    model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
    optimizer = sgd(net, lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    for _ in range(updates):
        batch = torch.randn(7, 4), torch.randn(7, 3)
        if in_step:
            step(*batch)
            continue
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("devices", [["cpu"] * 3, None])
@pytest.mark.parametrize("write", [in_place, replace, through_data, fill, later])
def test_a_buffer_of_the_rows_of_each_replica_is_refused(write, devices, in_step):
    """The first replica's was kept: 23 % off after five updates, silently."""
    with (
        simulate(3),
        pytest.raises(RuntimeError, match="to the tensor (mean|later) of the model in"),
    ):
        train(write, devices, in_step=in_step)


@pytest.mark.parametrize(
    ("write", "tensor"), [(initialise, "shift of the model"), (replace_data, "weight of layer")]
)
def test_a_parameter_of_the_rows_of_each_device_is_refused(write, tensor):
    """A data-dependent initialisation was that of the rows of the first device, silently."""
    with simulate(3), pytest.raises(RuntimeError, match=f"to the tensor {tensor} in"):
        train(write, None, in_step=True)


def test_a_buffer_of_a_criterion_is_refused():
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, output, target):
            loss = (output - self.centre - target).square().mean()
            self.centre.lerp_(output.detach().mean(0), 0.1)
            return loss

    net = nn.Linear(4, 3)
    model, criterion = DataParallelModel(net, ["cpu"] * 3), DataParallelCriterion(Centre())
    with pytest.raises(RuntimeError, match="to the tensor centre of the model in"):
        criterion(model(torch.randn(7, 4)), torch.randn(7, 3))


def test_state_that_does_not_depend_on_the_rows_stays():
    """Counters, caches of another size in each replica, and losses in attributes."""

    def write(module, output):
        module.mean.add_(0.1)
        module.cache = torch.arange(len(output), device=output.device)
        module.penalty = output.abs().mean()
        with torch.no_grad():
            module.shift.mul_(0.5)
        module.layer.weight.data = module.layer.weight.data.clone()  # as flat weights of an LSTM

    with simulate(3):
        net = train(write, None, in_step=False)
        assert_close(net.mean.cpu(), torch.full((3,), 0.4))
        net.eval()
        net.write = in_place
        DataParallelModel(net)(torch.randn(7, 4))  # in evaluation each replica may have its own


@pytest.mark.usefixtures("double")
def test_parameters_keep_their_class_and_serialization():
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        gather(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        kept = net[0].weight.data
        assert all(
            type(parameter) is nn.Parameter and not vars(parameter)
            for parameter in net.parameters()
        )
        assert type(kept) is torch.Tensor
        assert type(net[0].weight.detach()) is torch.Tensor
        assert all(
            type(parameter) is nn.Parameter for parameter in copy.deepcopy(model).parameters()
        )
        net.to("cpu")
        assert net[0].weight.data.device.type == "cpu"
        for saved in (net.state_dict(), net[0].weight, list(net.parameters())):
            file = io.BytesIO()
            torch.save(saved, file)
            assert b"balanced_parallel" not in file.getvalue()
            file.seek(0)
            torch.load(file, weights_only=True)
        net.half()
        assert net[0].weight.dtype == torch.float16
    file = io.BytesIO()
    torch.save(net, file)
    assert b"balanced_parallel" not in file.getvalue()


class Momentum(nn.Module):
    """The second layer follows the first in each forward, as in MoCo."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(4, 3)
        self.key = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.key.weight.lerp_(self.query.weight, 0.5)
        return self.query(x) - self.key(x + 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_forward_that_writes_parameters_runs_once_per_device(frozen, enabled):
    x = torch.randn(6, 4)
    expected = Momentum()
    output = expected(x)
    with simulate(2), torch.set_grad_enabled(enabled):
        for devices in (["sim:0", "sim:1"], ["cpu", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            found = gather(DataParallelModel(net, devices)(x))
            assert_close(found.cpu(), output)
            assert_close(net.key.weight.cpu(), expected.key.weight)
        for devices in (["cpu", "cpu"], ["sim:0", "sim:1", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            with pytest.raises(
                RuntimeError,
                match="wrote to a parameter that several replicas on one device share, .* expected one",
            ):
                DataParallelModel(net, devices)(x)


def make_net():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5))
    net[1].eval()  # frozen
    return net


def test_modes_are_put_back_after_an_error_too():
    net = make_net()
    other = nn.Dropout()

    def fail():
        with inference(net, other):
            assert not any(module.training for module in [*net.modules(), other])
            assert not net(torch.ones(2, 4)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in net.modules()] == [True, True, False, True, True]
    assert other.training
    assert not torch.is_inference_mode_enabled()

    @inference(net)
    def evaluate():
        return net(torch.ones(2, 4))

    assert evaluate().is_inference()
    assert evaluate().is_inference()
    assert net.training


class Forces(nn.Module):
    """Energies, and their gradients by the positions, by features, or by a weight."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first = nn.Linear(3, 6)
        self.second = nn.Linear(6, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_() if self.way == "detached" else x
            features = self.first(x).tanh()
            energies = self.second(features)
            of = {"features": features, "weight": self.second.weight}.get(self.way, x)
            (gradient,) = torch.autograd.grad(energies.sum(), of)
        return energies.detach(), gradient


@pytest.mark.parametrize(
    ("way", "frozen", "devices"),
    pairs(["positions", "detached", "features", "weight"], [False, True], [None, ["cpu"] * 3]),
)
def test_gradients_in_a_forward_under_no_grad(double, way, frozen, devices):
    """Shards had no graph to their input, and replicas on other devices had parameters without ``requires_grad``."""
    plain = Forces(way)
    x = torch.randn(7, 3, requires_grad=True)
    with simulate(3):
        net = copy.deepcopy(plain)
        model = DataParallelModel(net, devices)
        inputs = x.detach().to("cpu" if devices else "sim:0").requires_grad_()
        model(inputs)
        # The copies are there by then.
        for module in (plain, net):
            module.first.requires_grad_(not frozen)
        model.refresh_replicas()
        with torch.no_grad():
            outputs = model(inputs)
            energies, forces = plain(x)
        assert_equal(outputs.unzip()[0].gather("cpu"), energies)
        parts = [part.cpu() for _, part in outputs]
        total = sum(parts) if way == "weight" else torch.cat(parts)
        assert_equal(total, forces)
        copies = [copied for each in model.replicas.copies.by_device.values() for copied in each]
        expected = [parameter.requires_grad for parameter in net.parameters()]
        assert [copied.requires_grad for copied in copies] == expected * (0 if devices else 2)
        assert all(tensor.grad is None for tensor in (*net.parameters(), *copies, inputs))
