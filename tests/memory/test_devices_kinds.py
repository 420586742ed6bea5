"""Constants of GPUs."""

import functools

import pytest
import torch
from helpers.memory_problems import PROBLEMS, LanguageModel
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory


@pytest.mark.usefixtures("one_trace")
def test_gpu_estimate_has_smaller_activations_and_assumed_workspace():
    build, batch = functools.partial(LanguageModel, 0.1), PROBLEMS["language model"][1]
    reports = {kind: memory.estimate(build(), F.cross_entropy, *batch(24), device_kind=kind) for kind in ("cpu", "sim", "h200")}
    assert reports["h200"].parts[0]["saved activations"] < 0.8 * reports["cpu"].parts[0]["saved activations"]  # masks, attention
    assert reports["h200"].parts[0]["workspace"] == 4096 * 8 * 1024
    assert set(reports["h200"].assumed) == {"workspace", "context"}
    assert all("assumed" in source for source in reports["h200"].assumed.values())
    assert reports["h200"].reserved[0] >= reports["h200"].peak[0]
    assert not reports["cpu"].assumed


class BiasedAttention(nn.Module):
    """Attention with a bias for every head and pair of positions."""

    def __init__(self, learned):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 4, 64, 64), requires_grad=learned)
        self.projection = nn.Linear(32, 32)

    def forward(self, inputs):
        heads = self.projection(inputs).unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)


@pytest.mark.usefixtures("one_trace")
def test_learned_bias_of_fused_attention_has_a_gradient_and_a_state():
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    inputs, matrix = torch.zeros(8, 64, 32), 4 * 64 * 64 * 4
    learned, frozen = (
        memory.estimate(BiasedAttention(one), torch.sum, inputs, (), device_kind="h200", optimizer=momentum)
        for one in (True, False)
    )
    assert learned.parts[0]["optimizer state"] == frozen.parts[0]["optimizer state"] + matrix
    assert learned.peak[0] == frozen.peak[0] + matrix + 8 * matrix  # the kernel's gradient has the rows of the batch
