"""Known reasons for a difference: layers that mix rows, random layers, state, fixed devices.

Models that compute their own loss of several parts. One count for all of it is named, and the advice of the page is exact.

Models whose forward mixes the rows of a batch, or changes their order.

Random numbers of the model and of the loss, with and without modules of dropout.

State that does not change the loss: buffers make a difference, numbers and unregistered layers a warning.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net
from helpers.verification import CPUS, check, contrastive_loss
from torch import nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from balanced_parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, verify

WRITTEN = "each replica and micro-batch writes it, from its own rows, and that of the first replica is kept"
MIXED = (
    "the output of a row depends on the other rows of its batch, or rows are in another order: move this part into the "
    "criterion, with whole=True if rows are mixed; for a batch norm use convert_sync_batchnorm(module); for rows in another "
    "dimension give dim="
)


@pytest.mark.usefixtures("double")
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


@pytest.mark.usefixtures("double")
def test_dropout_is_reported_as_a_reason():
    report = check(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5)))
    assert report.first_difference.startswith("1 (Dropout)")
    assert report.reasons == (
        "random numbers: the model draws them, in 1 (Dropout), or between it and 0 (Linear): compare with reproducible=True, or "
        "in eval mode",
    )


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


@pytest.mark.usefixtures("double")
def test_state_written_in_forward_is_reported_as_a_reason():
    report = check(Stateful())
    assert not report.equal
    assert report.first_difference.startswith("the model (Stateful)")
    assert report.reasons == (
        f"state written in forward: calls; {WRITTEN}",
        f"state written in forward: seen; {WRITTEN}",
        f"state written in forward: total; {WRITTEN}",
    )


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


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("kind", "what", "step"),
    [
        (Centering, "center", 2),
        (PlainCentering, "center", 1),
    ],  # all replicas share a PlainCentering, so it differs in the first step
)
def test_state_written_by_the_criterion_is_reported_as_a_reason(kind, what, step):
    criterion = kind()
    report = check(build_net(), criterion, weight=lambda output, target: (target != -100).sum())
    assert not report.equal
    assert report.step == step
    assert report.reasons == (f"state written by the criterion: {what}; {WRITTEN}",)
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


@pytest.mark.usefixtures("double")
def test_state_that_shows_in_the_second_step_is_reported_as_a_reason():
    report = check(StatefulInTheSecondStep())
    assert report.step == 2
    assert report.first_difference.startswith("the model (StatefulInTheSecondStep)")
    assert report.reasons == (f"state written in forward: seen; {WRITTEN}",)


@pytest.mark.usefixtures("double")
def test_sync_batch_norm_is_a_reason_in_micro_batches_only():
    net = nn.Sequential(nn.Linear(4, 6), convert_sync_batchnorm(nn.BatchNorm1d(6)), nn.Linear(6, 5))
    assert all(reason.startswith("the loss") for reason in check(net, contrastive_loss).reasons)
    assert check(net, micro_batch_size=1).reasons == (
        "batch norm: 1 uses the statistics of each micro-batch, not of the whole batch",
    )


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "num_key_value_heads": 1}
WORDS = torch.randint(40, (7, 9), generator=torch.Generator().manual_seed(0))
LABELS = WORDS.where(torch.arange(9) < torch.tensor([[9], [2], [3], [5], [9], [2], [3]]), -100)
STARTS, ENDS = torch.tensor([1, 2, 50, 60, 3, 9, 9]), torch.tensor([5, 4, 77, 60, 6, 2, 9])  # from 9 on, they are ignored


def own_loss(out, *targets):
    return out.loss


def count_next_words(out, labels):
    return (labels[:, 1:] != -100).sum()


def mixtral():
    net = MixtralForCausalLM(MixtralConfig(**SIZES, **ROUTERS, num_local_experts=4))
    return net, {"labels": LABELS}, count_next_words


def qwen2_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    net = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **ROUTERS, **experts))
    return net, {"labels": LABELS}, count_next_words


def question_answering():
    return BertForQuestionAnswering(BertConfig(**SIZES)), {"start_positions": STARTS, "end_positions": ENDS}, "rows"


def pretraining():
    def count(out, labels, following):
        return (labels != -100).sum()

    targets = {"labels": LABELS, "next_sentence_label": torch.tensor([0, 1, 1, 0, 1, 0, 0])}
    return BertForPreTraining(BertConfig(**SIZES)), targets, count


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, question_answering, pretraining])
def test_one_count_for_a_loss_of_several_parts_is_named(make):
    torch.manual_seed(0)
    net, targets, weight = make()
    criterion = DataParallelCriterion(own_loss, weight=weight)
    report = verify(net.eval(), criterion, {"input_ids": WORDS, **targets}, tuple(targets.values()), device_ids=CPUS)
    assert not report.equal
    assert report.reasons == (
        "the model computes its own loss, whose divisor is unknown or is not weight=: give DataParallelCriterion weight=, a "
        "function (output, *targets) -> scalar that returns the divisor of its mean, and pass the targets to the criterion too; "
        "compute a loss of several parts, such as one with a router loss, in the criterion (docs/huggingface.md)",
    )


def test_question_answering_with_one_count_is_exact_where_it_counts_both():
    torch.manual_seed(0)
    net, targets, _ = question_answering()
    targets = {"start_positions": STARTS, "end_positions": STARTS}
    criterion = DataParallelCriterion(own_loss, weight=lambda out, starts, ends: (starts < 9).sum())
    report = verify(net.eval(), criterion, {"input_ids": WORDS, **targets}, tuple(targets.values()), device_ids=CPUS)
    assert report.equal, report


def test_outputs_that_hooks_of_the_first_forward_capture_come_once():
    torch.manual_seed(0)
    net, _, _ = mixtral()  # transformers registers hooks when an output is first asked for
    model = DataParallelModel(net, CPUS)
    for _ in range(2):
        assert [len(out.router_logits) for out in model(WORDS)] == [2, 2, 2]
    assert len(net.model.layers[0].mlp.gate._forward_hooks) == 1
    plain, split = net(WORDS, output_hidden_states=True), model(WORDS, output_hidden_states=True)
    for expected, found in zip(plain.hidden_states, split.hidden_states.gather(), strict=True):
        torch.testing.assert_close(found, expected)


class Mixing(nn.Module):
    """Two layers with a function of all rows between them."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(4, 6), nn.Linear(6, 5), mix

    def forward(self, x):
        self.last = self.mix(self.first(x))  # state that no forward reads
        return self.second(self.last)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "mix", [lambda x: x.softmax(0), lambda x: x - x.mean(0), lambda x: x.sort(0).values], ids=["softmax", "mean", "sort"]
)
def test_rows_mixed_in_forward_are_a_reason(mix):
    report = check(nn.Sequential(nn.Identity(), Mixing(mix)), device_ids=["cpu"], micro_batch_size=3)
    (reason,) = [reason for reason in report.reasons if "rows" in reason and "state" not in reason]
    assert reason == f"forward mixes rows, in 1.second (Linear), or between it and 1.first (Linear): {MIXED}"
    assert report.first_difference.startswith("1.second (Linear): relative error")


class HiddenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norms = build_net(), [nn.BatchNorm1d(5)]

    def forward(self, x):
        return self.norms[0](self.net(x))


@pytest.mark.usefixtures("double")
def test_a_batch_norm_that_is_not_registered_mixes_rows():
    report = check(HiddenNorm())
    assert any(
        reason.startswith("forward mixes rows, in the model (HiddenNorm), or between it and net ") for reason in report.reasons
    )


class FlatTimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, x):
        return self.net(x).transpose(0, 1).flatten(0, 1)


@pytest.mark.usefixtures("double")
def test_rows_in_another_order_are_a_reason():
    inputs, targets = torch.randn(7, 3, 4), torch.randint(5, (21,))
    report = verify(FlatTimeMajor(), nn.CrossEntropyLoss(), inputs, targets, device_ids=CPUS)
    assert report.reasons == (f"forward mixes rows, in the model (FlatTimeMajor), or between it and net (Sequential): {MIXED}",)


@pytest.mark.usefixtures("double")
def test_rows_are_not_blamed_for_dropout_or_the_loss():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 5))
    assert [reason.split(":")[0] for reason in check(net).reasons] == ["batch norm", "random numbers"]
    net[2] = nn.BatchNorm1d(6, track_running_stats=False)
    assert [reason.split(":")[0] for reason in check(net).reasons] == ["batch norm", "random numbers"]


class Noisy(nn.Module):
    """Two layers with random numbers between them."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 6), nn.Linear(6, 5), draw

    def forward(self, x):
        return self.second(self.draw(self, self.first(x)))


def dropout(layer, x):
    return F.dropout(x, 0.3, layer.training)


def noise(layer, x):
    return x + 0.1 * torch.randn_like(x)


@pytest.mark.usefixtures("double")
def test_random_numbers_in_forward_are_a_reason():
    report = check(Noisy(dropout))
    assert report.reasons == (
        "random numbers: the model draws them, in second (Linear), or between it and first (Linear): compare with "
        "reproducible=True, or in eval mode",
    )
    assert check(Noisy(dropout).eval()).equal
    for model in (Noisy(noise), Noisy(noise).eval(), nn.Sequential(nn.Dropout(), Noisy(noise))):
        (reason,) = check(model).reasons
        assert reason.startswith("random numbers: the model draws them, in ")
        assert reason.endswith(": compare with reproducible=True, or without them")


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


@pytest.mark.usefixtures("double")
def test_a_buffer_that_keeps_the_rows_of_one_replica_is_a_difference():
    report = check(nn.Sequential(Counting(counts_rows=True)))
    assert not report.equal
    assert max(report.loss_error, *report.gradient_errors.values()) <= 1e-10
    assert report.state_errors == {"0.rows": pytest.approx(4 / 7)}  # the first of three replicas has three of seven rows
    assert "\nstate 0.rows " in str(report)
    assert report.reasons == tuple(f"state written in forward: 0.{name}; {WRITTEN}" for name in ("forwards", "log", "rows"))
    assert report.warnings == ()


@pytest.mark.usefixtures("double")
def test_a_number_that_differs_is_a_warning():
    model = Counting(counts_rows=False)
    assert check(model).warnings == ()
    report = check(model, device_ids=["cpu"], micro_batch_size=3)
    assert report.equal
    assert report.warnings == (f"forwards is 6 after the split steps, 2 after the plain ones: {WRITTEN}",)
    assert f"warning: {report.warnings[0]}" in str(report)


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, output, target):
        self.rows += len(output)
        return F.mse_loss(output, F.one_hot(target.clamp(min=0), 5).to(output))


@pytest.mark.usefixtures("double")
def test_a_buffer_of_the_criterion_is_a_difference():
    report = check(build_net(), CountingLoss(), weight="rows")
    assert list(report.state_errors) == ["criterion.rows"]
    assert report.reasons == (f"state written by the criterion: rows; {WRITTEN}",)


@pytest.mark.usefixtures("double")
def test_buffers_of_batch_norms_are_reported_once():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    assert check(net).state_errors == {}
    assert check(convert_sync_batchnorm(net)).equal


class Drifting(Counting):
    """Scales its output by one plus a small multiple of the rows it has seen."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-8 * self.rows)


@pytest.mark.usefixtures("double")
def test_state_with_a_small_effect_is_not_taken_for_rounding():
    report = check(Drifting(counts_rows=True))
    assert 1e-10 < report.loss_error < 1e-5
    assert all(reason.startswith("state written in forward: ") for reason in report.reasons)
