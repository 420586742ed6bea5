"""Layers of bitsandbytes with weights of four bits, whose kernels no trace runs."""

import pytest
import torch
from torch import nn

from balanced_parallel import memory

WIDTH = 1024


class FrozenLayer(nn.Module):
    """A double with the attributes of ``bitsandbytes.nn.Linear4bit``, before its quantization."""

    def __init__(self, nested):
        super().__init__()
        self.in_features = self.out_features = WIDTH
        self.compute_dtype = torch.bfloat16
        self.bias = None
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"), requires_grad=False)
        self.weight.blocksize, self.weight.compress_statistics = 64, nested


Linear4bit = type("Linear4bit", (FrozenLayer,), {"__module__": "bitsandbytes.nn.modules"})


class Adapted(nn.Module):
    """A frozen layer of four bits behind a trained one."""

    def __init__(self, nested):
        super().__init__()
        self.first = nn.Linear(8, WIDTH, dtype=torch.bfloat16)
        self.frozen = Linear4bit(nested)

    def forward(self, inputs):
        return self.frozen(self.first(inputs)).sum()


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_four_bits_are_packed_and_whole_for_one_product(nested):
    """The model was refused, and a quarter of its bytes is less than it needs."""
    inputs = torch.zeros(4, 8, dtype=torch.bfloat16)
    settings = {"optimizer": torch.optim.SGD, "device_kind": "sim"}
    report = memory.estimate(Adapted(nested), lambda out: out, inputs, (), **settings)
    blocks = WIDTH**2 // 64
    scales = blocks + 4 * blocks // 256 + 4 * 256 if nested else 4 * blocks
    packed = WIDTH**2 // 2 + scales + 4 * 16
    parts = report.parts[0]
    assert parts["parameters"] == pytest.approx(packed + 2 * 9 * WIDTH, abs=3 * 512)
    assert parts["temporaries"] >= 2 * WIDTH**2
    temporaries = 2 * WIDTH**2 + 4 * blocks * nested
    assert report.allocated[0] < packed + temporaries + 4 * 2 * 9 * WIDTH + 8 * 1024 * 4
    assert "0.41" in report.assumed["4-bit weights"]
