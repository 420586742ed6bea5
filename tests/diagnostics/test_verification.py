"""Comparison of the split with the plain program: equality, errors, and the known reasons for a difference."""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net, class_targets
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, Rows, Whole, convert_sync_batchnorm, verify
from balanced_parallel.diagnostics.loss_parts import scalar_of
from balanced_parallel.diagnostics.mismatch import _random_layers
from balanced_parallel.diagnostics.module_recording import relative_error

CPUS = ["cpu"] * 3

pytestmark = pytest.mark.usefixtures("double")


def check(model, criterion=None, rows=7, **settings):
    return verify(
        model, criterion or nn.CrossEntropyLoss(), torch.randn(rows, 4), class_targets(rows, 2), device_ids=CPUS, **settings
    )


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_an_exact_program_is_reported_as_equal(micro_batch_size):
    net = build_net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    report = check(net, micro_batch_size=micro_batch_size)
    assert report.equal
    assert report.loss_error <= 1e-10
    assert set(report.gradient_errors) == {name for name, _ in net.named_parameters()}
    assert max(report.gradient_errors.values()) <= 1e-10
    assert report.first_difference is None
    assert report.reasons == ()
    assert report.micro_batches == (1 if micro_batch_size is None else 3)
    assert "equal within 1e-10: 3 replicas (cpu, cpu, cpu)" in str(report)
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_verify_restores_the_random_state():
    net, x, target = nn.Sequential(nn.Dropout(), nn.Linear(4, 5)), torch.randn(7, 4), class_targets(7)
    before = torch.get_rng_state()
    verify(net, nn.CrossEntropyLoss(), x, target, device_ids=CPUS)
    assert torch.equal(torch.get_rng_state(), before)


class ReadsTF32(nn.Module):
    """A layer that records in forward and backward what CUDA would compute products with."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 5), set()

    def forward(self, x):
        output = self.layer(x)
        output.register_hook(lambda _: self.read())
        self.read()
        return output

    def read(self):
        self.seen.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

    def __deepcopy__(self, memo):
        return self  # so that the record is that of the copies


def test_float32_is_compared_without_tf32():
    assert torch.backends.cudnn.allow_tf32  # torch's default
    net = ReadsTF32().float()
    report = verify(net, nn.CrossEntropyLoss(), torch.randn(7, 4).float(), class_targets(7), device_ids=CPUS)
    assert report.equal
    assert net.seen == {(False, False)}
    assert torch.backends.cudnn.allow_tf32


def test_settings_of_a_wrapped_criterion_are_used():
    def loss(output, target):
        return F.cross_entropy(output, target)

    criterion = DataParallelCriterion(loss, weight=lambda output, target: (target != -100).sum())
    report = verify(DataParallelModel(build_net(), CPUS), criterion, torch.randn(7, 4), class_targets(7, 4))
    assert report.equal
    assert len(report.devices) == 3


def test_the_split_of_a_wrapped_model_is_used():
    model = DataParallelModel(build_net(), CPUS, split=[3, 0, 1])
    report = verify(model, nn.CrossEntropyLoss(), torch.randn(9, 4), class_targets(9), micro_batch_size=2)
    assert report.equal
    assert report.micro_batches == 3  # the first device has three quarters of the rows


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


def contrastive_loss(output, target):
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


@pytest.mark.parametrize("criterion", [contrastive_loss, lambda output, target: contrastive_loss(output, target)])
def test_a_loss_that_couples_rows_is_reported_as_a_reason(criterion):
    report = check(build_net(), criterion)
    assert not report.equal
    assert report.first_difference is None
    assert [reason.split(":")[0] for reason in report.reasons] == ["the loss"]
    assert "criterion(gather(outputs), targets)" in report.reasons[0]


class RoundedOutput(nn.Module):
    """A module whose output depends on the number of rows, with relative differences of the size of float32."""

    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, x):
        return self.net(x) * (1 + 1e-8 * len(x))


def test_rounding_to_float32_is_reported_as_a_reason():
    assert check(RoundedOutput()).reasons == (
        "rounding: the errors are of the size of float32; a part of the model or of the loss may cast to float32",
    )


def test_the_relative_error_of_one_nan_is_infinite():
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert relative_error(nan, one) == relative_error(one, nan) == float("inf")
    assert relative_error(nan, nan) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0]), one) == 0.5


def test_a_wrong_weight_is_reported_as_a_reason():
    criterion = functools.partial(F.cross_entropy)
    assert "give DataParallelCriterion weight=" in " ".join(
        check(build_net(), criterion, weight=lambda output, target: len(target)).reasons
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


def test_state_written_in_forward_is_reported_as_a_reason():
    report = check(Stateful())
    assert not report.equal
    assert report.first_difference.startswith("the model (Stateful)")
    assert report.reasons == (
        "state written in forward: calls; all replicas but the first lose it",
        "state written in forward: seen; all replicas but the first lose it",
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


def test_gradients_of_a_criterion_are_compared():
    criterion = nn.AdaptiveLogSoftmaxWithLoss(5, 5, [2], div_value=1.0)
    report = verify(build_net(), criterion, torch.randn(7, 4), class_targets(7), device_ids=CPUS)
    assert report.equal
    assert any(name.startswith("criterion.") for name in report.gradient_errors)


def test_the_default_tolerance_follows_the_dtype():
    torch.set_default_dtype(torch.float32)
    report = check(build_net())
    assert report.tolerance == 1e-4
    assert report.equal
    assert check(build_net(), tolerance=0.0).tolerance == 0.0


# Losses that are sums, means over something other than rows, or whose rows depend on each other


def variational_loss(output, target):
    cross = F.binary_cross_entropy_with_logits(output, target, reduction="sum")
    return cross + 0.5 * torch.sum(output.pow(2))


def mean_of_few(output, target):
    counted = target > 1
    return F.cross_entropy(output[counted], target[counted], reduction="sum") / counted.sum()


def reasons_of(criterion, rows=9, targets=None, **settings):
    targets = class_targets(rows) if targets is None else targets
    return verify(build_net(), criterion, torch.randn(rows, 4), targets, device_ids=CPUS, **settings).reasons


def test_a_sum_without_reduction_is_reported_as_a_reason():
    (reason,) = reasons_of(variational_loss, targets=torch.rand(9, 5))
    assert reason == 'the loss is a sum (its parts add up to the whole): give DataParallelCriterion reduction="sum"'


def test_weighted_means_are_distinguished_from_losses_that_couple_rows():
    (reason,) = reasons_of(mean_of_few)
    assert reason == (
        "the loss is a mean, but not over rows: give DataParallelCriterion weight=, a function (output, *targets) -> scalar that "
        "returns the divisor"
    )
    assert reasons_of(mean_of_few, weight=lambda output, target: (target > 1).sum()) == ()
    (reason,) = reasons_of(contrastive_loss)
    assert reason == (
        "the loss: its rows depend on each other, so it cannot be computed in parts: compute it as "
        "criterion(gather(outputs), targets)"
    )


def test_a_mean_over_rows_with_a_wrong_weight_is_reported_as_a_reason():
    def loss(output, target):
        return F.cross_entropy(output, target)

    (reason,) = reasons_of(loss, weight=lambda output, target: (target + 1).sum())
    assert reason == 'the loss is a mean over rows: give DataParallelCriterion weight="rows"'


def test_a_loss_that_two_rows_cannot_classify_names_both_fixes():
    (reason,) = reasons_of(contrastive_loss, rows=2)
    assert reason.startswith("the loss: computed in parts it differs from the loss of the whole batch, so ")
    assert "criterion(gather(outputs), targets)" in reason
    assert "weight=" in reason


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


def test_an_equal_program_runs_two_steps():
    report = check(build_net())
    assert report.equal
    assert report.step == 2


# Rows in another dimension, and other programs


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.output = nn.LSTM(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.output(self.lstm(x)[0])


def flat_loss(output, target):
    return F.cross_entropy(output.reshape(-1, 5), target.reshape(-1))


def time_major(rows=7):
    return TimeMajor(), torch.randn(3, rows, 4), torch.randint(5, (3, rows))


def test_programs_with_rows_in_dimension_1_are_equal():
    net, inputs, targets = time_major()

    def kept(output, target):
        return target.numel()

    settings = {"device_ids": CPUS, "dim": 1, "weight": kept}
    assert verify(net, flat_loss, inputs, targets, **settings).equal
    report = verify(net, flat_loss, inputs, targets, micro_batch_size=1, **settings)
    assert report.equal
    assert report.micro_batches == 3
    wrapped = DataParallelModel(net, CPUS, dim=1), DataParallelCriterion(flat_loss, dim=1, weight=kept)
    assert verify(*wrapped, inputs, targets).equal


def test_reasons_are_found_with_rows_in_dimension_1():
    net, inputs, targets = time_major()

    def total(output, target):
        return flat_loss(output, target) * target.numel()

    report = verify(net, total, inputs, targets, device_ids=CPUS, dim=1)
    assert report.first_difference is None
    (reason,) = report.reasons
    assert reason.startswith("the loss is a sum")


def test_the_first_difference_is_found_with_rows_in_dimension_1():
    net, inputs, targets = time_major()
    net.output = nn.Sequential(nn.Dropout(0.5), net.output)
    report = verify(net, flat_loss, inputs, targets, device_ids=CPUS, dim=1)
    assert report.first_difference.startswith("output.0 (Dropout): relative error")


def test_errors_of_a_criterion_on_parts_are_ignored():
    def picky(output, target):
        if len(output) < 3:
            raise ZeroDivisionError("too few rows")
        return contrastive_loss(output, target)

    report = verify(build_net(), picky, torch.randn(9, 4), class_targets(9), device_ids=CPUS)
    assert not report.equal


def test_sync_batch_norm_is_a_reason_in_micro_batches_only():
    net = nn.Sequential(nn.Linear(4, 6), convert_sync_batchnorm(nn.BatchNorm1d(6)), nn.Linear(6, 5))
    assert all(reason.startswith("the loss") for reason in check(net, contrastive_loss).reasons)
    assert check(net, micro_batch_size=1).reasons == (
        "batch norm: 1 uses the statistics of each micro-batch, not of the whole batch",
    )


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels), "labels": labels}


def test_a_model_that_computes_its_loss_needs_no_targets():
    inputs = {"x": torch.randn(7, 4), "labels": class_targets(7)}
    settings = {"device_ids": CPUS, "weight": lambda output: len(output["labels"])}
    report = verify(OwnLoss(), lambda output: output["loss"], inputs, **settings)
    assert report.equal
    assert "labels" not in report.gradient_errors


def test_the_loss_of_several_terms_is_their_sum():
    Record = collections.namedtuple("Record", ["output", "loss"])
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert scalar_of(one) is one
    assert scalar_of(Record(one, two)) is two
    assert scalar_of((one, two)) == 3
    assert scalar_of({"a": one, "b": {"c": two}}) == 3
    with pytest.raises(TypeError, match="returned str 'x', expected a scalar or several"):
        scalar_of("x")


def test_the_table_has_the_ten_largest_errors():
    report = check(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 5)), contrastive_loss)
    lines = str(report).splitlines()
    assert sum("<-" in line for line in lines) == 1 + 10  # the loss, and ten gradients
    assert "... and 10 more" in lines
    assert len(report.gradient_errors) == 20


class Clips(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, clips, scale):
        return torch.stack([self.net(clip).mean(0) * scale for clip in clips])


def two_means(output, target):
    some = target.sum(1) > 2.5
    return {"all": F.mse_loss(output, target), "some": output[some].pow(2).sum() / some.sum().clamp(min=1)}


def counts(output, target):
    return {"all": len(target), "some": (target.sum(1) > 2.5).sum()}


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_settings_of_the_wrappers_are_used_in_the_split_program(double, micro_batch_size):
    x, target, clips = torch.randn(11, 4), torch.rand(11, 5), [torch.randn(length, 4) for length in range(1, 12)]
    several = DataParallelCriterion(two_means, weight=counts, minimum=1)
    assert verify(DataParallelModel(build_net(), CPUS), several, x, target, micro_batch_size=micro_batch_size).equal
    whole = DataParallelModel(Clips(), CPUS, in_dims={"scale": None})
    for model, scale in ((whole, torch.rand(5)), (DataParallelModel(Clips(), CPUS), Whole(torch.rand(5)))):
        report = verify(model, nn.MSELoss(), (Rows(clips), scale), target, micro_batch_size=micro_batch_size)
        assert report.equal, report

    def flat_loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    x, target = torch.randn(5, 11, 4), torch.randint(5, (5, 11))
    explicit = DataParallelCriterion(flat_loss, in_dims=(1, 1), weight="rows")
    for model, criterion in (
        (DataParallelModel(build_net(), CPUS, dim=1), flat_loss),
        (DataParallelModel(build_net(), CPUS, in_dims=1, out_dims=1), explicit),
    ):
        report = verify(model, criterion, x, target, micro_batch_size=micro_batch_size)
        assert report.equal, report
