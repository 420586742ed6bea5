"""Operators that the simulation composes: attention and dropout."""

import pytest
import torch
from torch.nn import functional as F

from balanced_parallel import simulate


@pytest.mark.parametrize("masked", [False, True])
def test_attention_allocates_no_matrix_of_probabilities(masked):
    with simulate(1) as cluster:
        query = torch.randn(1, 2, 2048, 8, device="sim:0", requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, is_causal=not masked).sum().backward()
        assert cluster.peak[0] < 2 * 2048 * 2048 * 4 / 8


def test_learned_bias_of_attention_gets_its_gradient():
    query = torch.randn(2, 2, 3, 4)
    bias = torch.randn(1, 2, 3, 3)

    def gradient(device):
        query_there = query.to(device)
        bias_there = bias.to(device).requires_grad_()
        F.scaled_dot_product_attention(
            query_there, query_there, query_there, attn_mask=bias_there
        ).pow(2).sum().backward()
        return bias_there.grad

    with simulate(1):
        torch.testing.assert_close(gradient("sim:0").cpu(), gradient("cpu"))


def test_dropout_uses_the_random_state_of_its_device():
    with simulate(2):
        host = torch.get_rng_state()
        inputs = torch.ones(10_000, device="sim:1", requires_grad=True)
        outputs = F.dropout(inputs, 0.25)
        outputs.sum().backward()
        assert torch.get_rng_state().equal(host)
        assert outputs.unique().tolist() == pytest.approx([0, 4 / 3])
        assert 0.7 < outputs.ne(0).float().mean().item() < 0.8
        assert inputs.grad.equal(outputs)
        assert F.dropout(inputs, 0.0).equal(inputs)
        assert F.dropout(inputs, 1.0).eq(0).all()
        assert F.dropout(inputs, 0.5, training=False).equal(inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_histogram_of_integers_and_of_numbers(dtype):
    numbers = torch.tensor([3, 0, 0, 2, 9], dtype=dtype)
    with simulate(2):
        counts = torch.histc(numbers.to("sim:1"), bins=4, min=0, max=3)
        assert (counts.device, counts.dtype) == (torch.device("sim:1"), dtype)
        assert counts.tolist() == [2, 0, 1, 1]
