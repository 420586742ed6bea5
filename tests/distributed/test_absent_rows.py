"""Ranks without rows in a loop by hand: nothing of the row that runs in their place is left."""

import copy

import pytest
import torch
from helpers.problems import assert_same_gradients, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import Rows, gather, parallelize
from balanced_parallel.batch.row_marks import Along, Arguments
from balanced_parallel.distributed.absent_rows import row_of_ones


class Strict(nn.Module):
    """Refuses inputs without rows, as ``nn.InstanceNorm2d`` and the masks of Llama, counts forwards and draws numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.BatchNorm2d(3), nn.Dropout(0.0), nn.Flatten())
        self.last = nn.Linear(12, 2)
        self.never = nn.Linear(2, 2)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        if not len(x):
            raise ValueError("no rows")
        self.forwards += 1
        return {"logits": self.last(self.layers(x)), "loss": x.mean()}

    def features(self, x):
        return self.forward(x)["logits"]


def check_loop(rank, first_is_empty, method):
    """Three updates; in two of them rank 1 has no rows."""
    plain = Strict().double()
    model, criterion = parallelize(copy.deepcopy(plain), nn.CrossEntropyLoss(), strategy="ddp")
    steps = [True, False, True] if first_is_empty else [False, True, True]
    for number, is_empty in enumerate(steps):
        torch.manual_seed(10 + number)
        x, targets = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randint(2, (6,))
        mine = slice(6, 6) if is_empty and rank else slice(0, 6)
        outputs = model.call(method, x[mine]) if method else model(x[mine]).map(lambda output: output["logits"])
        assert list(outputs.sizes) == [len(x[mine])]
        loss = criterion(outputs, targets[mine])
        model.zero_grad()
        loss.backward()
        expected = nn.functional.cross_entropy(plain(x)["logits"], targets)
        plain.zero_grad()
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(model.module), gradients(plain))
        assert gather(outputs.map(lambda output: output.detach())).shape == ((6, 2) if is_empty else (12, 2))
    with torch.no_grad():
        assert gather(model(x[mine]).map(lambda output: output["logits"])).shape == (6, 2)
    return model.module.forwards.item(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("method", [None, "features"])
@pytest.mark.parametrize("first_is_empty", [False, True])
def test_rank_without_rows_takes_part_in_a_loop_by_hand(first_is_empty, method):
    (forwards, random_numbers), others = run_ranks(2, check_loop, first_is_empty, method, timeout=60)
    assert forwards == 4
    assert others[1] == random_numbers


def check_in_dims(rank):
    model = parallelize(nn.GRU(3, 2), in_dims=1, out_dims=(1, 1))
    rows = 0 if rank else 4
    output, _ = model(torch.randn(5, rows, 3)).unzip()
    return output[0].shape, output[0].requires_grad


def test_rows_may_lie_in_another_dimension():
    assert run_ranks(2, check_in_dims) == [((5, 4, 2), True), ((5, 0, 2), True)]


def test_row_of_ones_has_the_dtypes_of_the_arguments():
    arguments = Arguments((torch.zeros(0, 3, dtype=torch.long), Along(torch.zeros(2, 0), 1)), {"flag": True, "none": None})
    (tokens, marked), others = row_of_ones(arguments, 0)
    assert torch.equal(tokens, torch.ones(1, 3, dtype=torch.long))
    assert torch.equal(marked.leaf, torch.ones(2, 1))
    assert others == {"flag": True, "none": None}


@pytest.mark.parametrize("empty", [[], Rows([])], ids=["list", "Rows"])
def test_no_row_is_made_up_for_lists(empty):
    assert row_of_ones(Arguments((torch.zeros(0, 3), empty), {}), 0) is None
