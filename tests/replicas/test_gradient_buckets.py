"""Gradients of replicas: repeated, partial and double backwards, in buckets of bounded size."""

import pytest
import torch
from helpers.problems import BODIES, assert_same_gradients, build_net, gradients
from torch import nn

from balanced_parallel import DataParallelModel, gather, simulate
from balanced_parallel.replicas import gradient_buckets
from balanced_parallel.replicas.gradient_buckets import make_buckets


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("body", BODIES)
def test_two_forwards_before_one_backward_equal_the_plain_program(double, body):
    net, x = BODIES[body](), torch.randn(6, 4)
    (net(x).sum() * net(x.flip(0)).pow(2).mean()).backward()
    expected = gradients(net)
    net.zero_grad()
    with simulate(3):
        model = DataParallelModel(net.to("sim:0"))
        (gather(model(x)).sum() * gather(model(x.flip(0))).pow(2).mean()).backward()
        assert_same_gradients([gradient if gradient is None else gradient.cpu() for gradient in gradients(net)], expected)


@pytest.mark.usefixtures("buckets")
def test_double_partial_and_autograd_grad_backwards_equal_the_plain_program(double):
    net, x = build_net(), torch.randn(6, 4)

    def everything(forward, parameters):
        found = torch.autograd.grad(forward(x).pow(2).sum(), parameters, create_graph=True)
        sum(gradient.pow(2).sum() for gradient in found).backward()
        some = torch.autograd.grad(forward(x).sum(), [parameters[0], parameters[3]])
        forward(x).sum().backward(inputs=parameters[:1])
        result = [gradient.cpu() for gradient in (*gradients(net), *found, *some)]
        net.zero_grad()
        return [gradient.detach() for gradient in result]

    expected = everything(net, list(net.parameters()))
    with simulate(3):
        model = DataParallelModel(net.to("sim:0"))
        found = everything(lambda x: gather(model(x)), list(net.parameters()))
        with model.no_sync():  # what is asked for by name is not kept back
            asked = torch.autograd.grad(gather(model(x)).sum(), list(net.parameters())[:1])
        torch.testing.assert_close(asked[0].cpu(), expected[-2])
    assert_same_gradients(found, expected)


@pytest.mark.usefixtures("buckets")
def test_no_grad_and_inference_mode_build_no_graph():
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net.to("sim:0"))
        x = torch.randn(6, 4)
        with torch.inference_mode():
            assert all(output.is_inference() for output in model(x))
        with torch.no_grad():
            assert not any(output.requires_grad for output in model(x))
        gather(model(x)).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.usefixtures("buckets")
def test_gradients_are_bitwise_reproducible():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (x @ self.weight).tanh() @ self.weight + x @ self.weight

    with simulate(4):
        net = Twice().to("sim:0")
        model, x = DataParallelModel(net), torch.randn(64, 64)
        found = set()
        for _ in range(20):
            net.zero_grad()
            gather(model(x)).pow(2).sum().backward()
            found.add(net.weight.grad.cpu().numpy().tobytes())
        assert len(found) == 1


@pytest.mark.usefixtures("buckets")
def test_buckets_have_bounded_size_one_dtype_and_reverse_order(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 25 * 2**20)
    parameters = [nn.Parameter(torch.empty(2**21)) for _ in range(7)]  # 8 MiB each
    parameters.insert(3, nn.Parameter(torch.empty(4, dtype=torch.float64)))
    buckets = make_buckets(parameters)
    assert [len(bucket.parameters) for bucket in buckets] == [3, 3, 1, 1]
    assert buckets[0].parameters[0] is parameters[-1]
    assert all(len({parameter.dtype for parameter in bucket.parameters}) == 1 for bucket in buckets)


@pytest.mark.usefixtures("buckets")
def test_reentrant_and_other_checkpointing_equal_the_plain_program(double):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, use_reentrant):
            super().__init__()
            self.net, self.use_reentrant = build_net(), use_reentrant

        def forward(self, x):
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=self.use_reentrant)

    x = torch.randn(6, 4)
    for use_reentrant in (False, True):
        net = Checkpointed(use_reentrant)
        net.net(x).pow(2).sum().backward()
        expected = gradients(net)
        net.zero_grad()
        with simulate(3):
            gather(DataParallelModel(net.to("sim:0"))(x.detach())).pow(2).sum().backward()
            assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


CPUS = ["cpu"] * 3


@pytest.mark.usefixtures("double")
def test_gradient_penalty_on_shared_devices_equals_the_plain_program():
    net, x = build_net(), torch.randn(6, 4)

    def penalty(forward):
        found = torch.autograd.grad(forward(x).pow(2).sum(), list(net.parameters()), create_graph=True)
        return sum(gradient.pow(2).sum() for gradient in found)

    penalty(net).backward()
    expected = gradients(net)
    net.zero_grad()
    penalty(lambda x: gather(DataParallelModel(net, CPUS)(x))).backward()
    assert_same_gradients(gradients(net), expected)
