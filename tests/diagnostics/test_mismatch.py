"""Known reasons for a difference: layers that mix rows, random layers, state, fixed devices."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net
from helpers.verification import check, contrastive_loss
from torch import nn

from balanced_parallel import convert_sync_batchnorm
from balanced_parallel.diagnostics.mismatch import _random_layers

pytestmark = pytest.mark.usefixtures("double")


def test_batch_norm_is_reported_as_a_reason():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    report = check(net)
    assert not report.equal
    assert report.first_difference.startswith("1 (BatchNorm1d): relative error")
    assert report.reasons == (
        "batch norm: 1 uses the statistics of the rows of each replica: use convert_sync_batchnorm(module), or a norm that does "
        "not mix rows",
    )
    text = str(report)
    assert "DIFFERENT" in text
    assert "0.weight" in text
    assert "<-" in text
    assert check(convert_sync_batchnorm(net)).equal
    accumulated = check(net, micro_batch_size=1)
    assert accumulated.reasons == ("batch norm: 1 uses the statistics of each micro-batch, not of the whole batch",)


def test_dropout_is_reported_as_a_reason():
    report = check(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5)))
    assert report.first_difference.startswith("1 (Dropout)")
    assert report.reasons == ("dropout: 1 draws different random numbers for each shard: compare in eval mode",)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.LSTM(6, 5, 2, dropout=0.1), nn.Dropout(0.0))
    assert list(_random_layers(net)) == [
        "dropout: 1 draws different random numbers for each shard: compare in eval mode",
        "dropout: 2 draws different random numbers for each shard: compare in eval mode",
    ]
    assert not list(_random_layers(net.eval()))


class Stateful(nn.Module):
    """A module that writes state in forward. Only the first replica keeps it."""

    def __init__(self):
        super().__init__()
        self.net, self.calls, self.seen = build_net(), 0, []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.total += x.sum()
        return self.net(x) * self.total


def test_state_written_in_forward_is_reported_as_a_reason():
    report = check(Stateful())
    assert not report.equal
    assert report.first_difference.startswith("the model (Stateful)")
    assert report.reasons == (
        "state written in forward: calls; all replicas but the first lose it",
        "state written in forward: seen; all replicas write to the same object, in any order",
        "state written in forward: buffer total; all replicas but the first lose it",
    )


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = build_net(), nn.BatchNorm1d(5)

    def forward(self, x):
        shift = torch.zeros(5) + torch.ones(5, device=x.device) + torch.arange(5, device="cpu").to("cpu")
        if x.is_cuda:
            shift = shift.cuda()
        return self.norm(self.net(x.to(torch.float64)) + shift)


def test_fixed_devices_in_forward_are_reported_as_reasons():
    reasons = [reason for reason in check(Fixed()).reasons if reason.startswith("a fixed device")]
    assert {reason.split(": ")[1].split(" in Fixed")[0] for reason in reasons} == {
        "torch.arange(5, device='cpu').to('cpu')",
        "shift.cuda()",
        "torch.zeros(5) without device=",
        "torch.arange(5, device='cpu')",
    }


# State


class Centering(nn.Module):
    """A loss with state, as in DINO: it subtracts a running mean of earlier outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, output, target):
        loss = F.cross_entropy(output - self.center, target)
        self.center = 0.5 * self.center + 0.5 * output.detach().mean(0)
        return loss


class PlainCentering:
    """The same loss as an object that is not a module."""

    def __init__(self):
        self.center = torch.zeros(5)

    def __call__(self, output, target):
        return Centering.forward(self, output, target)


@pytest.mark.parametrize(
    ("kind", "what", "step"),
    [
        (Centering, "buffer center", 2),
        (PlainCentering, "center", 1),
    ],  # all replicas share a PlainCentering, so it differs in the first step
)
def test_state_written_by_the_criterion_is_reported_as_a_reason(kind, what, step):
    criterion = kind()
    report = check(build_net(), criterion, weight=lambda output, target: (target != -100).sum())
    assert not report.equal
    assert report.step == step
    assert report.reasons == (f"state written by the criterion: {what}; each replica writes its own state, from its own rows",)
    assert f"loss in step {step}" in str(report)
    assert torch.equal(criterion.center, torch.zeros(5))


class StatefulInTheSecondStep(nn.Module):
    """A module with state that changes the output from the second forward on."""

    def __init__(self):
        super().__init__()
        self.net = build_net()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        before = self.seen.clone()
        self.seen.add_(x.sum())
        return self.net(x) * (1 + before)


def test_state_that_shows_in_the_second_step_is_reported_as_a_reason():
    report = check(StatefulInTheSecondStep())
    assert report.step == 2
    assert report.first_difference.startswith("the model (StatefulInTheSecondStep)")
    assert report.reasons == ("state written in forward: buffer seen; all replicas but the first lose it",)


def test_sync_batch_norm_is_a_reason_in_micro_batches_only():
    net = nn.Sequential(nn.Linear(4, 6), convert_sync_batchnorm(nn.BatchNorm1d(6)), nn.Linear(6, 5))
    assert all(reason.startswith("the loss") for reason in check(net, contrastive_loss).reasons)
    assert check(net, micro_batch_size=1).reasons == (
        "batch norm: 1 uses the statistics of each micro-batch, not of the whole batch",
    )
