"""State that does not change the loss: buffers make a difference, numbers and unregistered layers a warning."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net
from helpers.verification import check
from torch import nn

from balanced_parallel import convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("double")


class Counting(nn.Module):
    """Counts rows in a buffer, and forwards in an attribute. Neither changes the output."""

    def __init__(self, counts_rows):
        super().__init__()
        self.net, self.forwards, self.log, self.counts_rows = build_net(), 0, {"rows": 0}, counts_rows
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.forwards += 1
        if self.counts_rows:
            self.rows += len(x)
            self.log["rows"] += len(x)
        return self.net(x)


def test_a_buffer_that_keeps_the_rows_of_one_replica_is_a_difference():
    report = check(nn.Sequential(Counting(counts_rows=True)))
    assert not report.equal
    assert max(report.loss_error, *report.gradient_errors.values()) <= 1e-10
    assert report.state_errors == {"0.rows": pytest.approx(4 / 7)}  # the first of three replicas has three of seven rows
    assert "\nbuffer 0.rows " in str(report)
    assert "state written in forward: buffer 0.rows; all replicas but the first lose it" in report.reasons
    assert "state written in forward: 0.log; all replicas write to the same object, in any order" in report.reasons
    assert report.warnings == ()


def test_a_number_that_differs_is_a_warning():
    model = Counting(counts_rows=False)
    assert check(model).warnings == ()
    report = check(model, device_ids=["cpu"], micro_batch_size=3)
    assert report.equal
    assert report.warnings == (
        "forwards is 6 after the split steps, 2 after the plain ones: each micro-batch writes it, from its own rows",
    )
    assert f"warning: {report.warnings[0]}" in str(report)


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, output, target):
        self.rows += len(output)
        return F.mse_loss(output, F.one_hot(target.clamp(min=0), 5).to(output))


def test_a_buffer_of_the_criterion_is_a_difference():
    report = check(build_net(), CountingLoss(), weight="rows")
    assert list(report.state_errors) == ["criterion.rows"]
    assert report.reasons == (
        "state written by the criterion: buffer rows; each replica writes its own state, from its own rows",
    )


def test_buffers_of_batch_norms_are_reported_once():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    assert check(net).state_errors == {}
    assert check(convert_sync_batchnorm(net)).equal


class Drifting(Counting):
    """Scales its output by one plus a small multiple of the rows it has seen."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-8 * self.rows)


def test_state_with_a_small_effect_is_not_taken_for_rounding():
    report = check(Drifting(counts_rows=True))
    assert 1e-10 < report.loss_error < 1e-5
    assert all(reason.startswith("state written in forward: ") for reason in report.reasons)
