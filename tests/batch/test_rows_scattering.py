"""Scattering: sizes of shards, values without rows, errors for inputs with different numbers of rows."""

from array import array
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.loops import Calls
from helpers.problems import CLASSES
from helpers.steps import still_step
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    Rows,
    Whole,
    scatter,
)
from balanced_parallel.batch.plan import split_sizes

CPUS = ["cpu"] * 4


@given(rows=st.integers(0, 10**6), parts=st.integers(1, 64))
def test_sizes_differ_by_at_most_one_row(rows, parts):
    sizes = split_sizes(rows, parts)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    rows=st.integers(0, 10**4),
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(lambda w: sum(w) > 0.1),
)
def test_weighted_sizes_differ_from_their_share_by_less_than_one_row(rows, weights):
    sizes = split_sizes(rows, weights)
    assert sum(sizes) == rows
    assert all(
        abs(size - rows * weight / sum(weights)) < 1 + 1e-6
        for size, weight in zip(sizes, weights, strict=True)
    )


def test_rows_of_devices():
    assert split_sizes(9, 4) == [
        3,
        2,
        2,
        2,
    ]  # torch's chunk: 3, 3, 3 and an idle device (pytorch#15161)
    assert [len(piece) for piece in scatter(torch.zeros(9, 2), CPUS)] == [3, 2, 2, 2]
    assert split_sizes(8, [3, 1]) == [6, 2]
    assert [len(piece) for piece in scatter(torch.zeros(2, 3), CPUS)] == [1, 1]
    assert [piece.shape for piece in scatter(torch.zeros(0, 3), CPUS)] == [(0, 3)]
    assert scatter({"a": 1}, CPUS) == [{"a": 1}]
    assert [piece.shape for piece in scatter(torch.zeros(2, 5), CPUS[:2], dim=1)] == [
        (2, 3),
        (2, 2),
    ]


def test_different_numbers_of_rows_raise_an_error_that_names_both_inputs():
    with pytest.raises(
        ValueError,
        match=r"inputs\[0\] is a tensor of shape \(4, 3\) \(4 rows\).*inputs\[1\]\['mask'\] .*\(2, 3\)",
    ):
        scatter((torch.zeros(4, 3), {"mask": torch.zeros(2, 3)}), CPUS)  # torch drops rows 2 and 3
    with pytest.raises(ValueError, match=r"a list of 3 plain values \(3 rows\)"):
        scatter((torch.zeros(4, 3), ["a", "b", "c"]), CPUS)


def test_inputs_that_cannot_be_split_raise_an_error():
    with pytest.raises(
        TypeError, match=r"inputs\[1\] is an array of shape \(4,\).*torch.as_tensor"
    ):
        scatter((torch.zeros(4, 3), np.zeros(4)), CPUS)
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    with pytest.raises(TypeError, match="PackedSequence.*pass the padded tensor"):
        scatter(packed, CPUS)
    with pytest.raises(ValueError, match=r"shape \(4,\), expected rows in dimension 1"):
        scatter((torch.zeros(2, 4), torch.zeros(4)), CPUS, dim=1)


def test_split_by_weights_skips_devices_of_weight_zero():
    assert [len(piece) for piece in scatter(torch.zeros(8, 1), ["cpu"] * 3, split=[3, 0, 1])] == [
        6,
        2,
    ]
    for split in ([1], [1, -1, 1], [0, 0, 0], [0, 1, 1], "memory", [1, float("nan"), 1]):
        with pytest.raises(ValueError, match="split=.*expected None or one weight per device"):
            scatter(torch.zeros(8, 1), ["cpu"] * 3, split=split)


def test_targets_without_inputs_raise_an_error():
    step = still_step(torch.nn.Linear(4, 3), DataParallelCriterion(torch.nn.CrossEntropyLoss()))
    with pytest.raises(
        ValueError,
        match="the targets have 5 rows, but the inputs have none: expected the same number",
    ):
        step(torch.zeros(0, 4), torch.zeros(5, dtype=torch.long))


def test_an_empty_list_goes_to_every_replica():
    """It had no rows to count, and was then indexed by row."""
    first, second = scatter({"x": torch.zeros(5, 2), "names": []}, CPUS[:2])
    assert (first["names"], second["names"], len(first["x"])) == ([], [], 3)

    net = Calls(lambda net, x, hints, extra: net(x) + len(hints) + len(extra["hints"]))
    criterion = DataParallelCriterion(
        lambda output, target, names: torch.nn.functional.mse_loss(output, target) + len(names)
    )
    inputs = {"x": torch.randn(7, 4), "hints": [], "extra": {"hints": []}}
    targets = torch.randn(7, CLASSES), []
    expected = criterion.module(net(**inputs), *targets)
    assert_close(still_step(net, criterion, micro_batch_size=1)(inputs, targets), expected.detach())


class Pair(NamedTuple):
    x: Any
    numbers: Any


SCALARS = {
    "numbers": (0.5, 1.5, 2.5, 3.5, 4.5),
    "tensors": tuple(torch.arange(5.0)),
    "boxes": ((1, 2),) * 5,
}
PLACES = {
    r"inputs\[1\]": lambda x, numbers: (x, numbers),
    r"inputs\[0\]\['n'\]": lambda x, numbers: {"x": x, "n": numbers},
    r"inputs\[0\]\.numbers": lambda x, numbers: Pair(x, numbers),
    r"inputs\[1\]\[1\]": lambda x, numbers: (x, [x[:, 0], numbers]),
}


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("place", PLACES)
def test_a_tuple_with_a_value_for_each_row_is_an_error(place, kind):
    """``tuple(zip(*samples))`` makes it. It went whole to every replica."""
    x = torch.zeros(5, 2)
    numbers = SCALARS[kind]
    message = (
        place
        + r" is a tuple of 5 entries .*: each entry may be a row, .* Rows\(\.\.\.\) .* Whole\(\.\.\.\)"
    )
    with pytest.raises(ValueError, match=message):
        scatter(PLACES[place](x, numbers), CPUS)
    with pytest.raises(ValueError, match=message.replace("5 entries", "6 entries")):
        scatter(PLACES[place](x, (*numbers, numbers[0])), CPUS)
    assert len(scatter(PLACES[place](x, Rows(numbers)), CPUS)) == len(CPUS)
    scatter(PLACES[place](x, Whole(numbers)), CPUS)
    scatter(PLACES[place](x, numbers[:2]), CPUS)  # such as height and width


@pytest.mark.parametrize("numbers", [range(5), deque(torch.arange(5.0)), array("d", [0.5] * 5)])
def test_a_sequence_with_a_value_for_each_row_is_an_error(numbers):
    """It went whole to every replica."""
    for x in (torch.zeros(5, 2), Rows(torch.zeros(5, 2).tolist())):
        with pytest.raises(ValueError, match=r"inputs\[1\] is a \w+ of 5 entries .* Whole"):
            scatter((x, numbers), CPUS)
    scatter((torch.zeros(4, 2), numbers, "names", b"names"), CPUS)


def test_values_of_rows_are_errors_in_keyword_arguments_and_targets():
    x = torch.zeros(5, 4)
    labels = torch.zeros(5, dtype=torch.long)
    numbers = (0.1, 0.2, 0.3, 0.4, 0.5)
    net = Calls(lambda net, x, numbers=(1.0,): net(x) * sum(numbers))

    def loss(output, labels, *numbers):
        return torch.nn.functional.cross_entropy(output, labels)

    step = still_step(net, DataParallelCriterion(loss), micro_batch_size=1)
    model = step.model
    with pytest.raises(
        ValueError, match=r"kwargs\['numbers'\] is a tuple of 5 entries .* float 0\.1"
    ):
        model(x, numbers=numbers)
    with pytest.raises(ValueError, match=r"targets\[1\] is a tuple of 5 entries"):
        step.criterion(model(x), labels, numbers)
    with pytest.raises(ValueError, match=r"targets\[1\] is a tuple of 5 entries"):
        step(x, (labels, numbers))
    assert len(model(x[:1], (0.5, 0.5, 0.5))[0]) == 1  # nothing is split
