"""Operators whose memory depends on values: an exact rule, the worst case, or an error that names them."""

import pytest
import torch
from helpers.allocations import used
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from balanced_parallel import memory


class Applying(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, inputs):
        return self.function(self.layer(inputs))


@torch.library.custom_op("test_memory::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


REFUSED = {
    "reads a value": lambda h: h * h.sum().item(),
    "reads a value of a tensor": lambda h: h if h.sum() > 0 else -h,
    "aten.unique_dim": lambda h: h + torch.unique(h.long(), dim=0).sum(),
    "aten.repeat_interleave": lambda h: h + torch.repeat_interleave(h[:, 0].long().abs()).sum(),
    "without_a_fake": without_a_fake,
    "aten._pack_padded_sequence.default packs sequences": lambda h: pack_padded_sequence(h[None], [6]).data,
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_data_dependent_operators_raise_an_error_with_their_name(message):
    with pytest.raises(ValueError, match=message):
        memory.estimate(
            Applying(REFUSED[message]), lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), device_kind="cpu"
        )


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 8, sparse=True)

    def forward(self, tokens):
        return self.table(tokens).mean(1)


def momentum(parameters):
    return torch.optim.SGD(parameters, momentum=0.9)


@pytest.mark.parametrize("optimizer", [momentum, torch.optim.Adagrad, torch.optim.SparseAdam])
@pytest.mark.parametrize("device_kind", ["cpu", "h200"])
def test_optimizers_that_merge_the_rows_of_sparse_gradients_raise_an_error(optimizer, device_kind):
    batch = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="merges the rows of a sparse gradient"):
        memory.estimate(Lookup(), F.cross_entropy, *batch, optimizer=optimizer, device_kind=device_kind)


def test_scalar_sets_the_result_of_item():
    net = Applying(lambda h: h[: h.sum().int().item()] * 2)
    report = memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), scalar=3)
    assert report.allocated
    with pytest.raises(ValueError, match="scalar="):
        memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6))


SELECTIONS = {
    "mask": lambda h: h[h > 0].sum() + h.sum(),
    "nonzero": lambda h: h.abs().nonzero().sum() + h.sum(),
    "masked_select": lambda h: h.masked_select(h > 0).sum() + h.sum(),
    "unique": lambda h: torch.unique(h.long()).sum() + h.sum(),
}


def equals_the_allocator(build, batch, optimizer=torch.optim.AdamW, precision="fp32", criterion=F.cross_entropy, rel=0.001):
    """Compares an estimate for the CPU with its allocator. Returns the report."""
    found = used(build, batch, optimizer, precision, criterion=criterion)
    settings = {"optimizer": optimizer, "precision": precision, "device_kind": "cpu"}
    report = memory.estimate(build(), criterion, *batch(), **settings)
    assert abs(report.allocated[0] - found) <= rel * found
    return report


def ones():
    return torch.ones(500, 8), torch.zeros(500)


def first(out, _):
    return out


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.usefixtures("one_trace")
def test_selections_are_estimated_by_the_worst_case(name):
    """No batch selects more, so the estimate is never below the memory in use."""
    net = Applying(SELECTIONS[name])
    found = used(lambda: net, ones, torch.optim.AdamW, criterion=first)
    report = memory.estimate(net, first, torch.zeros(500, 8), torch.zeros(500), device_kind="cpu")
    assert found <= report.allocated[0] <= 3 * found


def fill(h):
    h = h * 2
    h[h > 0] = 0.0
    h[:, h[0] == 0] = 1.0
    return h.sum()


def test_a_number_for_a_mask_equals_the_allocator(one_trace):
    """torch fills the mask: it makes no indices. Rprop sets the signs of gradients by masks."""
    equals_the_allocator(lambda: Applying(fill), ones, torch.optim.Rprop, criterion=first, rel=0.002)


@pytest.mark.usefixtures("one_trace")
def test_sparse_gradients_equal_the_allocator():
    def batch():
        return torch.randint(0, 500, (40, 30)), torch.zeros(40, dtype=torch.int64)

    equals_the_allocator(Lookup, batch, torch.optim.SGD, rel=0.002)


class Spelling(nn.Module):
    """Log-probabilities of characters, and the CTC loss of all-ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 12)

    def forward(self, inputs):
        return self.layer(inputs).log_softmax(-1).transpose(0, 1)


def spelled(scores, targets):
    rows, longest = targets.shape
    return F.ctc_loss(scores, targets, torch.full((rows,), len(scores)), torch.full((rows,), longest))


def listed(scores, targets):
    rows, longest = targets.shape
    return F.ctc_loss(scores, targets, (len(scores),) * rows, (longest,) * rows)


@pytest.mark.parametrize("criterion", [spelled, listed])
@pytest.mark.usefixtures("one_trace")
def test_ctc_loss_equals_the_peak_of_the_allocator(criterion):
    """The peak is in the backward of the loss."""

    def batch():
        return torch.zeros(6, 50, 8), torch.ones(6, 20, dtype=torch.int64)

    equals_the_allocator(Spelling, batch, criterion=criterion)


def test_module_with_a_fixed_batch_size_is_not_extrapolated():
    net = Applying(lambda h: h.view(6, 8))
    with pytest.warns(UserWarning, match="with 12 rows the module raises RuntimeError: shape"):
        report = memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), device_kind="cpu")
    assert report.at(6) == report.allocated
    with pytest.raises(RuntimeError, match="shape"):
        report.at(7)
    with pytest.raises(ValueError, match=r"RuntimeError: shape.*any number of rows"):
        memory.plan(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), batch_size=6, capacity="1GiB")


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
@pytest.mark.usefixtures("one_trace")
def test_scalar_loss_that_keeps_its_elements_equals_the_allocator(loss):
    """The peak is in the backward, where the loss is alive and the outputs are not."""

    def build():
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 32))

    def batch():
        return torch.zeros(400, 16), torch.zeros(400, 32)

    equals_the_allocator(build, batch, torch.optim.SGD, criterion=loss, rel=0.002)


class Experts(nn.Module):
    """Rows in groups of 16, each with a matrix of its own, as experts of transformers compute them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(4, *shape)) for shape in ((64, 256), (256, 64)))

    def forward(self, rows):
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
        hidden = F.grouped_mm(rows.to(self.first.dtype), self.first, offs=ends).relu()
        return F.grouped_mm(hidden, self.second, offs=ends)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_of_groups_equal_the_allocator(precision):
    """The fake kernel of torch takes bfloat16 alone, and the kernels of the CPU and of CUDA all dtypes."""

    def batch():
        return torch.zeros(64, 64), torch.zeros(64, 64)

    report = equals_the_allocator(Experts, batch, precision=precision, criterion=F.mse_loss)
    assert report.flops == 5 * 2 * 64 * 64 * 256  # two products, and the gradients of both matrices and of what is between them


def test_an_error_after_a_selection_names_what_was_assumed():
    net = Applying(lambda h: h[h[:, 0] > 0] + torch.zeros(2, 8))
    message = (
        r"broadcast.* Before it, \S+test_operators_values.py:\d+ was assumed to select all \(aten.index.Tensor\), in the shape "
    )
    with pytest.raises(
        ValueError, match=message + r"\(6, 8\): if training selects fewer, give memory.estimate a module without it"
    ):
        memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), device_kind="cpu")
