"""Shares of unequal devices, by weight and by free memory. Plans of equal rows."""

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import (
    assert_equal,
    assert_same_gradients,
    build_net,
    gradients,
    plain_program,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate
from balanced_parallel.batch.plan import equal_rows


@pytest.mark.parametrize(
    "split", [[1, 0, 1], [1, 0, 0], [0.01, 0, 1], [1, 2, 3], [3, 0.5, 1], "memory"]
)
def test_every_split_equals_the_plain_program(double, split):
    net = build_net()
    x = torch.randn(13, 4)
    target = torch.randint(5, (13,))
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    with simulate(3, memory=["1MiB", "2MiB", "3MiB"]):
        model = DataParallelModel(net.to("sim:0"), split=split)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, sgd(net, lr=0.0), micro_batch_size=3)
        for run in (
            lambda: criterion(model(x), target),
            lambda: criterion(model(x), target),
            lambda: step(x, target),
        ):
            net.zero_grad()
            result = run()
            if result.requires_grad:
                result.backward()
            assert_equal(result.cpu(), loss)
            assert_same_gradients(gradients(net), expected)


def test_split_by_memory_gives_rows_in_proportion_to_free_bytes():
    with simulate(3, memory=["40MiB", "20MiB", "20MiB"]):
        net = nn.Linear(512, 512).to("sim:0")  # one MiB per device
        allocated = torch.empty(5 * 2**20, dtype=torch.uint8, device="sim:2")
        model = DataParallelModel(net, split="memory")
        assert model.split == pytest.approx((39 / 74, 20 / 74, 15 / 74), abs=1e-3)
        assert [len(output) for output in model(torch.ones(74, 512))] == [39, 20, 15]
        assert "shares: 52" in repr(model)
        del allocated


def test_replicas_on_one_device_share_its_memory():
    with simulate(2, memory="8MiB"):
        model = DataParallelModel(nn.Identity(), [0, 0, 1], split="memory")
        assert model.split == pytest.approx((0.25, 0.25, 0.5), abs=0.01)


COUNT = st.integers(1, 9)
LIMIT = st.none() | st.integers(1, 50)


@given(st.integers(0, 400), COUNT | st.lists(st.floats(0.01, 5), min_size=1, max_size=6), LIMIT)
def test_a_plan_of_equal_rows_has_each_row_once_within_the_limit(rows, shares, limit):
    plan = equal_rows(rows, shares, limit)
    parts = [part for parts in plan for part in parts]
    devices = shares if isinstance(shares, int) else len(shares)
    assert [row for part in parts for row in part] == list(range(rows))
    assert {*map(len, plan)} <= {devices}
    assert max(map(len, parts), default=0) <= (limit or rows)


@given(st.integers(1, 400), COUNT, LIMIT)
def test_a_plan_of_equal_devices_has_as_few_micro_batches_of_equal_size_as_possible(
    rows, devices, limit
):
    sizes = [sum(map(len, parts)) for parts in equal_rows(rows, devices, limit)]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == (1 if limit is None else -(-rows // (limit * devices)))


def test_targets_of_another_number_of_rows_are_named_with_all_rows():
    """Each of two shards would have 4 rows of the inputs, and 3 of the targets."""
    model = DataParallelModel(build_net(), ["cpu"] * 2)
    outputs = model(torch.ones(8, 4))
    with pytest.raises(
        ValueError,
        match="the targets have 6 rows, but the inputs have 8, expected the same number, or",
    ):
        DataParallelCriterion(nn.MSELoss())(outputs, torch.ones(6, 5))
