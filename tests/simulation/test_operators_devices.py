"""Operators on tensors of different devices."""

import pytest
import torch
from torch import nn

from balanced_parallel import simulate

WRONG_PLACES = {
    "add": lambda x: x + torch.ones(4, 4),
    "into the host": lambda x: torch.ones(4, 4).add_(x),
    "other device": lambda x: x * x.to("sim:2"),
    "linear": lambda x: nn.Linear(4, 4)(x),
    "cat": lambda x: torch.cat([x, x.cpu()]),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(4)),
    "embedding": lambda x: nn.functional.embedding(torch.tensor([1]), x),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool), 0),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(x),
    "conv": lambda x: nn.Conv1d(1, 1, 2)(x[:, None]),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None].cpu()
    ),
    "lstm": lambda x: nn.LSTM(4, 4)(x),
    "foreach": lambda x: torch._foreach_add([x, x], [x, x.cpu()]),
    "number in a product": lambda x: x @ torch.tensor(1.0).expand(4),
    "out": lambda x: torch.add(x, x, out=torch.empty(4, 4)),
    "backward": lambda x: x.requires_grad_().sum(0).backward(torch.ones(4)),
    "generator": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator()),
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_operators_on_tensors_of_different_devices_raise_an_error(name):
    with simulate(3):
        x = torch.randn(4, 4, device="sim:1")
        with pytest.raises((RuntimeError, TypeError), match=r"device"):
            WRONG_PLACES[name](x)


def test_combinations_of_devices_that_cuda_accepts_are_accepted():
    with simulate(2):
        x = torch.randn(4, 4, device="sim:1")
        number = torch.tensor(2.0)
        for allowed in (
            x * number,
            number + x,
            x.clamp(min=number),
            torch.where(x > 0, x, number),
            x[torch.tensor([0, 2])],
        ):
            assert allowed.device == torch.device("sim:1")
        rows = torch.arange(4, device="sim:1")  # torch has no tag on these as elementwise operators
        assert (rows // 2).tolist() == (rows // torch.tensor(2)).tolist() == [0, 0, 1, 1]
        assert torch.rsub(rows, torch.tensor(3)).tolist() == [3, 2, 1, 0]
        x[torch.tensor([1])] = number
        x[1] = 3.0
        x.masked_fill_(x > 0, number)
        assert x[1].eq(2).all()


def test_strict_false_copies_and_warns():
    with simulate(2, strict=False) as cluster:
        x = torch.ones(4, 4, device="sim:1")
        with pytest.warns(
            UserWarning,
            match="got mat2 is on cpu, different from other tensors on sim:1.*not strict",
        ):
            y = x @ torch.ones(4, 4)
        assert y.device == torch.device("sim:1")
        assert y.eq(4).all()
        assert cluster.moved["cpu", "sim:1"] == 64
