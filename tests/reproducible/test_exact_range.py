"""``TrainStep(reproducible="bits")``: the range of gradients, half precision, and buffers that a forward writes."""

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from helpers.steps import make_step, parallel_step
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from balanced_parallel import TrainStep, parallelize, simulate
from balanced_parallel.reproducible import exact

ROWS = 11
BITS = {"micro_batch_size": 2, "reproducible": "bits"}


def batch(rows=ROWS):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(3)), class_targets(rows)


# Range


def column_updates(scales, reproducible, dtype=torch.float32, optimizer=torch.optim.Adam):
    """Returns what three updates change in a weight whose columns have gradients of these sizes."""
    torch.manual_seed(0)
    net = nn.Linear(len(scales), 3, bias=False).to(dtype)
    nn.init.zeros_(net.weight)
    model, criterion = parallelize(net, nn.MSELoss(), ["cpu"] * 2)
    step = TrainStep(
        model,
        criterion,
        optimizer(net.parameters(), lr=0.01),
        micro_batch_size=2,
        reproducible=reproducible,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.rand(ROWS, len(scales), generator=generator, dtype=torch.float64) + 0.5
        step(
            (rows * torch.tensor(scales, dtype=torch.float64)).to(dtype),
            torch.ones(ROWS, 3, dtype=dtype),
        )
    return net.weight.detach()


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, [1.0, 1e-8, 1e-14, 1e-18]),
        (torch.float64, [1e30, 1.0, 1e-14, 1e-30]),
        (torch.float64, [1e-36, 1e-40]),
    ],
)
def test_small_elements_beside_large_ones_are_trained(dtype, scales):
    def sgd(parameters, lr):
        # The weights stay near 0, so the gradients are those of the rows.
        return torch.optim.SGD(parameters, lr=1e-70)

    for optimizer in (sgd,) if dtype == torch.float64 else (sgd, torch.optim.Adam):
        expected = column_updates(scales, False, dtype, optimizer)
        assert expected.all() or dtype == torch.float32
        assert_close(column_updates(scales, "bits", dtype, optimizer), expected, rtol=1e-3, atol=0)


class Products(nn.Module):
    """The gradient of the weight is the sum of the rows."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, rows):
        return (rows * self.weight).sum(1)


def gradient_of(rows, devices=("cpu",)):
    """Returns the sum of rows, each of which is a group."""
    net = Products(rows.shape[1])
    model, criterion = parallelize(net.to(devices[0]), torch.sum, [*devices])
    step = TrainStep(model, criterion, sgd(net), micro_batch_size=1, reproducible="bits")
    step.add(rows.to(devices[0]))
    step.apply()
    return net.weight.grad.cpu()


def test_an_element_has_twelve_bits_at_least():
    exponents = torch.arange(0, -1000, -1, dtype=torch.float64)
    for gradient in (1.5 * 2.0**exponents, 1.99999 * 2.0**exponents):
        assert_close(gradient_of(gradient[None]), gradient, rtol=2.0**-11, atol=0)


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class Weights(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(3) for _ in range(count)])

    def forward(self, rows):
        return sum((weight * rows.sum()).sum() for weight in self.weights)


def operators_of(count, reproducible):
    """Returns the number of operators of an update of eight groups."""
    net = Weights(count)
    model, criterion = parallelize(net, torch.sum, ["cpu"])
    step = TrainStep(
        model, criterion, sgd(net), micro_batch_size=1, max_grad_norm=1.0, reproducible=reproducible
    )
    with Operators() as operators:
        step.add(torch.ones(8, 1))
        step.apply()
    return operators.count


def test_small_parameters_are_counted_together():
    """A parameter on its own has 15 operators in a group."""
    few, many = (operators_of(count, "bits") - operators_of(count, True) for count in (10, 50))
    assert (many - few) / 40 / 8 <= 10


def test_the_sum_of_the_most_groups_is_exact():
    """Elements take all bits that an element has, so the sum needs those of the groups as well."""
    rows = torch.full((exact._MOST_GROUPS, 3), (2.0**43 - 1) / 2.0**43, dtype=torch.float64)
    rows[:, 1] *= -1
    rows[:, 2] = 0
    with simulate(3):
        for devices in (["cpu"], ["sim:0", "sim:1", "sim:2"]):
            assert torch.equal(gradient_of(rows, devices), rows.sum(0))


def test_elements_are_rounded_to_the_nearest_unit():
    """A rounding towards zero would add up."""
    unit = 2.0**-43
    rows = torch.tensor([[1.0, (4096 + 0.95) * unit]], dtype=torch.float64).repeat(100, 1)
    assert_close(gradient_of(rows), rows.sum(0), rtol=0.1 / 4096, atol=0)


@pytest.mark.parametrize("number", [1.0, 3e-5, 2.0**-600, 2.0**1000])
def test_a_norm_is_exact_for_any_cut(number):
    """The sum of the squares has more bits than an integer has."""
    count = 2**18 + 12_345
    gradient = torch.full((count,), number, dtype=torch.float64)
    norms = [
        exact.norm_of(each).item()
        for each in (
            [gradient],
            [*gradient.split(1000)],
            [*reversed(gradient.split([3, 2**17, count - 2**17 - 3])), gradient[:0]],
        )
    ]
    assert norms == [norms[0]] * 3
    assert norms[0] == pytest.approx(number * count**0.5, rel=1e-12)


# Half precision


def train_with_an_empty_rank(rank):
    torch.manual_seed(0)
    net = nn.Linear(4, 5)
    step = parallel_step(net, devices=["cpu"], precision="fp16", **BITS)
    rows = slice(0, 0 if rank else ROWS)
    losses = [step(*(part[rows] for part in batch())).item() for _ in range(3)]
    return losses, step.digest()


def test_a_rank_without_rows_in_the_first_update_of_fp16_updates_too():
    first, second = run_ranks(2, train_with_an_empty_rank)
    assert first == second
    assert first[0][2] < first[0][0]


# Buffers


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.write = write
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("later", None)

    def forward(self, rows):
        output = self.layer(rows)
        self.write(self, output.detach())
        return output - self.mean


def follow(module, output):
    module.mean.mul_(0.9).add_(output.mean(0), alpha=0.1)


def with_gradients(write):
    """Returns a write that the small forwards do not make."""
    return lambda module, output: write(module, output) if torch.is_grad_enabled() else None


def register(module, output):
    if not hasattr(module, "first"):
        module.register_buffer("first", output.mean(0))


def fill(module, output):
    if module.later is None:
        module.later = output.mean(0)


WRITES = {
    "with gradients": with_gradients(follow),
    "data": with_gradients(lambda module, output: module.mean.data.add_(output.mean(0))),
    "replaced": with_gradients(lambda module, output: setattr(module, "mean", output.mean(0))),
    "four rows": lambda module, output: len(output) > 3 and follow(module, output),
    "registered": register,
    "filled": fill,
}


@pytest.mark.parametrize("name", WRITES)
def test_buffers_that_groups_write_are_refused(name):
    with simulate(3):
        step = make_step(
            Writing(WRITES[name]), devices=range(3), micro_batch_size=4, reproducible="bits"
        )
        before = [each.detach().clone() for each in step.model.parameters()]
        with pytest.raises(
            (ValueError, RuntimeError),
            match="the (buffer|tensor) (mean|first|later)(, expected none| has other values| of the model)",
        ):
            step(*batch(14))
        assert all(map(torch.equal, before, step.model.parameters()))


def test_buffers_that_a_criterion_writes_are_refused():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, output, labels):
            if torch.is_grad_enabled():
                self.count += 1
            return nn.functional.cross_entropy(output, labels)

    step = make_step(build_net(), Loss(), **BITS)
    with pytest.raises(ValueError, match="writes the buffer count"):
        step(*batch())


def test_buffers_that_are_read_or_written_with_their_values_are_not_refused():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, rows):
            self.scale = torch.tensor(2.0, device=rows.device)
            return self.layer(rows) * self.scale

    step = make_step(Cached(), **BITS)
    losses = [step(*batch()) for _ in range(3)]
    assert losses[2] < losses[0]


def write_on_ranks(rank):
    model, criterion = parallelize(
        Writing(WRITES["with gradients"]), nn.CrossEntropyLoss(), ["cpu"]
    )
    step = TrainStep(model, criterion, sgd(model), **BITS)
    rows = slice(0, 4) if rank == 0 else slice(4, ROWS)
    with pytest.raises(
        (ValueError, RuntimeError), match="the buffer mean( has other values|, exp)"
    ):
        step(*(part[rows] for part in batch()))
    model, criterion = parallelize(Writing(lambda *_: None), nn.CrossEntropyLoss(), ["cpu"])
    step = TrainStep(model, criterion, sgd(model), **BITS)
    step(*(part[rows] for part in batch()))
    return step.digest()


def test_buffers_that_groups_of_ranks_write_are_refused():
    first, second = run_ranks(2, write_on_ranks)
    assert first == second
