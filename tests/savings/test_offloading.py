"""``offload_activations``: the same result, bytes on the host, and no wait of the host."""

import copy
import functools

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import assert_same_gradients, gradients
from helpers.savings import assert_unchanged
from helpers.slow import pairs, slow
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, savings, simulate

OFFLOAD = functools.partial(savings.offload_activations, min_bytes=1)
MIB = 2**20


def offload(net):
    return OFFLOAD


def offload_checkpointed(net):
    savings.checkpoint_activations(net)
    return OFFLOAD


@pytest.mark.parametrize(
    ("name", "saving", "ranks", "simulated"),
    pairs(
        ["residual", "convolutions", "encoder"],
        [offload, offload_checkpointed],
        [1, 2],
        [True, False],
    ),
)
def test_loss_and_gradients_are_those_without_it(ranks, name, saving, simulated):
    assert_unchanged(ranks, name, saving, simulated)


def deep_net():
    """Saves the input and 16 outputs, of 1 MiB with 1024 rows."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.Tanh())])


def step_of(net):
    return TrainStep(DataParallelModel(net), DataParallelCriterion(nn.MSELoss()), sgd(net))


def test_the_host_never_waits_with_all_savings():
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.LeakyReLU(inplace=True), nn.Linear(64, 64), nn.Dropout()
    net = nn.Sequential(*[nn.Sequential(*copy.deepcopy(layers)) for _ in range(8)])
    savings.checkpoint_activations(net)
    with simulate(2) as cluster:
        step = step_of(net.to("sim:0"))
        pinned = torch.ones(64, 64).pin_memory(), torch.zeros(64, 64).pin_memory()
        step(*pinned)
        with OFFLOAD(), cluster.forbidding_waits():
            step(*pinned)
        del step


def test_activations_are_copied_once_and_parameters_never():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 768)

        def forward(self, x):
            first, second, third = self.linear(x).chunk(3, 1)
            return first * second * third * x

    with simulate(2) as cluster:
        model = DataParallelModel(Split().to("sim:0"))
        x = torch.ones(2048, 256)
        model(x)
        before = cluster.moved
        with savings.offload_activations(min_bytes="1KiB"):
            loss = model(x).map(torch.sum).gather()
            forward = cluster.moved - before
            loss.sum().backward()
        total = cluster.moved - before
        # The input, the three pieces of one storage, and the first product.
        for moved in (forward, total):  # Replicas compare checksums, which takes some bytes.
            assert [round(moved[f"sim:{index}", "cpu"] / MIB, 3) for index in range(2)] == [5, 5]
        # The input of the replica comes from the host. The backward brings back what has left the device.
        assert forward["cpu", "sim:1"] == MIB
        assert MIB < total["cpu", "sim:1"] <= 6 * MIB
        del loss, model


def test_nothing_happens_on_the_cpu_and_without_a_graph():
    with simulate(1) as cluster:
        nets = [deep_net(), deep_net().to("sim:0")]
        before = cluster.copies
        with OFFLOAD():
            nets[0](torch.ones(3, 256)).sum().backward()
            with torch.no_grad():
                nets[1](torch.ones(3, 256, device="sim:0"))
            with torch.inference_mode():
                nets[1](torch.ones(3, 256, device="sim:0"))
        assert cluster.copies == before


def all_gradients(net, x, inside):
    """Gradients of a partial backward, a double backward, and a second backward of one graph."""
    x = x.clone().requires_grad_()
    with OFFLOAD() if inside is not None else torch.enable_grad():
        hidden = net[:9](x)
        loss = net[9:](hidden).square().sum()
        if inside:
            return [*differentiate(net, x, hidden, loss)]
    return [*differentiate(net, x, hidden, loss)]


def differentiate(net, x, hidden, loss):
    yield from torch.autograd.grad(loss, hidden, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    yield gradient
    gradient.square().sum().backward(retain_graph=True)
    yield from gradients(net)
    loss.backward()
    yield from gradients(net)


@pytest.mark.parametrize(
    ("inside", "stream"),
    [(False, "other"), (True, "default"), slow(False, "default"), slow(True, "other")],
)
def test_double_backward_retained_graphs_and_parts_of_graphs(double, inside, stream):
    x = torch.randn(5, 256)
    expected = all_gradients(deep_net(), x, None)
    with simulate(1):
        net = deep_net().to("sim:0")
        x = x.to("sim:0")
        if stream == "default":
            found = all_gradients(net, x, inside)
        else:
            other = torch.Stream("sim:0")
            other.wait_stream(torch.accelerator.current_stream())
            with other:
                found = all_gradients(net, x, inside)
            torch.accelerator.current_stream().wait_stream(other)
        assert_same_gradients([gradient.cpu() for gradient in found], expected)


def test_use_on_two_streams(double):
    with simulate(1):
        net = deep_net().to("sim:0")
        x = torch.ones(4, 256, device="sim:0")
        mine = torch.accelerator.current_stream()
        other = torch.Stream("sim:0")
        with OFFLOAD():
            hidden = net[:8](x)
            other.wait_stream(mine)
            with other:
                second = (hidden * hidden.tanh()).sum()
            first = net[8:](hidden).sum()
        mine.wait_stream(other)
        for _ in range(3):
            (first + second).backward(retain_graph=True)
        found = gradients(net)
        net.zero_grad()
        hidden = net[:8](x)
        (3 * (net[8:](hidden).sum() + (hidden * hidden.tanh()).sum())).backward()
        assert_same_gradients([each.cpu() for each in found], gradients(net))


@pytest.mark.parametrize("what", ["activation", "parameter", "small activation"])
def test_writes_in_place_to_saved_tensors_raise_an_error(what):
    with simulate(1, strict=False):
        linear = nn.Linear(64, 64).to("sim:0")
        x = torch.ones(64, 64, device="sim:0", requires_grad=True)
        with savings.offload_activations(min_bytes=MIB if what == "small activation" else 1):
            hidden = linear(x).tanh()
            loss = hidden.square().sum()
            with torch.no_grad():
                (linear.weight if what == "parameter" else hidden).add_(1)
        with pytest.raises(
            RuntimeError,
            match=r"shape \(64, 64\) that the backward needs was modified by an in-place",
        ):
            loss.backward()


def test_writes_in_place_after_the_copy_are_harmless(double):
    with simulate(1):
        x = torch.randn(8, 8, device="sim:0", requires_grad=True)
        with OFFLOAD():
            hidden = x * 2
            loss = hidden.square().sum()
        with torch.no_grad():
            hidden.zero_()
        loss.backward()
        torch.testing.assert_close(x.grad.cpu(), 8 * x.detach().cpu())


def test_the_memory_of_checkpointed_blocks_is_offloaded():
    live = {}
    for name, checkpointed, block in (
        ("checkpointed", True, torch.enable_grad),
        ("offloaded", False, OFFLOAD),
        ("both", True, OFFLOAD),
    ):
        with simulate(1) as cluster:
            net = deep_net().to("sim:0")
            x = torch.ones(1024, 256, device="sim:0")
            if checkpointed:
                savings.checkpoint_activations(net)
            before = cluster.live[0]
            with block():
                loss = net(x).sum()
            live[name] = cluster.live[0] - before, cluster.moved["sim:0", "cpu"]
            loss.backward()
            del loss
    assert live["checkpointed"][0] > 5 * MIB
    assert live["offloaded"] == (512, 17 * MIB)
    assert live["both"][0] == 512
    assert live["both"][1] < 10 * MIB
