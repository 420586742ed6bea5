"""Inputs that are neither tensors nor containers: an object with tensors is never sent whole without a word."""

import functools
from collections import UserDict

import pytest
import torch
from helpers.loops import CPUS, Calls
from helpers.problems import build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelModel, Rows, Whole, scatter


class Graphs:
    """A batch of graphs. It can be called, as ``torch_geometric.data.Data`` can."""

    def __init__(self, x):
        self._store = {"x": x}

    def __call__(self, *names):
        return [self._store[name] for name in names]


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class MoreSlots(Slots):
    __slots__ = ("__name",)


class Rowwise(UserDict):
    """A mapping that iterates over its rows, with one size for all entries, as a ``TensorDict``."""

    batch_dims = 1

    def __init__(self, x):
        super().__init__(x=x)
        self.batch_size = x.shape[:1]

    def __iter__(self):
        return iter(range(len(self["x"])))

    def values(self):
        return self.data.values()

    def __call__(self, *names):
        return [self[name] for name in names]


class Sum(nn.Module):
    def forward(self, given, function=None):
        return sum(
            entry.x.sum() if isinstance(entry, Slots) else entry("x")[0].sum() for entry in given
        )


@pytest.mark.parametrize("kind", [Graphs, Slots, MoreSlots, Rowwise])
def test_objects_that_hold_tensors_are_refused(kind):
    model = DataParallelModel(Sum(), CPUS)
    x = torch.ones(6, 4)
    with pytest.raises(
        TypeError,
        match=rf"inputs\[0\] is an object of type {kind.__name__} that holds tensors.*Rows\(list\)",
    ):
        model(kind(x))
    with pytest.raises(TypeError, match=f"object of type {kind.__name__}"):
        model(torch.zeros(4, 2), function={"data": kind(x)})
    outputs = model(Rows([kind(row) for row in x]))
    assert [output.item() for output in outputs] == [8, 8, 8]
    (output,) = DataParallelModel(Sum(), ["cpu"])(Whole([kind(x)]))
    assert output.item() == 24


def test_functions_go_to_every_replica():
    model = DataParallelModel(Calls(lambda _, x, function: function(x)), CPUS)
    weight = torch.full((4,), 2.0)
    for function in (
        torch.relu,
        lambda x: x * weight,
        functools.partial(torch.mul, weight),
        weight.mul,
        build_net(),
    ):
        assert len(model(torch.ones(6, 4), function).gather()) == 6


def nested_rows():
    return [torch.ones(length, 4) for length in range(1, 7)]


TENSORS = {  # a function that makes it, and its name in the error
    "complex": (lambda: torch.randn(6, 4, dtype=torch.complex64), None),
    "quantised": (lambda: torch.quantize_per_tensor(torch.randn(6, 4), 0.1, 0, torch.qint8), None),
    "sparse": (lambda: torch.eye(6).to_sparse(), "torch.sparse_coo"),
    "compressed": (lambda: torch.eye(6).to_sparse_csr(), "torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor(nested_rows()), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor(nested_rows(), layout=torch.jagged), "nested"),
}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse CSR tensor support",
    "ignore:.*quantiz",
)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_other_kinds_are_split_or_refused(name):
    make, kind = TENSORS[name]
    x = make()
    model = DataParallelModel(nn.Identity(), CPUS)
    assert DataParallelModel(nn.Identity(), ["cpu"])(x)[0] is x
    pair = DataParallelModel(Calls(lambda _, rows, whole: (rows, whole)), CPUS)
    assert all(output is x for output in pair(torch.ones(6, 4), Whole(x)).unzip()[1])
    if kind is None:
        whole = model(x).gather()
        assert_close(*(tensor.dequantize() if x.is_quantized else tensor for tensor in (whole, x)))
        return
    with pytest.raises(
        TypeError,
        match=rf"a {kind} tensor cannot be split by rows, expected a dense one.*Whole\(\.\.\.\)",
    ):
        model(x)


def test_a_tuple_of_mappings_is_accepted_where_a_list_may_have_one_for_each_row():
    entries = [{"x": torch.full((5, 2), float(number))} for number in range(3)]
    with pytest.raises(
        ValueError, match="each entry may be a row, or have all rows, .*make it a tuple"
    ):
        DataParallelModel(nn.Identity(), CPUS)(entries)
    outputs = DataParallelModel(nn.Identity(), CPUS)(tuple(entries)).gather()
    for output, entry in zip(outputs, entries, strict=True):
        assert_close(output["x"], entry["x"])


def test_weights_of_devices_without_an_order_are_refused():
    for split in ({0: 1, 1: 1, 2: 5}, {1, 2, 5}, "123"):
        for use in (
            functools.partial(DataParallelModel, nn.Identity()),
            functools.partial(scatter, torch.ones(6)),
        ):
            with pytest.raises(ValueError, match="expected None or one weight per device"):
                use(CPUS, split=split)
