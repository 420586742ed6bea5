"""Statistics of a forward over the rows of all replicas and ranks: losses, gradients and state of the plain program."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.fsdp import whole
from helpers.optimizers import sgd
from helpers.ranks import run_ranks
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import balanced_parallel
from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    SumOverRows,
    TrainStep,
    gather,
    parallelize,
    verify,
)
from balanced_parallel.replicas.all_rows import ALL, forward_of

CPUS = ["cpu"] * 3


class Codebook(nn.Module):
    """The codes of VQ-VAE, moving averages of the rows that are nearest to them."""

    def __init__(self, codes=5, size=3):
        super().__init__()
        self.add = SumOverRows()
        self.register_buffer("codes", torch.randn(codes, size))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        index = torch.cdist(x, self.codes).argmin(1)
        chosen = F.one_hot(index, len(self.codes)).to(x.dtype)
        nearest = self.codes[index]
        if self.training:
            with torch.no_grad():
                self.counts.lerp_(self.add(chosen.sum(0)), 0.1)
                self.sums.lerp_(self.add(chosen.T @ x), 0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        return x + (nearest - x).detach()


class Centred(nn.Module):
    """Subtracts the mean of all rows, with its gradient."""

    def __init__(self):
        super().__init__()
        self.add = SumOverRows()

    def forward(self, x):
        count = self.add(torch.tensor(len(x)))
        return x - self.add(x.sum(0)) / count


class Centre(nn.Module):
    """The loss of DINO, whose centre is a moving average of all targets. Its sharpness depends on the outputs of all rows."""

    def __init__(self):
        super().__init__()
        self.add = SumOverRows()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output, target):
        count = self.add(torch.tensor(len(target)))
        spread = self.add(output.square().sum()) / count
        loss = -((target - self.centre).softmax(1) * (output / (1 + spread)).log_softmax(1)).sum(1)
        with torch.no_grad():
            self.centre.lerp_(self.add(target.sum(0)) / count, 0.1)
        return loss.mean()


PARTS = {"codebook": Codebook, "centred": Centred, "tanh": nn.Tanh}
CRITERIA = {"mse": nn.MSELoss, "centre": Centre}


def build(part):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), PARTS[part](), nn.Linear(3, 4))


def batch(rows):
    numbers = torch.Generator().manual_seed(2)
    return torch.randn(rows, 4, generator=numbers), torch.randn(rows, 4, generator=numbers)


def plain_loss(net, criterion, x, target, pieces):
    """The mean of a plain program that runs the pieces of the batch one after the other."""
    with forward_of(ALL):  # also in a process that has other ranks
        losses = [criterion(net(x[rows]), target[rows]) * len(rows) for rows in pieces]
    return sum(losses) / len(x)


def assert_same_state(one, other):
    for (name, left), right in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert_close(
            whole(left), right, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare(step, net, plain, criteria, batches, pieces):
    """Compares three updates of a step with those of the plain program."""
    optimizer = sgd(plain)
    x, target, mine = batches
    for _ in range(3):
        found = step(x[mine], target[mine])
        optimizer.zero_grad()
        loss = plain_loss(plain, criteria[0], x, target, pieces)
        loss.backward()
        optimizer.step()
        assert_close(found, loss.detach(), rtol=1e-9, atol=1e-10)
        assert_same_state(net, plain)
        if isinstance(criteria[1], nn.Module):
            assert_same_state(criteria[1], criteria[0])


PROGRAMS = [
    ("codebook", "mse"),
    ("centred", "mse"),
    ("tanh", "centre"),
    ("codebook", "centre"),
]


@pytest.mark.parametrize(
    ("devices", "rows", "micro_batch_size"),
    [(3, 1, None), (3, 2, None), (3, 7, None), (1, 12, 4), (2, 12, 2)],
)
@pytest.mark.parametrize(("part", "loss"), PROGRAMS)
def test_replicas_equal_the_plain_program(part, loss, devices, rows, micro_batch_size, double):
    """Each micro-batch has sums of its own."""
    plain = build(part)
    criterion = CRITERIA[loss]()
    net = copy.deepcopy(plain)
    split = copy.deepcopy(criterion)
    step = TrainStep(
        DataParallelModel(net, ["cpu"] * devices),
        DataParallelCriterion(split),
        sgd(net),
        micro_batch_size=micro_batch_size,
    )
    pieces = torch.arange(rows).split(devices * micro_batch_size if micro_batch_size else rows)
    compare(step, net, plain, (criterion, split), (*batch(rows), slice(None)), pieces)


def check_ranks(rank, strategy, part, loss, sizes, micro_batch_size):
    torch.set_default_dtype(torch.float64)
    plain = build(part)
    criterion = CRITERIA[loss]()
    split = copy.deepcopy(criterion)
    net = copy.deepcopy(plain)
    model, wrapped = parallelize(net, split, strategy=strategy)
    step = TrainStep(model, wrapped, sgd(model), micro_batch_size=micro_batch_size)
    rows = torch.arange(7).split(sizes)
    counts = [-(-size // (micro_batch_size or 7)) for size in sizes]
    pieces = [
        torch.cat([mine.tensor_split(max(counts))[piece] for mine in rows])
        for piece in range(max(counts))
    ]
    compare(step, net, plain, (criterion, split), (*batch(7), rows[rank]), pieces)
    return True


LAYOUTS = [("ddp", *program) for program in PROGRAMS] + [
    ("fsdp", "codebook", "centre"),
    ("fsdp", "centred", "mse"),
]
LAYOUTS += [
    pytest.param("fsdp", *program, marks=pytest.mark.slow)
    for program in PROGRAMS
    if program not in (PROGRAMS[1], PROGRAMS[3])
]


@pytest.mark.parametrize(("strategy", "part", "loss"), LAYOUTS)
@pytest.mark.parametrize(("sizes", "micro_batch_size"), [([0, 7], None), ([6, 1], 2)])
def test_ranks_equal_the_plain_program(sizes, micro_batch_size, part, loss, strategy):
    assert (
        run_ranks(2, check_ranks, strategy, part, loss, sizes, micro_batch_size, timeout=30)
        == [True] * 2
    )


@pytest.mark.timeout(60)
def test_sums_outside_of_a_forward_are_those_of_the_ranks():
    assert run_ranks(2, check_outside, timeout=30) == [3.0, 3.0]


def check_outside(rank):
    parallelize(nn.Linear(1, 1), nn.MSELoss())  # makes the process group
    return float(SumOverRows()(torch.tensor([rank + 1.0], dtype=torch.bfloat16)))


class Calling(nn.Module):
    """Returns ``function`` of the rows and of a sum over all of them."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.add = SumOverRows()

    def forward(self, x):
        return self.function(x, self.add)


OUTSIDE = SumOverRows()  # no attribute of a module


def run(function, rows=7):
    return gather(
        DataParallelModel(Calling(function), CPUS)(torch.arange(float(rows)).view(rows, 1))
    )


def test_halves_are_added_in_float32_and_keep_their_dtype():
    total = run(
        lambda x, add: add(torch.full((1,), 100.0 + len(x) % 2).bfloat16()).expand(len(x), 1)
    )
    assert total.dtype == torch.bfloat16
    assert set(total.flatten().tolist()) == {float(torch.tensor(301.0).bfloat16())}


@pytest.mark.timeout(60)
# The checkpoint of torch 2.11 raises another error while it is cleared.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda x, add: x + add(x.sum()) if 0.0 in x else x,
            RuntimeError,
            "without the exchange .* as many calls of SumOverRows",
        ),
        (
            lambda x, add: x + add(x)[0],
            ValueError,
            r"given \(2, 1\) \(.* and \(3, 1\) \(.*as in x.sum\(0\)",
        ),
        (
            lambda x, add: checkpoint(lambda y: y - add(y.sum()), x, use_reentrant=False),
            RuntimeError,
            "expected it outside of activation checkpointing",
        ),
    ],
)
def test_calls_that_cannot_meet_raise_an_error(function, error, message):
    with pytest.raises(error, match=message):
        run(function)


def test_a_sum_that_is_no_attribute_of_the_module_raises_an_error():
    model = DataParallelModel(nn.Sequential(nn.Linear(1, 1), nn.Identity()), CPUS)
    model.module[1].forward = lambda x: x - OUTSIDE(x.sum(0))
    with pytest.raises(RuntimeError, match="one after the other, expected a SumOverRows that is"):
        model(torch.ones(7, 1))


def centred_error(output, target):
    mean = OUTSIDE(output.sum(0)) / OUTSIDE(torch.tensor(len(output)))
    return (output - mean - target).pow(2).mean()


def test_a_function_says_that_it_sums_rows(double):
    net = build("tanh")
    x, target = batch(7)
    outputs = DataParallelModel(net, CPUS)(x)
    expected = centred_error(net(x), target)
    found = DataParallelCriterion(centred_error, sums_rows=True, weight="rows")(outputs, target)
    assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"or DataParallelCriterion\(function, sums_rows=True\)"):
        DataParallelCriterion(centred_error)(outputs, target)


def check_function_on_ranks(rank):
    torch.set_default_dtype(torch.float64)
    x, target = batch(7)
    mine = slice(0, 3) if rank == 0 else slice(3, 7)
    model, criterion = parallelize(
        build("tanh"), DataParallelCriterion(centred_error, sums_rows=True, weight="rows")
    )
    found = criterion(model(x[mine]), target[mine])
    with forward_of(ALL):
        assert_close(found, centred_error(build("tanh")(x), target))
    with pytest.raises(RuntimeError, match="by a criterion that was not expected to do so"):
        DataParallelCriterion(centred_error)(model(x[mine]), target[mine])
    return True


@pytest.mark.timeout(60)
def test_a_function_on_ranks_says_that_it_sums_rows():
    assert run_ranks(2, check_function_on_ranks, timeout=30) == [True] * 2


def test_the_old_function_says_what_to_write():
    with pytest.raises(TypeError, match=r"expected SumOverRows: write self.add = SumOverRows"):
        balanced_parallel.sum_over_rows(torch.ones(1))


def test_a_divisor_over_all_rows_is_no_mean_of_a_shard(double):
    def loss(output, target):
        count = OUTSIDE(output.new_tensor(output.numel()))
        return (output - target).pow(2).sum() / count.clamp(min=1)

    net = build("tanh")
    x, target = batch(7)
    outputs = DataParallelModel(net, CPUS)(x)
    with pytest.raises(ValueError, match="is not a function of sums over the rows"):
        DataParallelCriterion(loss, sums_rows=True)(outputs, target)
    found = DataParallelCriterion(loss, reduction="sum", sums_rows=True)(outputs, target)
    assert_close(found, F.mse_loss(net(x), target))


def test_verify_names_the_sums_of_micro_batches(double):
    net = build("centred")
    x, target = batch(7)
    report = verify(net, nn.MSELoss(), x, target, device_ids=CPUS, micro_batch_size=1)
    assert (
        "SumOverRows: each micro-batch has sums of its own rows, not of the whole batch"
        in report.reasons
    )
