"""Peaks of other batches, from two traces."""

import pytest
import torch
from helpers.memory_problems import PROBLEMS, estimated
from helpers.slow import slow, slow_but
from torch import nn

from balanced_parallel import memory, savings
from balanced_parallel.memory.lines import most_that_fit


def test_rows_that_need_no_memory_have_no_largest_number():
    with pytest.raises(
        ValueError, match="the memory does not depend on the rows: any number of them fits"
    ):
        most_that_fit(lambda rows: True)


CASES = [(problem, kind) for problem in PROBLEMS for kind in ("cpu", "h200")]


@pytest.mark.parametrize(("problem", "kind"), slow_but(CASES, ("perceptron", "h200")))
def test_extrapolated_peak_equals_a_direct_estimate(problem, kind):
    report = estimated(problem, device_kind=kind, precision="bf16")
    assert report.affine
    for rows in (1, 301):
        assert report.at(rows)[0] == pytest.approx(
            report.batches.trace(rows).allocated_by_device(rows)[0], rel=1e-4
        )


@pytest.mark.parametrize("kind", ["sim", slow("cpu"), slow("h200")])
def test_largest_batch_fits_and_one_more_row_does_not(kind):
    report = estimated("perceptron", device_kind=kind)
    capacity = report.nvidia_smi[0] * 3
    rows = report.largest(capacity)
    assert rows > 18
    assert report.largest(f"{capacity}B") == rows
    assert report.batches.trace(rows).allocated_by_device(rows)[0] <= capacity
    if (
        kind != "h200"
    ):  # there the allocator may give back segments, and do with less than it would take
        assert report.batches.trace(rows + 1).allocated_by_device(rows + 1)[0] > capacity
    assert report.largest(1000) == 0


@pytest.mark.slow
def test_extrapolation_with_unequal_splits():
    settings = {"layout": "replicas", "devices": 2, "split": (5.0, 2.0), "device_kind": "sim"}
    report = estimated("language model", 20, nn.CrossEntropyLoss(), **settings)
    assert report.at(33) == pytest.approx(
        report.batches.trace(33).allocated_by_device(33), rel=1e-4
    )
    capacity = report.at(29)
    assert report.largest(capacity) == 29
    assert report.largest([capacity[0], "1GiB"]) >= 29 > report.largest(capacity[1])
    with pytest.raises(ValueError, match="capacity has 3 sizes for 2 devices"):
        report.largest(["1GiB"] * 3)


@pytest.mark.parametrize(("length", "devices"), [(100, 1), slow(300, 2)])
def test_the_loss_without_logits_is_a_line_below_and_above_one_chunk(length, devices):
    """Chunks have 256 rows of hidden states: more rows take no more memory for the logits."""
    module = nn.Embedding(500, 64)
    criterion = savings.LinearCrossEntropy(64, 500)
    words = torch.zeros(2 * devices, length, dtype=torch.int64)
    layout = {"layout": "single"} if devices == 1 else {"layout": "replicas", "devices": devices}
    report = memory.estimate(module, criterion, words, words, device_kind="cpu", **layout)
    assert report.affine
    for rows in (2, 3, 40):
        at = rows * devices
        whole = report.batches.trace(at)
        assert report.at(at) == whole.allocated_by_device(at)
        assert report.batches.lines.flops(at) == whole.first.flops


class Switch(nn.Module):
    """Runs another operator for more than two rows."""

    def forward(self, inputs):
        return torch.tanh(inputs) if len(inputs) < 3 else torch.sigmoid(inputs)


def test_an_operator_that_depends_on_the_rows_is_named():
    net = nn.Sequential(nn.Linear(8, 8), Switch())
    job = net, nn.MSELoss(), torch.zeros(2, 8), torch.zeros(2, 8)
    operators = "aten.sigmoid.default in place of aten.tanh.default"
    with pytest.warns(UserWarning, match=f"twice the rows ran {operators}, so memory is not"):
        assert not memory.estimate(*job, device_kind="cpu").affine
    with pytest.raises(ValueError, match=f"twice the rows the module runs {operators}: see"):
        memory.plan(*job, batch_size=8, capacity="1GiB", device_kind="cpu")
