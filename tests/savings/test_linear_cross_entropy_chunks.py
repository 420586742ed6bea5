"""Cross entropy of a linear layer in chunks: the plain layers' loss and gradients, without the logits of all rows."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_equal
from torch.testing import assert_close

from balanced_parallel.savings import linear_cross_entropy as chunked_cross_entropy
from balanced_parallel.savings.linear_cross_entropy import linear_cross_entropy

CLASSES = 11
FEATURES = 6
REDUCTIONS = ["mean", "sum"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "rows_per_chunk", lambda features: 3)


def problem(rows=8, dtype=torch.float64, ignored=2):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((rows, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    )
    target = torch.randint(CLASSES, (rows,))
    target[:ignored] = -100
    return (hidden, weight, bias), target


def plain(hidden, linear_weight, target, *, linear_bias=None, **settings):
    return F.cross_entropy(F.linear(hidden, linear_weight, linear_bias), target, **settings)


def compute(function, tensors, target, **settings):
    """Returns the loss, and the gradients of its multiple."""
    hidden, weight, bias = tensors
    loss = function(hidden, weight, target, linear_bias=bias, **settings)
    return loss.detach(), torch.autograd.grad(
        loss * 0.3, [one for one in tensors if one is not None]
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [0, 2, 4, 8])
def test_loss_and_gradients_equal_the_plain_layers(reduction, smoothing, weighted, ignored):
    tensors, target = problem(ignored=ignored)
    settings = {"reduction": reduction, "label_smoothing": smoothing}
    settings["weight"] = torch.linspace(0.1, 3, CLASSES, dtype=torch.float64) if weighted else None
    loss, gradients = compute(linear_cross_entropy, tensors, target, **settings)
    expected, expected_gradients = compute(plain, tensors, target, **settings)
    assert_close(loss, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_bias_without_rows_and_with_a_counted_negative_label(reduction):
    for rows in (0, 1, 7):
        (hidden, weight, _), target = problem(rows, ignored=0)
        for ignore_index in (-1, 4):
            settings = {"reduction": reduction, "ignore_index": ignore_index}
            found = compute(linear_cross_entropy, (hidden, weight, None), target, **settings)
            expected = compute(plain, (hidden, weight, None), target, **settings)
            assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_rows_and_positions_are_both_rows():
    (hidden, weight, bias), target = problem(12)
    expected = compute(plain, (hidden, weight, bias), target)
    dense = hidden.detach().view(3, 4, FEATURES).transpose(0, 1).requires_grad_()
    loss, gradients = compute(linear_cross_entropy, (dense, weight, bias), target.view(3, 4).t())
    assert_equal(loss, expected[0])
    assert_equal(gradients[0].transpose(0, 1).reshape(12, FEATURES), expected[1][0])
    assert_equal(gradients[1], expected[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocasts", [False, True])
def test_half_precision_is_as_close_to_float64_as_the_plain_layers(dtype, autocasts):
    (hidden, weight, bias), target = problem(64)
    exact = compute(plain, (hidden, weight, bias), target)
    there = [
        tensor.detach().to(torch.float32 if autocasts else dtype).requires_grad_()
        for tensor in (hidden, weight, bias)
    ]
    with torch.autocast("cpu", dtype, enabled=autocasts):
        loss, gradients = compute(linear_cross_entropy, there, target)
        expected, expected_gradients = compute(plain, there, target)
    assert loss.dtype == torch.float32
    assert abs(loss - exact[0]) <= abs(expected - exact[0]) + 2e-2
    for one, other, true in zip(gradients, expected_gradients, exact[1], strict=True):
        assert one.dtype == other.dtype
        assert (one - true).norm() <= 1.5 * (other - true).norm() + 1e-3 * true.norm()


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo does so
def test_compiled_heads_are_equal(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "rows_per_chunk", lambda features: 256)
    (hidden, weight, _), target = problem()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    found, expected = (
        compute(function, (hidden, weight, None), target)
        for function in (compiled, linear_cross_entropy)
    )
    assert_equal(found, expected)


def test_second_derivatives_are_refused():
    tensors, target = problem()
    loss = linear_cross_entropy(*tensors[:2], target)
    with pytest.raises(
        RuntimeError, match="create_graph=True, but its backward has no graph.*nn.CrossEntropyLoss"
    ):
        torch.autograd.grad(loss, tensors[:2], create_graph=True)


@pytest.mark.parametrize("learns", [(True, False), (False, True)])
def test_only_wanted_gradients_are_made(learns):
    (hidden, weight, _), target = problem()
    tensors = hidden.detach().requires_grad_(learns[0]), weight.detach().requires_grad_(learns[1])
    linear_cross_entropy(*tensors, target).backward()
    assert [tensor.grad is not None for tensor in tensors] == list(learns)


def test_ignored_rows_may_be_nan():
    (hidden, weight, _), target = problem(ignored=2)
    padded = hidden.detach().clone()
    padded[:2] = torch.nan
    for reduction in REDUCTIONS:
        settings = {"reduction": reduction, "label_smoothing": 0.1}
        expected = plain(hidden, weight, target, **settings)
        assert_close(plain(padded, weight, target, **settings), expected)
        assert_close(linear_cross_entropy(padded, weight, target, **settings), expected)
