"""Known reasons for a difference: layers that mix rows, random numbers of the model and of the loss, state, losses of models."""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import Calls
from helpers.problems import build_net
from helpers.trainers import make_model, make_rows, pad
from helpers.verification import CPUS, check
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    verify,
)

WRITTEN = (
    "each replica and micro-batch writes it, from its own rows, and that of the first replica is kept: compute it from "
    "the result of a SumOverRows, which adds up the rows of all replicas and ranks"
)
MIXED = (
    "the output of a row depends on the other rows of its batch, or rows are in another order: move this part into the "
    "criterion, with whole=True if rows are mixed; for a batch norm use convert_sync_batchnorm(module), unless it takes chunks "
    "of the rows (ghost batch norm), which depend on the layout; for rows in another dimension give DataParallelModel dim="
)
OF_MICRO_BATCH = "batch norm: 1 uses the statistics of each micro-batch, not of the whole batch"


def layers(middle):
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 5))


@pytest.mark.usefixtures("double")
def test_batch_norm_is_reported_as_a_reason():
    net = layers(nn.BatchNorm1d(6))
    report = check(net)
    assert not report.equal
    assert report.first_difference.startswith("1 (BatchNorm1d): relative error")
    assert report.reasons == (
        "batch norm: 1 uses the statistics of the rows of each replica: use convert_sync_batchnorm(module), or a norm that does "
        "not mix rows",
    )
    assert report.state_errors == {}
    text = str(report)
    assert "DIFFERENT" in text
    assert "0.weight" in text
    assert "<-" in text
    assert check(convert_sync_batchnorm(net)).equal
    assert check(net, micro_batch_size=1).reasons == (OF_MICRO_BATCH,)


@pytest.mark.usefixtures("double")
def test_sync_batch_norm_is_a_reason_in_micro_batches_only():
    net = layers(convert_sync_batchnorm(nn.BatchNorm1d(6)))
    assert check(net).equal
    assert check(net, micro_batch_size=1).reasons == (OF_MICRO_BATCH,)


class Stateful(nn.Module):
    """A module that runs a function of itself and of its inputs, which writes state."""

    def __init__(self, function):
        super().__init__()
        self.net = build_net()
        self.function = function
        self.register_buffer("total", torch.zeros(()))
        self.key = nn.Linear(4, 6)

    def forward(self, x):
        return self.function(self, x)


def write_all(module, x):
    module.total += x.sum()
    return module.net(x) * module.total


def scale_by_earlier_rows(module, x):
    before = module.total.clone()
    module.total.add_(x.sum())
    return module.net(x) * (1 + before)


def drift(module, x):
    module.total += len(x)
    return module.net(x) * (1 + 1e-8 * module.total)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("function", "step"), [(write_all, 1), (scale_by_earlier_rows, 2), (drift, 1)]
)
def test_state_written_in_forward_is_the_only_reason(function, step):
    """Also where it shows in the second step alone, and where its effect is as small as rounding."""
    report = check(Stateful(function))
    assert not report.equal
    assert report.step == step
    assert report.first_difference.startswith("the model (Stateful)")
    reasons = [
        reason
        for reason in report.reasons
        if not reason.startswith("forward mixes rows, in the model (Stateful)")
    ]
    assert reasons == [f"state written in forward: total; {WRITTEN}"]
    assert f"loss in step {step}" in str(report)


def count_rows(module, x):
    module.total += len(x)
    return module.net(x)


@pytest.mark.usefixtures("double")
def test_a_buffer_that_keeps_the_rows_of_one_replica_is_a_difference():
    report = check(nn.Sequential(Stateful(count_rows)))
    assert not report.equal
    assert max(report.loss_error, *report.gradient_errors.values()) <= 1e-10
    assert report.state_errors == {
        "0.total": pytest.approx(4 / 7)
    }  # the first of three replicas has three of seven rows
    assert "\nstate 0.total " in str(report)
    assert report.reasons == (f"state written in forward: 0.total; {WRITTEN}",)
    assert report.warnings == ()


def follow(module, x):
    with torch.no_grad():
        module.key.weight.lerp_(module.net[0].weight, 0.5)
    return module.net(x)


@pytest.mark.usefixtures("double")
def test_parameters_that_the_forward_writes_are_compared():
    report = check(Stateful(follow), device_ids=["cpu"], micro_batch_size=3)
    assert report.equal
    assert not report.state_errors


class Centering(nn.Module):
    """A loss with state, as in DINO: it subtracts a running mean of earlier outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, output, target):
        loss = F.cross_entropy(output - self.center, target)
        self.center = 0.5 * self.center + 0.5 * output.detach().mean(0)
        return loss


class CountingLoss(Centering):
    """Counts rows, and adds nothing to the loss."""

    def forward(self, output, target):
        self.center += len(output)
        return F.cross_entropy(output, target)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", [Centering, CountingLoss])
def test_state_written_by_the_criterion_is_reported_as_a_reason(kind):
    criterion = kind()
    losses = DataParallelCriterion(criterion, weight=lambda output, target: (target != -100).sum())
    report = check(build_net(), losses)
    assert not report.equal
    assert report.step == 2
    assert list(report.state_errors) == ["criterion.center"]
    assert report.reasons == (f"state written by the criterion: center; {WRITTEN}",)
    assert torch.equal(criterion.center, torch.zeros(5))


def count_words(out, labels, *others):
    return (labels[:, 1:] != -100).sum()


def with_own_loss(head, weight, **targets):
    """Returns a model that computes its loss, a criterion, the inputs and the targets."""
    batch = pad(make_rows(head, 7)) | targets
    targets = tuple(
        value for name, value in batch.items() if name not in ("input_ids", "attention_mask")
    )
    return (
        make_model(head).eval(),
        DataParallelCriterion(lambda out, *targets: out.loss, weight=weight),
        batch,
        targets,
    )


@pytest.mark.parametrize(
    ("head", "weight"), [("routers", count_words), ("answers", "rows"), ("sentences", count_words)]
)
def test_one_count_for_a_loss_of_several_parts_is_named(head, weight):
    report = verify(*with_own_loss(head, weight), device_ids=CPUS)
    assert not report.equal
    assert report.reasons == (
        "the model computes its own loss, whose divisor is not weight=: give DataParallelCriterion a function of the output "
        "alone, as lambda output: output.loss, without weight= and targets; or the divisor of its mean as weight=; compute a "
        "loss of several parts, as with a router loss, in the criterion (docs/recipes/transformers.md)",
    )


def test_question_answering_with_one_count_is_exact_where_it_counts_both():
    places = torch.tensor([1, 2, 50, 60, 3, 9, 8])  # from 9 on, they are ignored
    program = with_own_loss(
        "answers",
        lambda out, starts, ends: (starts < 9).sum(),
        start_positions=places,
        end_positions=places,
    )
    report = verify(*program, device_ids=CPUS)
    assert report.equal, report


def test_outputs_that_hooks_of_the_first_forward_capture_come_once():
    net = make_model("routers")
    words = pad(make_rows("routers", 7))["input_ids"]
    model = DataParallelModel(net, CPUS)
    for _ in range(2):  # transformers registers hooks when an output is first asked for
        assert [len(out.router_logits) for out in model(words)] == [2, 2, 2]
    assert len(net.model.layers[0].mlp.gate._forward_hooks) == 1
    plain = net(words, output_hidden_states=True)
    split = model(words, output_hidden_states=True)
    for expected, found in zip(plain.hidden_states, split.hidden_states.gather(), strict=True):
        torch.testing.assert_close(found, expected)


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 5)
        self.function = function

    def forward(self, x):
        self.last = self.function(self, self.first(x))  # an attribute that no forward reads
        return self.second(self.last)


PLACE = "second (Linear), or between it and first (Linear)"


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "mix", [lambda _, x: x.softmax(0), lambda _, x: x - x.mean(0), lambda _, x: x.sort(0).values]
)
def test_rows_mixed_in_forward_are_a_reason(mix):
    report = check(Between(mix), device_ids=["cpu"], micro_batch_size=3)
    assert report.reasons == (f"forward mixes rows, in {PLACE}: {MIXED}",)
    assert report.first_difference.startswith("second (Linear): relative error")


@pytest.mark.usefixtures("double")
def test_rows_in_another_order_are_a_reason():
    inputs = torch.randn(7, 3, 4)
    targets = torch.randint(5, (21,))
    net = Calls(lambda net, x: net(x).transpose(0, 1).flatten(0, 1))
    report = verify(net, nn.CrossEntropyLoss(), inputs, targets, device_ids=CPUS)
    assert report.reasons == (
        f"forward mixes rows, in the model (Calls), or between it and net (Sequential): {MIXED}",
    )


@pytest.mark.usefixtures("double")
def test_rows_are_not_blamed_for_dropout_or_the_loss():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 5))
    for norm in (net[2], nn.BatchNorm1d(6, track_running_stats=False)):
        net[2] = norm
        reasons = [reason.split(":")[0] for reason in check(net).reasons]
        assert reasons == ["batch norm", "random numbers"]


def dropout(module, x):
    return F.dropout(x, 0.3, module.training)


def noise(module, x):
    return x + 0.1 * torch.randn_like(x)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("net", "place", "other"),
    [
        (layers(nn.Dropout(0.5)), "1 (Dropout), or between it and 0 (Linear)", "in eval mode"),
        (Between(dropout), PLACE, "in eval mode"),
        (Between(noise), PLACE, "without them"),
        (
            nn.Sequential(nn.Dropout(), Between(noise)),
            "0 (Dropout), or between it and the inputs",
            "without them",
        ),
    ],
)
def test_random_numbers_in_forward_are_a_reason(net, place, other):
    net = net.double()
    reason = f"random numbers: the model draws them, in {place}: compare with reproducible=True, or {other}"
    assert check(net).reasons == (reason,)
    report = check(net.eval())
    assert report.equal == (other == "in eval mode")


def noisy_loss(output, target):
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("settings", [{"weight": "rows"}, {"whole": True}])
def test_random_numbers_of_the_loss_are_the_only_reason(settings):
    report = check(build_net(), DataParallelCriterion(noisy_loss, **settings))
    assert report.reasons == (
        "random numbers: the loss draws them, because the same output gives another loss: compare with reproducible=True, or "
        "without them",
    )
