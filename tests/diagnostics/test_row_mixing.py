"""Models whose forward mixes the rows of a batch, or changes their order."""

import pytest
import torch
from helpers.problems import build_net
from helpers.verification import CPUS, check
from torch import nn

from balanced_parallel import verify

pytestmark = pytest.mark.usefixtures("double")


class Mixing(nn.Module):
    """Two layers with a function of all rows between them."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(4, 6), nn.Linear(6, 5), mix

    def forward(self, x):
        self.last = self.mix(self.first(x))  # state that no forward reads
        return self.second(self.last)


@pytest.mark.parametrize(
    "mix", [lambda x: x.softmax(0), lambda x: x - x.mean(0), lambda x: x.sort(0).values], ids=["softmax", "mean", "sort"]
)
def test_rows_mixed_in_forward_are_a_reason(mix):
    report = check(nn.Sequential(nn.Identity(), Mixing(mix)), device_ids=["cpu"], micro_batch_size=3)
    (reason,) = [reason for reason in report.reasons if "rows" in reason and "state" not in reason]
    assert reason == (
        "forward mixes rows, in 1 (Mixing), before 1.second: the output of a row depends on the other rows of its batch: move "
        "this part into the criterion, with whole=True; for a batch norm use convert_sync_batchnorm(module)"
    )
    assert report.first_difference.startswith(
        "1.second (Linear): its inputs differ already, so the cause is in forward of 1 (Mixing), before 1.second: relative error"
    )


class HiddenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norms = build_net(), [nn.BatchNorm1d(5)]

    def forward(self, x):
        return self.norms[0](self.net(x))


def test_a_batch_norm_that_is_not_registered_mixes_rows():
    report = check(HiddenNorm())
    assert any(reason.startswith("forward mixes rows, in the model (HiddenNorm): ") for reason in report.reasons)
    assert report.warnings == (
        "unregistered: norms of HiddenNorm holds modules that are not registered: make it an nn.ModuleList or an nn.ModuleDict",
    )


class FlatTimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, x):
        return self.net(x).transpose(0, 1).flatten(0, 1)


def test_rows_in_another_order_are_a_reason():
    inputs, targets = torch.randn(7, 3, 4), torch.randint(5, (21,))
    report = verify(FlatTimeMajor(), nn.CrossEntropyLoss(), inputs, targets, device_ids=CPUS)
    assert report.reasons == (
        "the rows of the output are in another order than those of the inputs, from the model (FlatTimeMajor) on: flatten the "
        "output in the criterion, not in forward; for rows in another dimension give dim=",
    )


def test_rows_are_not_blamed_for_dropout_or_the_loss():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 5))
    assert [reason.split(":")[0] for reason in check(net).reasons] == ["batch norm", "dropout"]
    net[2] = nn.BatchNorm1d(6, track_running_stats=False)
    assert [reason.split(":")[0] for reason in check(net).reasons] == ["batch norm", "dropout"]
