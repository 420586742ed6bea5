"""``TrainStep(reproducible=True)``: random numbers are those of one device with the whole batch, in any layout."""

import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.by_row import has_kernels_of_torch
from helpers.fsdp import whole
from helpers.optimizers import sgd
from helpers.ranks import run_ranks
from helpers.steps import make_step as make_step_of
from helpers.steps import parallel_step
from helpers.updates import values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    ByCost,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)
from balanced_parallel.reproducible import row_random
from balanced_parallel.savings import checkpoint_activations

ROWS = 7


class Net(nn.Module):
    """Draws for rows, for time steps, for all rows, and inside of an LSTM and of attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, words):
        x = F.dropout(self.embed(words), 0.2, self.training)
        x = self.lstm(x.transpose(0, 1))[0].transpose(0, 1)  # time-major
        x = x + self.attend(x, x, x, key_padding_mask=words == 0)[0] * torch.rand(
            len(x), 1, 1, device=x.device
        )
        features = (x * (words > 0)[..., None]).sum(1)
        self.forwards += 1
        return F.linear(
            features, F.dropout(self.head.weight, 0.2, self.training), self.head.bias
        ) * (1 + torch.rand(()).to(x))


class NoisyLabels(nn.Module):
    """A loss that draws."""

    def forward(self, logits, labels):
        return F.cross_entropy(
            logits,
            torch.where(
                torch.rand(len(labels), device=labels.device) < 0.3, (labels + 1) % 5, labels
            ),
        )


def batch():
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 6, 3, 5, 1, 4, 6])
    words = torch.randint(1, 20, (ROWS, 6), generator=numbers) * (
        torch.arange(6) < lengths[:, None]
    )
    return words, torch.randint(5, (ROWS,), generator=numbers)


def words_in(sample):
    return int((sample[0] > 0).sum())


def pad(samples):
    """Returns words without the padding that all samples have, and the labels."""
    words, labels = map(torch.stack, zip(*samples, strict=True))
    return words[:, : max(map(words_in, samples))], labels


def make_step(devices=1, change=lambda net: net, **settings):
    criterion = DataParallelCriterion(NoisyLabels(), weight="rows")
    return make_step_of(
        change(Net().double()), criterion, devices=devices, reproducible=True, **settings
    )


def train(step, updates=2, add=None):
    """Returns losses and parameters of some updates, a buffer, and the next number of the CPU's generator."""
    torch.manual_seed(5)
    words, labels = batch()
    losses = []
    for _ in range(updates):
        if step.cut is not None:
            losses.append(step([*zip(words, labels, strict=True)]))
        elif add is None:
            losses.append(step(words, labels))
        else:
            for part in zip(words.split(add), labels.split(add), strict=True):
                step.add(*part)
            losses.append(step.apply())
    parameters = values_of(step.model.module)
    return [torch.stack(losses).cpu(), *parameters], torch.rand(())


def assert_equal(found, expected):
    assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    assert torch.equal(found[1], expected[1])


@pytest.fixture(scope="module")
def expected():
    return train(make_step())


LAYOUTS = {
    "micro-batches": {"micro_batch_size": 2},
    "3 replicas": {"devices": 3},
    "uneven replicas": {"devices": 3, "split": [5, 1, 1]},
    "auto": {"devices": 2, "micro_batch_size": "auto"},
    "added": {"devices": 2, "add": 3},
    "simulated": {"devices": ["sim:0", "sim:1", "sim:2"], "micro_batch_size": 2},
    "by cost": {
        "devices": 2,
        "cut": ByCost(words_in, collate=pad),
        "micro_batch_size": 2,
    },
    "checkpointed": {
        "devices": 2,
        "change": lambda net: checkpoint_activations(net, blocks=["attend", "head"]) and net,
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_draw_the_numbers_of_one_device(name, expected):
    settings = dict(LAYOUTS[name])
    with simulate(3):
        assert_equal(train(add=settings.pop("add", None), step=make_step(**settings)), expected)


def test_an_update_that_runs_again_after_an_out_of_memory_draws_the_same_numbers(expected):
    seen = []  # five small forwards, two updates
    with simulate(2) as cluster:
        step = make_step(["sim:0", "sim:1"], micro_batch_size="auto")

        def fail(model, inputs):
            seen.append(cluster.fail_allocation(50 if len(seen) == 6 else 10**9))

        step.model.register_forward_pre_hook(fail)
        assert_equal(train(step), expected)
        assert step.micro_batch_size == 2


def train_on_rank(rank, strategy, sizes, micro_batch_size):
    torch.manual_seed(5 + rank)  # the first rank's seed is that of all
    net = Net().double()
    words, labels = batch()
    step = parallel_step(
        net,
        NoisyLabels(),
        devices=["cpu"],
        weight="rows",
        strategy=strategy,
        micro_batch_size=micro_batch_size,
        reproducible=True,
    )
    torch.manual_seed(5 + rank)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    losses = [step(words[rows], labels[rows]) for _ in range(2)]
    parameters = [whole(parameter.detach()) for parameter in step.model.parameters()]
    if 0 not in sizes:
        step.add(words[rows], labels[rows])
        with pytest.raises(
            ValueError,
            match=r"several add\(\) calls on several ranks.*pass the effective batch to step",
        ):
            step.add(words[rows], labels[rows])
    return [torch.stack(losses), *parameters], torch.rand(()) if rank == 0 else None


RANKS = [(([5, 2], None), "ddp"), (([4, 3], 2), "fsdp"), (([7, 0], 3), "ddp")]


@pytest.mark.parametrize(("rows", "strategy"), RANKS)
def test_ranks_draw_the_numbers_of_one_device(rows, strategy, expected):
    first, second = run_ranks(2, train_on_rank, strategy, *rows)
    assert_close(first[0], expected[0], rtol=1e-10, atol=1e-12)
    assert_close(second[0], first[0])


class Parts(nn.Module):
    """Drops out several parts of each row, in some order."""

    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6).double()
        self.last = nn.Linear(6, 5).double()
        self.drop = drop

    def forward(self, inputs):
        return self.last(self.drop(torch.tanh(self.first(inputs))))


def drop_windows(hidden):
    windows = hidden.view(-1, 2, 3).transpose(0, 1).reshape(-1, 3)
    return F.dropout(windows, 0.3).view(2, -1, 3).transpose(0, 1).reshape(-1, 6)


BLOCKS = {
    "cat": lambda hidden: sum(F.dropout(torch.cat([hidden, hidden]), 0.3).chunk(2)) / 2,
    "repeat": lambda hidden: F.dropout(hidden.repeat(4, 1), 0.3).unflatten(0, (4, -1)).mean(0),
    "windows": drop_windows,
}
BESIDE = {
    "stack": lambda hidden: F.dropout(torch.stack([hidden, hidden]), 0.3).mean(0),
    "tokens": lambda hidden: F.dropout(hidden.view(-1, 2), 0.3).view(-1, 6),
    "repeated": lambda hidden: (
        F.dropout(hidden.repeat_interleave(2, 0), 0.3).unflatten(0, (-1, 2)).mean(1)
    ),
}


def step_of_parts(drop, devices=1, strategy=None):
    net = Parts(drop)
    if strategy:
        model, criterion = parallelize(net, nn.MSELoss(), strategy=strategy)
    else:
        model = DataParallelModel(net, ["cpu"] * devices)
        criterion = DataParallelCriterion(nn.MSELoss())
    optimizer = sgd(model)
    return TrainStep(model, criterion, optimizer, reproducible=True)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", BLOCKS)
def test_parts_of_rows_in_blocks_are_an_error(kind, devices):
    """Their numbers were those of other rows, and differed between layouts, silently."""
    inputs = torch.randn(9, 4).double()
    target = torch.randn(9, 5).double()
    step = step_of_parts(BLOCKS[kind], devices)
    with pytest.raises(ValueError, match=r"several parts of each row, .* torch.stack\(\[h, h\]\)"):
        step(inputs, target)


@pytest.mark.parametrize("kind", BESIDE)
def test_parts_of_a_row_beside_each_other_follow_it(kind):
    inputs = torch.randn(9, 4).double()
    target = torch.randn(9, 5).double()
    losses = []
    for devices in (1, 3):
        step = step_of_parts(BESIDE[kind], devices)
        torch.manual_seed(0)
        losses.append([step(inputs, target).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def train_parts(rank, strategy, kind):
    inputs = torch.randn(2 * (rank == 0), 4).double()
    target = torch.zeros(2, 5).double()
    step = step_of_parts({**BLOCKS, **BESIDE}[kind], strategy=strategy)
    try:
        return step(inputs, target[: len(inputs)]).item()
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parts_of_rows_on_a_rank_without_rows(strategy):
    texts = run_ranks(2, train_parts, strategy, "cat")
    assert "several parts of each row" in texts[0]
    assert "1 of 2 ranks failed" in texts[1]
    losses = run_ranks(2, train_parts, strategy, "tokens")
    assert losses[0] == losses[1] > 0


def add_on_one_rank(rank, strategy, reproducible):
    net = Net().double()
    words, labels = batch()
    step = parallel_step(
        net,
        NoisyLabels(),
        devices=["cpu"],
        weight="rows",
        strategy=strategy,
        micro_batch_size=2,
        reproducible=reproducible,
    )
    act = step.apply if rank else functools.partial(step.add, words[:2], labels[:2])
    with pytest.raises(ValueError, match=r"nothing was added on rank 1, expected a batch on each"):
        act()
    if reproducible == "bits":  # It refuses the buffer of the net.
        return 0.0
    rows = slice(0, 2 * (rank == 0))
    step.add(words[rows], labels[rows])
    return step.apply().item()


@pytest.mark.parametrize(
    ("strategy", "reproducible"), [("ddp", True), ("fsdp", True), ("ddp", "bits")]
)
def test_a_rank_that_adds_nothing_is_an_error_on_all_ranks(strategy, reproducible):
    """The others waited for its number of rows, until the timeout."""
    losses = run_ranks(2, add_on_one_rank, strategy, reproducible)
    assert losses[0] == losses[1]


def test_the_small_forwards_leave_buffers_and_generators_alone():
    step = make_step()
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # the seed of an update
    expected = torch.rand(())
    torch.manual_seed(5)
    step(*batch())
    assert step.model.module.forwards == 1
    torch.manual_seed(5)
    step(*batch())
    assert torch.equal(torch.rand(()), expected)


def test_kernels_are_those_of_torch_again_after_an_update_and_after_a_failure():
    step = make_step()
    step(*batch())
    assert has_kernels_of_torch()
    with pytest.raises(IndexError):
        step(torch.full((2, 6), 99), torch.zeros(2, dtype=torch.long))
    assert has_kernels_of_torch()
    step.add(*batch())
    assert not has_kernels_of_torch()
    step.apply()
    assert has_kernels_of_torch()
    assert not row_random._forwards
    again = pickle.loads(pickle.dumps(make_step()))
    assert_equal(train(again), train(make_step()))


class LayerDrop(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        self.draws(x)
        return self.linear(x)


def five_rows():
    x = torch.zeros(5, 6)
    x[3:] = 5.0
    return x


@pytest.mark.parametrize(
    ("draws", "devices", "message"),
    [
        (lambda x: torch.rand(1 + int((x > 0).sum())), 2, "draw 0 is .* uniform_ of shape"),
        (
            lambda x: torch.rand(len(x)) if x.sum() > 3 else None,
            2,
            "draw 0 is .* uniform_ of shape",
        ),
        (lambda x: torch.poisson(x.abs()), 2, "poisson draws in this forward"),
        # the first three rows draw one number in the small forwards, all rows draw three
        (
            lambda x: torch.rand(1 + int((x > 0).sum() > 6) * 2),
            1,
            r"draw 0 is .* and uniform_ of shape \(3,\) for 5 rows",
        ),
    ],
)
def test_draws_that_follow_the_data_are_refused(draws, devices, message):
    step = make_step_of(LayerDrop(draws), devices=devices, reproducible=True)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        step(five_rows(), torch.zeros(5, dtype=torch.long))


def test_compiled_modules_are_refused_unless_they_draw_with_kernels_of_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Imports of torch warn.
        net = torch.compile(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="compiled module.*expected torch._inductor.config.fallback_random = True"
    ):
        make_step_of(net, nn.MSELoss(), devices=1, reproducible=True)
    from torch._inductor import config

    with config.patch(fallback_random=True):
        make_step_of(net, nn.MSELoss(), devices=1, reproducible=True)


class FailingNet(nn.Module):
    """Fails in one forward, counted from 1, behind its batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)
        self.left = [0]  # A number would be put back.

    def forward(self, x):
        x = self.norm(x)
        self.left[0] -= 1
        if self.left[0] == 0:
            raise torch.OutOfMemoryError("injected")
        return self.head(self.drop(x))


def train_after_a_failure(fails_in, limit=None):
    """Returns the parameters and the next random number of a step, after one that has failed in a forward, and its notes."""
    net = FailingNet().double()
    notes = []
    step = make_step_of(net, nn.MSELoss(), devices=1, micro_batch_size=limit, reproducible=True)
    torch.manual_seed(1)
    x = torch.randn(8, 4).double() + 3
    y = torch.randn(8, 3).double()
    if fails_in:
        net.left[0] = fails_in
        with pytest.raises(torch.OutOfMemoryError, match="injected") as caught:
            step(x, y)
        notes = caught.value.__notes__
    loss = step(x, y)
    return ([loss, *net.parameters()], torch.rand(())), net.norm.running_mean, notes


@pytest.mark.parametrize(
    ("fails_in", "limit"), [(1, None), (2, None), (1, "auto"), (2, "auto"), (3, None)]
)
def test_a_failure_in_the_small_forwards_or_behind_them_leaves_nothing(fails_in, limit):
    """Batch norm had the statistics of rows that were never trained on, and the repetition drew other numbers."""
    result, mean, _ = train_after_a_failure(0, limit)
    repeated, mean_of_repetition, notes = train_after_a_failure(fails_in, limit)
    assert_equal(repeated, result)
    if fails_in < 3:  # the third is a forward of the step
        assert torch.equal(mean_of_repetition, mean)
        assert any("runs two and three rows of its first batch" in note for note in notes)


class TwoMeans(nn.Module):
    """Two means, each with a scale that is learned."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, logits, labels):
        means = {
            "class": F.cross_entropy(logits, labels, ignore_index=0),
            "size": logits.square().mean(),
        }
        return {
            name: mean * scale
            for (name, mean), scale in zip(means.items(), self.scales, strict=True)
        }


@pytest.mark.parametrize("reproducible", [False, True, "bits"])
def test_a_criterion_with_parameters_stays_on_its_device_where_an_optimizer_has_state_of_them(
    reproducible,
):
    class SumOfMeans(TwoMeans):
        def forward(self, logits, labels):
            return sum(super().forward(logits, labels).values())

    means = SumOfMeans()
    criterion = DataParallelCriterion(means)
    with simulate(2):
        net = nn.Linear(4, 5).double()
        optimizer = torch.optim.AdamW([*net.parameters(), *means.parameters()])
        settings = {"micro_batch_size": 2, "reproducible": reproducible}
        step = make_step_of(net, criterion, optimizer, devices=range(2), **settings)
        places = set()
        for rows in (11, 7, 5):
            step(torch.randn(rows, 4, dtype=torch.float64), torch.randint(5, (rows,)))
            places.add(str(means.scales.device))
    assert places == {"sim:0"}


def test_noise_of_a_criterion_needs_a_weight_where_rows_are_split():
    """The draws were unknown, and the error said that they depend on data or chance."""
    losses = []

    def run(devices=1, micro_batch_size=None, **weight):
        criterion = DataParallelCriterion(NoisyLabels(), **weight)
        settings = {"micro_batch_size": micro_batch_size, "reproducible": True}
        return make_step_of(Net().double(), criterion, devices=devices, **settings)(*batch())

    for weight in ({}, {"weight": "rows"}):
        torch.manual_seed(5)
        losses.append(run(**weight))
    assert_close(*losses)
    for settings in ({"devices": 3}, {"micro_batch_size": 2}):
        with pytest.raises(ValueError, match="or it draws random numbers: .* weight="):
            run(**settings)


class Forces(nn.Module):
    """Returns the derivative of an energy by its inputs, as a potential of atoms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))

    def forward(self, places):
        places = places.detach().requires_grad_(True)
        energy = self.energy(places).sum()
        return torch.autograd.grad(energy, places, create_graph=True)[0]


def test_a_forward_that_differentiates_by_its_inputs_draws_the_same_numbers():
    """The small forwards ran without gradients: "element 0 of tensors does not require grad"."""
    results = []
    for devices, limit in ((1, None), (3, 2)):
        net = Forces()
        criterion = DataParallelCriterion(
            lambda out, aim: (out - aim).square().mean(), weight="rows"
        )
        step = TrainStep(
            DataParallelModel(net, ["cpu"] * devices),
            criterion,
            sgd(net),
            micro_batch_size=limit,
            reproducible=True,
        )
        torch.manual_seed(1)
        rows = torch.randn(ROWS, 4)
        results.append([step(rows, rows + 1), step(rows, rows - 1), *net.parameters()])
    assert_close(*results)
