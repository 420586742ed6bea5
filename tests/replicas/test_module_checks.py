"""Modules that cannot be replicated."""

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelModel, parallelize, simulate

pytestmark = pytest.mark.usefixtures("double")

CPUS = ["cpu"] * 3


def test_modules_that_cannot_be_replicated_raise_an_error():
    with pytest.raises(ValueError, match=r"weight is not initialised yet: run the module once"):
        DataParallelModel(nn.LazyLinear(3), CPUS)(torch.randn(3, 4))
    compiled = torch.compile(build_net(), backend="eager")
    with pytest.raises(TypeError, match=r"is compiled, which binds it to one replica: pass the module without torch.compile"):
        DataParallelModel(compiled, CPUS)(torch.randn(3, 4))
    model = DataParallelModel(build_net(), CPUS)
    model.module.to("meta")
    with pytest.raises(ValueError, match=r"0.weight is on meta, expected .* on the first device, cpu.*\.to\('cpu'\)"):
        model(torch.randn(3, 4))


def with_max_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2)).double()


RESCALES = r"the embedding '0' has max_norm=1: .* Expected max_norm=None; rescale all rows after each update"


def test_embeddings_that_rescale_their_rows_are_refused_on_several_devices():
    """Each device rescales the rows that it sees, in a weight of its own."""
    tokens = torch.randint(7, (5, 2))
    expected = with_max_norm()(tokens)
    assert torch.equal(DataParallelModel(with_max_norm(), CPUS)(tokens).gather(), expected)  # they share one weight
    with simulate(2):
        model = DataParallelModel(with_max_norm().to("sim:0"))
        with pytest.raises(ValueError, match=RESCALES):
            model(tokens.to("sim:0"))
        with torch.no_grad():
            torch.testing.assert_close(model(tokens.to("sim:0")).gather().cpu(), expected.detach())
        model.module[0].requires_grad_(False)
        assert model(tokens.to("sim:0"))


def check_ranks(rank):
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=RESCALES):
            parallelize(with_max_norm(), nn.CrossEntropyLoss(), strategy=strategy)


def test_embeddings_that_rescale_their_rows_are_refused_on_several_ranks():
    run_ranks(2, check_ranks)
