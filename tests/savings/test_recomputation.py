"""Forwards that run again: random numbers, autocast and buffers are those of the first run."""

import time
import types

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelModel, savings, simulate
from balanced_parallel.savings.recomputation import run_checkpointed


class Later(nn.Module):
    """Lets the replicas on accelerators start after the others."""

    def forward(self, x):
        time.sleep(0 if x.is_cpu else 0.01)
        return x


class Drawing(nn.Module):
    """Draws from the generator of its device after a while, or from that of the CPU."""

    def __init__(self, host=False):
        super().__init__()
        self.weight, self.host = nn.Parameter(torch.ones(64)), host

    def forward(self, x):
        y = nn.functional.dropout(x * self.weight, 0.2)
        time.sleep(0.03)  # the threads of all devices are in the middle of it at once
        y = nn.functional.dropout(y, 0.2)
        return y * torch.rand(()).item() if self.host else y


def drawn_twice(devices, net):
    """Returns the masks of a forward and of its recomputation, and if the CPU's generator continues from before the backward."""
    savings.checkpoint_activations(net, blocks="")
    x = torch.ones(9, 64, requires_grad=True)
    output = DataParallelModel(nn.Sequential(Later(), net), devices)(x).gather("cpu")
    torch.rand(())
    state = torch.get_rng_state()
    output.sum().backward()
    return output.detach(), x.grad, state.equal(torch.get_rng_state())


LAYOUTS = [["sim:0", "sim:1", "sim:2"], ["sim:0", "sim:0", "sim:1"], ["cpu"] * 3, ["sim:0", "cpu", "sim:1"], ["sim:0"]]


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_replicas_draw_the_same_numbers_again(devices):
    with simulate(3):
        for _ in range(3):
            output, gradient, continues = drawn_twice(devices, Drawing())
            assert output.equal(gradient)
            assert continues


@pytest.mark.parametrize("devices", [["sim:0"], ["cpu", "cpu"]], ids=str)
def test_numbers_of_the_cpu_are_drawn_again(devices):
    with simulate(3):
        output, gradient, _ = drawn_twice(devices, Drawing(host=True))
        torch.testing.assert_close(output, gradient)


def test_arguments_by_name_have_their_devices_numbers_and_autocast():
    class Named(nn.Module):
        def forward(self, *, x, nothing=None):
            return nn.functional.dropout(x @ x.t())

    net = Named()
    savings.checkpoint_activations(net, blocks="")
    with simulate(1):
        x = torch.ones(8, 8, device="sim:0", requires_grad=True)
        with torch.autocast("sim", torch.bfloat16):
            output = net(x=x)
        output.sum().backward()
        assert output.dtype == torch.bfloat16
        mask = (output != 0).float() * 2
        torch.testing.assert_close(x.grad, (mask + mask.t()) @ torch.ones(8, 8, device="sim:0"))


def test_arguments_inside_of_objects_have_the_numbers_of_their_device():
    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, box):
            return nn.functional.dropout(box.x * self.weight)

    net = Boxed()
    savings.checkpoint_activations(net, blocks="")
    with simulate(1):
        net.to("sim:0")
        output = net(types.SimpleNamespace(x=torch.ones(9, 64, device="sim:0")))
        output.sum().backward()
        assert net.weight.grad.equal(output.sum(0))


def test_layers_on_another_device_draw_the_same_numbers_again():
    class Moving(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(x.to(self.weight.device)) * self.weight.sum()

    net = Moving(1, 1)
    savings.checkpoint_activations(net, blocks="")
    with simulate(2):
        net.to("sim:1")
        x = torch.ones(9, 64, device="sim:0", requires_grad=True)
        output = net(x)
        output.sum().backward()
        torch.testing.assert_close(x.grad.cpu(), output.detach().cpu())


def test_spectral_norm_runs_again_with_the_weight_of_the_forward(double):
    nets = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(4)])
        if checkpointed:
            savings.checkpoint_activations(net, blocks=["0", "1", "2"])
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)
    for one, other in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert one.equal(other)


def test_hooks_of_saved_tensors_do_not_get_what_a_selective_checkpoint_keeps():
    """Torch 2.15 warned of it."""
    packed = []
    net, inputs = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        outputs = run_checkpointed([net], lambda x: net(x).exp(), (inputs,), {}, name="Linear", selective=True)
    assert [tensor.shape for tensor in packed if tensor.numel()] == [inputs.shape]  # torch 2.11 also saves an empty one
    outputs.sum().backward()
    assert torch.equal(inputs.grad, net(inputs).exp() @ net.weight)
