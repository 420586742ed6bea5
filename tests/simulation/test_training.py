"""Training on simulated devices: devices of all tensors, traffic between devices, results equal to one device."""

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from helpers.problems import BODIES, LOSSES, OnTop, assert_same_gradients, build_net, make_targets, plain_program
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    gather,
    parallelize,
    scatter,
    simulate,
    verify,
    weighted_mean,
)

NAMES = [f"sim:{index}" for index in range(3)]


def devices_of(outputs):
    return [str(output.device) for output in outputs]


def record_devices(net, seen):
    """Appends the devices of inputs, parameters and outputs of each module to ``seen``."""

    def note(module, args, result):
        results = result if isinstance(result, tuple) else (result,)
        for tensor in (*args, *results, *module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, torch.Tensor):
                seen.append((str(args[0].device), str(tensor.device)))

    for module in net.modules():
        module.register_forward_hook(note)
    return net


@pytest.mark.parametrize("body", BODIES)
def test_inputs_parameters_and_outputs_of_layers_are_on_the_device_of_their_replica(body):
    seen = []
    with simulate(3):
        net = record_devices(BODIES[body](), seen).to("sim:0")
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        outputs = model(torch.randn(7, 4))
        assert devices_of(outputs) == NAMES
        assert {one for one, _ in seen} == set(NAMES)
        assert all(one == other for one, other in seen)
        loss = criterion(outputs, torch.randint(5, (7,)))
        loss.backward()
        assert set(devices_of([loss, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)])) == {
            "sim:0"
        }
        assert devices_of([gather(outputs), gather(outputs, "sim:2"), gather(outputs, "cpu")]) == ["sim:0", "sim:2", "cpu"]


@dataclass
class Sample:
    pixels: torch.Tensor
    name: list[str]


def test_scatter_and_gather_move_all_tensors_of_a_structure():
    with simulate(3) as cluster:
        batch = {"x": torch.arange(7.0), "pair": (torch.ones(7, 2), None), "sample": Sample(torch.zeros(7), list("abcdefg"))}
        pieces = scatter(batch, cluster.devices)
        for piece, name in zip(pieces, NAMES, strict=True):
            assert devices_of([piece["x"], piece["pair"][0], piece["sample"].pixels]) == [name] * 3
        back = gather(pieces, "cpu")
        assert back["x"].equal(batch["x"])
        assert back["sample"].name == list("abcdefg")
        assert {ends for ends in cluster.moved if "cpu" not in ends} == set()  # only between the CPU and each device
        assert devices_of(scatter(torch.ones(6, device="sim:1"), cluster.devices)) == NAMES


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_the_plain_program(double, name):
    build, kind = LOSSES[name]
    module, criterion = OnTop(name), build()
    inputs, targets = torch.randn(7, 4), make_targets(kind, 7, ignored=3)
    loss, expected = plain_program(module, criterion, inputs, targets)
    with simulate(3):
        modules = [each.to("sim:0") for each in (module, criterion) if isinstance(each, nn.Module)]
        found = DataParallelCriterion(criterion)(DataParallelModel(module)(inputs), *targets)
        found.backward()
        torch.testing.assert_close(found.detach().cpu(), loss, rtol=1e-10, atol=1e-10)
        gradients = [parameter.grad for each in modules for parameter in each.parameters()]
        assert_same_gradients([None if gradient is None else gradient.cpu() for gradient in gradients], expected)


def traffic(cluster, before):
    moved = cluster.moved - before
    between = Counter({ends: count for ends, count in moved.items() if "cpu" not in ends})
    return moved - between, between


def test_a_training_step_moves_only_the_batch_parameters_gradients_and_scalars():
    """Outputs (6 MB) stay on their devices."""
    with simulate(3) as cluster:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1000)).to("sim:0")
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = torch.optim.Adam(net.parameters())
        size = sum(parameter.nbytes for parameter in net.parameters())
        inputs, targets = torch.randn(1500, 32), torch.randint(1000, (1500,))
        for _ in range(2):
            before = cluster.moved
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        from_host, between = traffic(cluster, before)
        assert from_host == {("cpu", f"sim:{index}"): 500 * (32 * 4 + 8) for index in range(3)}
        scalars = 64
        for index in (1, 2):
            assert size <= between.pop(("sim:0", f"sim:{index}")) <= size + scalars
            assert size <= between.pop((f"sim:{index}", "sim:0")) <= size + scalars
        assert not between


def test_micro_batches_move_parameters_and_gradients_but_no_outputs():
    with simulate(3) as cluster:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1000)).to("sim:0")
        model, criterion = parallelize(net, nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.AdamW(net.parameters()), micro_batch_size=100, max_grad_norm=1.0)
        size = sum(parameter.nbytes for parameter in net.parameters())
        before = cluster.moved
        step(torch.randn(1500, 32), torch.randint(1000, (1500,)))
        _, between = traffic(cluster, before)
        assert set(between) == {(f"sim:{a}", f"sim:{b}") for a, b in ((0, 1), (0, 2), (1, 0), (2, 0))}
        assert all(count <= 5 * (size + 64) for count in between.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("body", BODIES)
def test_steps_on_three_devices_give_the_parameters_of_one_device(body, precision):
    inputs, targets = torch.randn(10, 4), torch.randint(5, (10,))
    targets[:3] = -100
    start = BODIES[body]()

    def trained(count, micro_batch_size):
        with simulate(count):
            net = copy.deepcopy(start).to("sim:0")
            model, criterion = parallelize(net, nn.CrossEntropyLoss(), precision=precision)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision)
            losses = [step(inputs, targets).item() for _ in range(3)]
            return losses, [parameter.detach().cpu() for parameter in net.parameters()]

    tolerance = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}[precision]
    expected_losses, expected = trained(1, None)
    losses, found = trained(3, 2)
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_fewer_rows_than_devices_use_no_other_devices():
    with simulate(3) as cluster:
        model, criterion = parallelize(build_net().to("sim:0"), nn.CrossEntropyLoss())
        before = cluster.moved
        outputs = model(torch.randn(1, 4))
        assert devices_of(outputs) == NAMES[:1]
        criterion(outputs, torch.tensor([1])).backward()
        assert traffic(cluster, before)[1] == {}


def test_default_devices_are_all_simulated_devices():
    with simulate(3) as cluster:
        net = build_net().to("sim:0")
        assert DataParallelModel(net).devices == cluster.devices
        assert DataParallelModel(net, device_ids=[0, "sim:2"]).devices == cluster.devices[::2]
        assert devices_of(DataParallelModel(net, [0, 0])(torch.randn(4, 4))) == ["sim:0"] * 2
        with pytest.raises(ValueError, match="there is no device 3: this machine has 3 sim devices"):
            DataParallelModel(net, device_ids=[3])


def test_a_module_on_another_device_raises_an_error():
    message = "weight is on cpu, expected every parameter and buffer on the first device, sim:0"
    with simulate(2):
        model = DataParallelModel(build_net())  # moves the module to sim:0
        model.module.cpu()
        with pytest.raises(ValueError, match=message):
            model(torch.randn(4, 4))


def test_sync_batch_norm_uses_the_rows_of_all_devices(double):
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    inputs, targets = torch.randn(11, 4), torch.randint(5, (11,))
    loss, expected = plain_program(copy.deepcopy(net), nn.CrossEntropyLoss(), inputs, targets)
    with simulate(3):
        converted = convert_sync_batchnorm(net).to("sim:0")
        model, criterion = parallelize(converted, nn.CrossEntropyLoss())
        found = criterion(model(inputs), targets)
        found.backward()
        torch.testing.assert_close(found.detach().cpu(), loss, rtol=1e-10, atol=1e-10)
        assert_same_gradients([parameter.grad.cpu() for parameter in converted.parameters()], expected)


def test_weighted_mean_of_losses_on_several_devices_is_exact():
    with simulate(3):
        losses = [
            torch.tensor(value, device=name, requires_grad=True) for value, name in zip((1.0, 2.0, 4.0), NAMES, strict=True)
        ]
        weights = [torch.tensor(count, device=name) for count, name in zip((1, 1, 2), NAMES, strict=True)]
        mean = weighted_mean(losses, weights)
        mean.backward()
        assert (str(mean.device), mean.item()) == ("sim:0", 2.75)
        assert [loss.grad.item() for loss in losses] == [0.25, 0.25, 0.5]


def test_dropout_masks_differ_between_devices_and_follow_the_seed():
    with simulate(3):
        model = DataParallelModel(nn.Dropout(0.5).to("sim:0"))
        torch.manual_seed(1)
        torch.sim.set_rng_state(torch.Generator().manual_seed(9).get_state(), 1)
        first = [output.cpu() for output in model(torch.ones(3, 64))]
        torch.manual_seed(1)
        torch.sim.set_rng_state(torch.Generator().manual_seed(9).get_state(), 1)
        assert all(one.equal(other.cpu()) for one, other in zip(first, model(torch.ones(3, 64)), strict=True))
        assert not first[0].equal(first[1])


def test_out_of_memory_on_one_device_names_the_replica():
    with simulate(3, memory=["8MiB", "1MiB", "8MiB"]):
        model = DataParallelModel(nn.Linear(64, 2048).to("sim:0"))
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total capacity of 1024.00 KiB") as caught:
            model(torch.randn(600, 64))
        assert "replica 1" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_verify_reports_equality_on_simulated_devices():
    with simulate(3):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).to("sim:0")
        model, criterion = parallelize(net, nn.CrossEntropyLoss())
        report = verify(model, criterion, torch.randn(7, 4), torch.randint(5, (7,)))
        assert report.equal
