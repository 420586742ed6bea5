"""Autocast on simulated devices: the dtypes of CUDA."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import simulate

CASTS = {  # dtypes of CUDA under bfloat16: https://docs.pytorch.org/docs/stable/amp.html
    "linear": (lambda x: F.linear(x, x), torch.bfloat16),
    "matmul": (lambda x: x @ x, torch.bfloat16),
    "conv": (lambda x: F.conv1d(x[None], x[None]), torch.bfloat16),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        torch.bfloat16,
    ),
    "baddbmm": (lambda x: torch.baddbmm(x[None], x[None], x[None]), torch.bfloat16),
    "softmax": (lambda x: x.bfloat16().softmax(1), torch.float32),
    "layer norm": (lambda x: F.layer_norm(x.bfloat16(), (4,)), torch.float32),
    "cross entropy": (lambda x: F.cross_entropy(x.bfloat16(), x.softmax(1)), torch.float32),
    "exp": (lambda x: x.bfloat16().exp(), torch.float32),
    "sum": (lambda x: x.bfloat16().sum(), torch.float32),
    "norm": (lambda x: x.bfloat16().norm(), torch.float32),
    "add": (lambda x: x.bfloat16() + x.bfloat16(), torch.bfloat16),
    "relu": (lambda x: x.bfloat16().relu(), torch.bfloat16),
    "dot": (lambda x: torch.dot(x[0], x[1].bfloat16()), torch.float32),
    "float64": (lambda x: x.double() @ x.double(), torch.float64),
}


@pytest.mark.parametrize("name", CASTS)
def test_autocast_uses_the_dtypes_of_cuda(name):
    function, dtype = CASTS[name]
    with simulate(1):
        x = torch.randn(4, 4, device="sim:0")
        with torch.autocast("sim", torch.bfloat16):
            assert function(x).dtype == dtype
        assert (x @ x).dtype == torch.float32


def test_autocast_of_the_cpu_does_not_apply_and_unsafe_losses_raise_an_error():
    with simulate(1):
        x = torch.rand(4, 4, device="sim:0")
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ x).dtype == torch.float32
        with (
            torch.autocast("sim", torch.float16),
            pytest.raises(RuntimeError, match="unsafe to autocast"),
        ):
            F.binary_cross_entropy(x, x)


def test_lstm_and_gru_train_under_autocast():
    with simulate(1):
        for kind in (nn.LSTM, nn.GRU):
            net = kind(4, 3).to("sim:0")
            with torch.autocast("sim", torch.bfloat16):
                net(torch.randn(2, 5, 4, device="sim:0"))[0].float().sum().backward()
            assert all(parameter.grad is not None for parameter in net.parameters())
