"""Operators whose memory depends on values: an exact rule, the worst case, or an error that names them.

Results that take the memory of an argument: torch runs these operators in place, but not under a dispatch mode.
"""

import pytest
import torch
from helpers.allocations import assert_equals_the_allocator, used
from helpers.slow import slow_but
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from balanced_parallel import memory


class Applying(nn.Module):
    """A function of a layer's results."""

    def __init__(self, function, *layers, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs):
        return self.function(self.first(inputs), *self.layers)


@torch.library.custom_op("test_memory::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


REFUSED = {
    "reads a value": lambda h: h * h.sum().item(),
    "reads a value of a tensor": lambda h: h if h.sum() > 0 else -h,
    "aten.unique_dim": lambda h: h + torch.unique(h.long(), dim=0).sum(),
    "aten.repeat_interleave": lambda h: h + torch.repeat_interleave(h[:, 0].long().abs()).sum(),
    "without_a_fake": without_a_fake,
    "aten._pack_padded_sequence.default packs sequences": lambda h: (
        pack_padded_sequence(h[None], [6]).data
    ),
}


def estimate_sum(function, make=memory.estimate, **settings):
    return make(
        Applying(function), lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6), **settings
    )


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_data_dependent_operators_raise_an_error_with_their_name(message):
    with pytest.raises(ValueError, match=message):
        estimate_sum(REFUSED[message], device_kind="cpu")


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
        memory.estimate(
            Lookup(), F.cross_entropy, *batch, optimizer=optimizer, device_kind=device_kind
        )


def test_scalar_sets_the_result_of_item():
    function = lambda h: h[: h.sum().int().item()] * 2  # noqa: E731
    assert estimate_sum(function, scalar=3).allocated
    with pytest.raises(ValueError, match="scalar="):
        estimate_sum(function)


SELECTIONS = {
    "mask": lambda h: h[h > 0].sum() + h.sum(),
    "nonzero": lambda h: h.abs().nonzero().sum() + h.sum(),
    "masked_select": lambda h: h.masked_select(h > 0).sum() + h.sum(),
    "unique": lambda h: torch.unique(h.long()).sum() + h.sum(),
}


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
    assert_equals_the_allocator(
        lambda: Applying(fill), ones, torch.optim.Rprop, criterion=first, rel=0.002
    )


@pytest.mark.usefixtures("one_trace")
def test_sparse_gradients_equal_the_allocator():
    def batch():
        return torch.randint(0, 500, (40, 30)), torch.zeros(40, dtype=torch.int64)

    assert_equals_the_allocator(Lookup, batch, torch.optim.SGD, rel=0.002)


class Spelling(nn.Module):
    """Log-probabilities of characters, and the CTC loss of all-ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 12)

    def forward(self, inputs):
        return self.layer(inputs).log_softmax(-1).transpose(0, 1)


def spelled(scores, targets):
    rows, longest = targets.shape
    return F.ctc_loss(
        scores, targets, torch.full((rows,), len(scores)), torch.full((rows,), longest)
    )


def listed(scores, targets):
    rows, longest = targets.shape
    return F.ctc_loss(scores, targets, (len(scores),) * rows, (longest,) * rows)


@pytest.mark.parametrize("criterion", [spelled, listed])
@pytest.mark.usefixtures("one_trace")
def test_ctc_loss_equals_the_peak_of_the_allocator(criterion):
    """The peak is in the backward of the loss."""

    def batch():
        return torch.zeros(6, 50, 8), torch.ones(6, 20, dtype=torch.int64)

    assert_equals_the_allocator(Spelling, batch, criterion=criterion)


def test_module_with_a_fixed_batch_size_is_not_extrapolated():
    function = lambda h: h.view(6, 8)  # noqa: E731
    with pytest.warns(UserWarning, match="with 12 rows the module raises RuntimeError: shape"):
        report = estimate_sum(function, device_kind="cpu")
    assert report.at(6) == report.allocated
    with pytest.raises(RuntimeError, match="shape"):
        report.at(7)
    with pytest.raises(ValueError, match=r"RuntimeError: shape.*any number of rows"):
        estimate_sum(function, memory.plan, batch_size=6, capacity="1GiB")


class Experts(nn.Module):
    """Rows in groups of 16, each with a matrix of its own, as experts of transformers compute them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.zeros(4, *shape)) for shape in ((64, 256), (256, 64))
        )

    def forward(self, rows):
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
        hidden = F.grouped_mm(rows.to(self.first.dtype), self.first, offs=ends).relu()
        return F.grouped_mm(hidden, self.second, offs=ends)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_of_groups_equal_the_allocator(precision):
    """The fake kernel of torch takes bfloat16 alone, and the kernels of the CPU and of CUDA all dtypes."""

    def batch():
        return torch.zeros(64, 64), torch.zeros(64, 64)

    report = assert_equals_the_allocator(Experts, batch, precision=precision, criterion=F.mse_loss)
    assert (
        report.flops == 5 * 2 * 64 * 64 * 256
    )  # two products, and the gradients of both matrices and of what is between them


def test_an_error_after_a_selection_names_what_was_assumed():
    message = (
        r"broadcast.* Before it, \S+test_operators_values.py:\d+ was assumed to select all \(aten.index.Tensor\), in the shape "
        r"\(6, 8\): if training selects fewer, give memory.estimate a module without it"
    )
    with pytest.raises(ValueError, match=message):
        estimate_sum(lambda h: h[h[:, 0] > 0] + torch.zeros(2, 8), device_kind="cpu")


ROWS = 8
STEPS = 50
WIDTH = 64
EVERY_SECOND = torch.arange(0, STEPS, 2)
IN_PLACE = {  # functions of results that are as large as the peak of the step, and the sizes of layers in them
    "a sum of gradients": (lambda h: h[:, 1:] - h[:, :-1],),
    "a sum of gradients of one operator": (lambda h: torch.stack([h[:, 1], h[:, 1]], -1),),
    "a tied weight": (lambda h, tied: tied(tied(h.flatten(1)) @ tied.weight), (3200, 400)),
    "a sum within an operator": (lambda h: sum(torch.var_mean(h, 1)),),
    "maximum": (lambda h: h.max(1)[0],),
    "largest": (lambda h: h.topk(4, 1)[0],),
    "gather": (lambda h: h.gather(1, EVERY_SECOND[None, :, None].expand(ROWS, -1, WIDTH)),),
    "index": (lambda h: h[:, EVERY_SECOND],),
    "index_select": (lambda h: h.index_select(1, EVERY_SECOND),),
    "not contiguous": (lambda h, project: project(h.transpose(1, 2)), (STEPS, 400)),
}
BY_DEFAULT = ["a sum of gradients", "a tied weight", "a sum within an operator", "maximum", "index"]


def of_ten_classes(output, targets):
    return F.cross_entropy(output.flatten(1)[:, :10], targets)


@pytest.mark.parametrize("name", slow_but(IN_PLACE, *BY_DEFAULT))
@pytest.mark.usefixtures("one_trace")
def test_results_in_the_memory_of_an_argument_equal_the_allocator(name):
    function, *sizes = IN_PLACE[name]

    def build():
        return Applying(function, *[nn.Linear(*size) for size in sizes], width=WIDTH)

    def batch():
        return torch.zeros(ROWS, STEPS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)

    assert_equals_the_allocator(build, batch, torch.optim.SGD, criterion=of_ten_classes)
