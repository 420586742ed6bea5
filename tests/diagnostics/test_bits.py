"""``verify(reproducible="bits")``: the verdict, and the name of the first module whose bits differ."""

import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net, class_targets
from helpers.verification import CPUS
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import DataParallelModel, verify

pytestmark = pytest.mark.usefixtures("double")
SYSTEM = random.SystemRandom()


def compare(model, criterion=None, rows=7, device_ids=("cpu",), **settings):
    inputs = torch.randn(rows, 4)
    targets = class_targets(rows, 2)
    return verify(
        model,
        criterion or nn.CrossEntropyLoss(),
        inputs,
        targets,
        device_ids=device_ids,
        reproducible="bits",
        **settings,
    )


class Block(nn.Module):
    """A part of a residual net, with dropout, and another part inside."""

    def __init__(self, inner=None):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)
        self.inner = inner or nn.Identity()

    def forward(self, x):
        return x + self.inner(self.dropout(self.layer(x).relu()))


class Net(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.begin = nn.Linear(4, 6)
        self.end = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([Block(), Block(inner), Block()])

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


# Parts that are not deterministic


class ClockInBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(6))

    def forward(self, x):
        self.noise.fill_(time.perf_counter())
        return x + self.noise


@torch.library.custom_op("tests::sum_in_any_order", mutates_args=())
def sum_in_any_order(x: torch.Tensor) -> torch.Tensor:
    """A kernel as ``index_add_`` of CUDA, whose threads add in the order of their arrival."""
    return x * (1 + SYSTEM.random() * 1e-9)


sum_in_any_order.register_autograd(lambda ctx, gradient: gradient)


class AnyOrder(nn.Module):
    def forward(self, x):
        return sum_in_any_order(x)


class PythonRandom(nn.Module):
    def forward(self, x):
        return x * SYSTEM.random()


class RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + SYSTEM.random() * 1e-9)


class OnlyGradient(nn.Module):
    def forward(self, x):
        return RandomBackward.apply(x)


class Between(nn.Module):
    """A part that computes between the forwards of its own parts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        return self.second(RandomBackward.apply(self.first(x)))


class Mapped(nn.Module):
    """A part that runs another inside of torch.func, whose tensors have no memory to read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.func.vmap(self.layer)(x) * SYSTEM.random()


class HookOfTensor(nn.Module):
    def forward(self, x):
        doubled = x * 2
        if doubled.requires_grad:
            doubled.register_hook(lambda gradient: gradient * SYSTEM.random())
        return doubled


class Branches(nn.Module):
    calls = 0

    def forward(self, x):
        Branches.calls += 1
        return x.tanh() if Branches.calls % 2 else x.sin()


class FromNumpy(nn.Module):
    """A result that no operator of torch has computed."""

    def forward(self, x):
        return torch.from_numpy(np.full((len(x), 6), SYSTEM.random()))


AFTER_INNER = "equal up to gradient that reaches blocks.1.inner (OnlyGradient)"


@pytest.mark.parametrize(
    ("part", "place"),
    [
        (ClockInBuffer, "output of blocks.1.inner (ClockInBuffer)"),
        (AnyOrder, "output of blocks.1.inner (AnyOrder)"),
        (PythonRandom, "output of blocks.1.inner (PythonRandom)"),
        (FromNumpy, "output of blocks.1.inner (FromNumpy)"),
        (OnlyGradient, f"gradient that reaches blocks.1.dropout (Dropout); {AFTER_INNER}"),
        (Between, "gradient that reaches blocks.1.inner.first (Linear)"),
        (Mapped, "output of blocks.1.inner (Mapped)"),
        (HookOfTensor, "gradient that reaches blocks.1.inner (HookOfTensor)"),
        (Branches, "output of blocks.1.inner (Branches)"),
    ],
)
def test_a_part_that_is_not_deterministic_is_named(part, place):
    report = compare(Net(part()))
    assert not report.equal
    assert report.first_difference.startswith(place)
    text = str(report)
    assert text.startswith("DIFFERENT BITS: replicas on cpu; micro-batches: 1\n")
    assert text.endswith(f"this module is not deterministic: {report.first_difference}")
    assert "no known reason" not in text


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_in_a_checkpoint_is_named(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    assert compare(Net(Checkpointed(Block()))).equal
    if not reentrant:
        assert compare(Net(Checkpointed(Block())), device_ids=CPUS, micro_batch_size=2).equal
    forward = compare(Net(Checkpointed(PythonRandom()))).first_difference
    assert forward.startswith("output of blocks.1.inner")
    backward = compare(Net(Checkpointed(OnlyGradient()))).first_difference
    assert backward.startswith("gradient that reaches blocks.1.dropout (Dropout); equal up to")


class LossWithLayer(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.part = part

    def forward(self, output, target):
        return F.cross_entropy(self.part(self.layer(output)), target)


def test_a_loss_that_is_not_deterministic_is_named():
    place = "gradient that reaches end (Linear); equal up to output of the model (Net)"
    assert compare(Net(), LossWithLayer(PythonRandom())).first_difference == place
    in_groups = compare(Net(), LossWithLayer(OnlyGradient()), device_ids=CPUS, micro_batch_size=2)
    assert in_groups.first_difference == place
    function = compare(
        Net(), lambda output, target: F.cross_entropy(output, target) * SYSTEM.random()
    )
    assert function.first_difference == place
    constant = compare(
        Net(), lambda output, target: F.cross_entropy(output, target) + SYSTEM.random()
    )
    assert constant.first_difference == "in the loss"


# Layouts


class Several(nn.Module):
    """Layers of many kinds, with dropout, a parameter with two uses, and kernels that return memory for their backward."""

    def __init__(self, part=None):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.part = part or nn.Identity()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.attention = nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, ids):
        x = self.attention(self.lstm(self.embed(ids))[0])
        x = self.norm(self.convolution(x.mT)).mean(2)
        joined = x.new_empty(len(x), 16)  # This memory has any values.
        joined[:, :8], joined[:, 8:] = x, x.relu()
        return {"logits": self.part(joined.unflatten(1, (2, 8)).sum(1)) @ self.embed.weight.T}


def compare_several(part, device_ids, rows=7):
    ids = torch.randint(11, (rows, 6))
    targets = torch.randint(11, (rows,))
    model = Several(part)
    settings = {"device_ids": device_ids, "micro_batch_size": 2, "reproducible": "bits"}
    return verify(
        model,
        lambda output, target: F.cross_entropy(output["logits"], target),
        ids,
        targets,
        **settings,
    )


@pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
def test_layouts_with_dropout_have_the_same_bits(device_ids):
    report = compare_several(None, device_ids)
    assert report.equal
    assert report.first_difference is None
    assert report.step == 2
    assert not any(report.gradient_errors.values())
    assert str(report).startswith(
        f"same bits: replicas on {', '.join(device_ids)}; micro-batches: "
    )


def test_new_memory_is_not_named():
    report = compare_several(OnlyGradient(), ["cpu"], rows=4)
    assert report.first_difference.endswith("gradient that reaches part (OnlyGradient)")


class CountsCalls(nn.Module):
    """A part with state that each replica has for itself: a tensor in an attribute, not a number."""

    def __init__(self, start):
        super().__init__()
        self.calls = start

    def forward(self, x):
        self.calls = self.calls + 1
        return x * (1 + 1e-3 * self.calls)


def test_a_number_in_an_attribute_advances_once_in_any_layout():
    for devices in (["cpu"], CPUS):
        assert compare(Net(CountsCalls(0)), device_ids=devices, micro_batch_size=2).equal


def test_a_layout_that_differs_has_its_first_module():
    assert compare(Net(CountsCalls(torch.zeros(()))), micro_batch_size=2).equal
    report = compare(Net(CountsCalls(torch.zeros(()))), device_ids=CPUS, micro_batch_size=2)
    place = (
        "output of blocks.1.inner (CountsCalls); equal up to output of blocks.1.dropout (Dropout)"
    )
    assert report.first_difference == place
    lines = str(report).splitlines()
    assert lines[0] == "DIFFERENT BITS: replicas on cpu, cpu, cpu; micro-batches: 2"
    assert lines[2].split() == ["elements", "that", "differ"]
    assert lines[3].split() == ["loss", "1", "<-"]
    assert lines[-1] == f"first difference: {place}"
    assert report.gradient_errors["end.weight"] == 30


def test_without_a_number_of_rows_each_device_has_a_group():
    assert compare(Net(), device_ids=CPUS).micro_batches == 1
    assert compare(DataParallelModel(Net(), CPUS), device_ids=None).devices == ("cpu", "cpu", "cpu")
    assert compare(Net(), rows=4, device_ids=CPUS * 2).equal


def test_the_plain_program_may_be_any():
    """No setting of a step refuses it: batch statistics, a loss of all rows, and sparse gradients."""
    assert compare(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))).equal
    assert compare(
        build_net(),
        lambda output, target: F.cross_entropy(output @ output.T, torch.arange(len(output))),
    ).equal
    ids = torch.randint(9, (7,))
    sparse = nn.Sequential(nn.Embedding(9, 5, sparse=True), OnlyGradient())
    report = verify(
        sparse, nn.CrossEntropyLoss(), ids, ids % 5, device_ids=["cpu"], reproducible="bits"
    )
    assert report.first_difference == (
        "gradient that reaches 0 (Embedding); equal up to gradient that reaches the model (Sequential)"
    )


class HookOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        self.layer.weight.register_hook(lambda gradient: gradient * SYSTEM.random())
        return self.layer(x)


def test_a_difference_outside_of_modules_is_told():
    report = compare(Net(HookOfParameter()))
    assert [name for name, count in report.gradient_errors.items() if count] == [
        "blocks.1.inner.layer.weight"
    ]
    assert (
        report.first_difference
        == "in no module: in a sum over groups, a hook of a parameter, or by chance"
    )


def test_state_is_compared():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += SYSTEM.random()
            return x

    report = compare(Net(Writes()))
    assert not any([report.loss_error, *report.gradient_errors.values()])
    assert report.state_errors == {"blocks.1.inner.seen": 1}


def test_the_own_program_stays_as_it_is():
    net = Net(PythonRandom())
    inputs = torch.randn(7, 4)
    targets = class_targets(7)
    before = torch.get_rng_state()
    assert not verify(
        net,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        device_ids=CPUS,
        micro_batch_size=2,
        reproducible="bits",
    ).equal
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_a_tolerance_is_refused():
    with pytest.raises(
        ValueError,
        match=r"tolerance=0.1 with reproducible='bits', expected None: bits are equal or not",
    ):
        compare(Net(), tolerance=0.1)
