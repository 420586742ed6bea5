"""Static checks: faults of a model are found without running it, and correct models have no findings."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from balanced_parallel import DataParallelModel, convert_sync_batchnorm
from balanced_parallel.diagnostics.doctor import examine, is_note


def only(findings):
    (finding,) = findings
    return finding


class Correct(nn.Module):
    """A module with writes that are correct under replicas."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = type("Config", (), {})()
        self.register_buffer("scale", torch.ones(3))
        self.names = ["a"]

    def forward(self, x):
        x = self.linear(x).relu_()
        x.add_(1)
        outputs = []
        outputs.append(self.scale.add(1))
        self.config.kind = "x"
        y = x.new_zeros(3) + torch.zeros(3, device=x.device)
        return self._tail(x) + y + outputs[0]

    def _tail(self, x):
        tail: int = len(self.names)
        return F.dropout(x, 0.5) * tail


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_correct_models_have_no_findings(device):
    with torch.device(device):
        module = nn.Sequential(
            Correct(),
            nn.Dropout(0.1),
            nn.LayerNorm(3),
            nn.TransformerEncoderLayer(3, 1, 4),
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        )
    assert examine(module) == ()
    assert examine(module, nn.CrossEntropyLoss(ignore_index=0)) == ()
    assert examine(module, functools.partial(F.mse_loss, reduction="sum")) == ()


def test_batch_norms_are_found_unless_converted_or_in_eval_mode():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    finding = only(examine(module))
    assert finding.startswith("batch norm: 1, 2.0: ")
    assert "convert_sync_batchnorm(module)" in finding
    assert "a single row has none" in finding
    assert examine(module.eval()) == ()
    assert examine(convert_sync_batchnorm(module.train())) == ()


def test_many_batch_norms_are_one_finding():
    assert "0, 1, 2 and 47 more" in only(examine(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(50)))))


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(2, 3))
        self.kept = []
        self.cache = {}

    def forward(self, x):
        self.steps += 1
        self.mean.mul_(0.9)
        self.queue[0] = x.mean(0)
        torch.add(x.mean(0), 1, out=self.mean)
        self.first, y = x, x
        self.kept.append(y)
        self.cache["x"] = y
        setattr(self, "name", 3)  # noqa: B010
        return self.remember(y)

    def remember(self, y):
        self.last: object = y
        return y

    def elsewhere(self):
        self.never = 1


@pytest.mark.parametrize(
    ("written", "effect"),
    [
        ("self.steps += 1 in forward of 0 (Stateful)", "all replicas but the first lose it"),
        ("self.mean.mul_(0.9)", "all replicas but the first lose it"),
        ("self.queue[0] = x.mean(0)", "all replicas but the first lose it"),
        ("torch.add(x.mean(0), 1, out=self.mean)", "all replicas but the first lose it"),
        ("self.first, y = (x, x)", "all replicas but the first lose it"),
        ("self.kept.append(y)", "all replicas write to the same object"),
        ("self.cache['x'] = y", "all replicas write to the same object"),
        ("setattr(self, 'name', 3)", "all replicas but the first lose it"),
        ("self.last: object = y in remember of 0 (Stateful)", "all replicas but the first lose it"),
    ],
)
def test_state_written_in_forward_is_found_in_its_source(written, effect):
    findings = examine(nn.Sequential(Stateful(), Stateful()))
    assert len(findings) == 9  # one per class, not per module
    finding = only(one for one in findings if one.startswith(f"state written in forward: {written}"))
    assert f"{effect}" in finding


def test_replicas_treat_written_state_as_the_findings_say():
    module = Stateful()
    DataParallelModel(module, ["cpu"] * 3)(torch.ones(6, 3))
    assert module.steps == 1  # of three
    assert len(module.kept) == 3


class Fixed(nn.Module):
    def forward(self, x):
        return x.to("cuda:0") + torch.zeros(3) + torch.ones(3, device="cuda") + x.cuda()


def test_fixed_devices_in_forward_are_found():
    findings = examine(Fixed())
    assert len(findings) == 4
    assert all(finding.startswith("a fixed device in forward: ") for finding in findings)


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.ones(3)
        self.layers = [nn.Linear(3, 3)]
        self.weights = {"a": nn.Parameter(torch.ones(3))}
        self.scale = torch.ones(3, requires_grad=True)
        self.same = [self.linear, self.linear.weight]

    def forward(self, x):
        return self.linear(x)


def test_unregistered_tensors_and_modules_are_found():
    mask, layers, weights, scale = examine(nn.Sequential(Unregistered()))
    assert "mask of 0 (Unregistered) holds tensors" in mask
    assert "register_buffer" in mask
    assert "nn.ModuleList" in layers
    assert "nn.ParameterDict" in weights
    assert scale == "unregistered: scale of 0 (Unregistered) holds tensors that require gradients: use nn.Parameter"


def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit.script"):  # the second in torch 2.15
        return torch.jit.script(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("make", "where", "what"),
    [
        (scripted, "1: ", "cannot be replicated"),
        (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "1: OptimizedModule", "without torch.compile"),
    ],
)
def test_modules_that_cannot_be_replicated_are_found(make, where, what):
    finding = only(examine(nn.Sequential(nn.ReLU(), make())))
    assert finding.startswith(f"weights: {where}")
    assert what in finding


def test_lazy_parameters_are_found():
    weight, bias = examine(nn.Sequential(nn.LazyLinear(3)))
    assert weight.startswith("weights: weight of 0 (LazyLinear) is not initialised yet: run the model once")
    assert "bias of 0" in bias


def test_weights_on_several_devices_are_found():
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="cpu:1"))
        assert "they are on cpu, cpu:1: move the model to one device" in only(examine(module))


class ContrastiveLoss(nn.Module):
    def forward(self, output, target):
        return (output @ output.T).mean()


@pytest.mark.parametrize(
    ("criterion", "wanted"),
    [(ContrastiveLoss(), "criterion(gather(outputs), targets)"), (lambda output, target: output.mean(), "weight=")],
)
def test_coupled_and_unknown_criteria_are_found(criterion, wanted):
    finding = only(examine(nn.Linear(3, 3), criterion))
    assert finding.startswith("the loss: ")
    assert wanted in finding


def vae_loss(reconstruction, x, mean, log_variance):
    cross = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return cross + divergence


def old_sum(output, target):
    return F.mse_loss(output, target, size_average=False)


total = nn.MSELoss(reduction="sum")


def by_name(output, target):
    loss = total(output, target)
    return 0.1 * loss / 2


class SumOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.L1Loss(reduction="sum"), 3.0

    def forward(self, output, target):
        loss = 0
        loss += self.scale * self.inner(output, target)
        loss += (output - target).pow(2).sum()
        return loss


class Callable:
    def __call__(self, output, target):
        return nn.BCELoss(reduction="sum")(output, target)


def mean_by_count(output, target):
    return F.cross_entropy(output, target, reduction="sum") / (target != 0).sum()


def mean_by_length(output, target):
    loss = F.cross_entropy(output, target, reduction="sum")
    loss /= len(output)
    return loss


def mean_by_factor(output, target):
    scale = 1 / len(output)
    return scale * (output - target).sum()


def sum_of_rows(output, target):
    return (output - target).sum(1).mean()


def mixed(output, target):
    if len(output) > 3:
        return output.sum()
    return output.mean()


SUMS = [vae_loss, old_sum, by_name, SumOfTwo(), Callable(), functools.partial(vae_loss, x=1)]
MEANS = [mean_by_count, mean_by_length, mean_by_factor, sum_of_rows, mixed]


@pytest.mark.parametrize("criterion", SUMS, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_sums_are_recognized_in_the_source_of_a_criterion(criterion):
    finding = only(examine(nn.Linear(3, 3), criterion))
    assert finding.startswith("the loss: ")
    assert 'is a sum: give DataParallelCriterion reduction="sum"' in finding
    assert "weight=" not in finding


@pytest.mark.parametrize("criterion", MEANS, ids=lambda one: one.__name__)
def test_means_are_not_recognized_as_sums(criterion):
    assert "weight=" in only(examine(nn.Linear(3, 3), criterion))


def test_sums_are_recognized_in_a_lambda():
    assert "is a sum" in only(examine(nn.Linear(3, 3), lambda output, target: (output - target).pow(2).sum()))


@pytest.mark.parametrize("layer", [nn.LSTM(3, 3), nn.GRU(3, 3)])
def test_lstm_and_gru_give_a_note(layer):
    finding = only(examine(nn.Sequential(layer)))
    assert is_note(finding)
    assert f"0 ({type(layer).__name__}) runs as replicas" in finding
    assert "refuses" not in finding
    assert not any(map(is_note, examine(Stateful())))


def test_rnn_gives_no_note():
    assert examine(nn.Sequential(nn.RNN(3, 3))) == ()
