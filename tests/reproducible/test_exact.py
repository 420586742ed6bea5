"""``TrainStep(reproducible="bits")``: values, failures and repetitions, state, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from helpers.exact import digest, each_leaf
from helpers.optimizers import sgd
from helpers.problems import build_net, class_targets
from helpers.ranks import on_ranks, run_ranks
from helpers.steps import make_step, parallel_step
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    ByCost,
    Checkpoints,
    DataParallelCriterion,
    DataParallelModel,
    DiceLoss,
    SumOverRows,
    TrainStep,
    convert_sync_batchnorm,
    parallelize,
    simulate,
)
from balanced_parallel.reproducible import exact

ROWS = 11
SIZE = 2
BITS = {"micro_batch_size": SIZE, "reproducible": "bits"}
SHARES = {
    2: [0, 8, 11],
    3: [0, 4, 4, 11],
}  # The bounds of the rows of ranks. One of three has none.


def one_count(output, labels, values):
    return F.mse_loss(output, values) + 0.5 * F.l1_loss(output, values)


def batch(ignored=4, rows=ROWS):
    """Returns rows whose first labels, those of two groups, do not count."""
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3))
    return inputs, class_targets(rows, ignored)


def rows_of(rank, ranks):
    return slice(None) if ranks == 1 else slice(*SHARES[ranks][rank : rank + 2])


def bits_of(step, *values):
    """Returns digests of values, and of the parameters and gradients of a step."""
    parameters = [*step.model.module.parameters(), *step.criterion.parameters()]
    return [digest(value) for value in (*values, *parameters, *(each.grad for each in parameters))]


# Failures and values that are not finite


class Failing(nn.Module):
    """Fails in a forward of a number, counted from 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = build_net()
        self.drop = nn.Dropout(0.3)
        self.left, self.error = [0], RuntimeError("injected")  # A number would be put back.

    def forward(self, x):
        self.left[0] -= 1
        if self.left[0] == 0:
            raise self.error
        return self.net(self.drop(x))


@pytest.mark.parametrize("error", [RuntimeError("injected"), torch.OutOfMemoryError("injected")])
@pytest.mark.parametrize("fails_in", [1, 2, 3, 8])
def test_a_step_that_failed_in_a_group_is_repeated_with_the_same_bits(fails_in, error):
    """The first two forwards are small ones, which find the draws."""
    found = []
    for number in (0, fails_in):
        net = Failing()
        net.left[0], net.error = number, error
        step = make_step(net, devices=1, max_grad_norm=1.0, **BITS)
        torch.manual_seed(7)
        if number:
            with pytest.raises(type(error), match="injected"):
                step(*batch())
            assert all(parameter.grad is None for parameter in net.parameters())
        found.append(bits_of(step, step(*batch()), step.grad_norm, step(*batch()), torch.rand(())))
    assert found[0] == found[1]


def fail_on_rank(rank, failing):
    """Returns digests after two updates. A forward of the last rank fails in the first one."""
    net = Failing()
    inputs, labels = batch()
    rows = rows_of(rank, 2)
    step = parallel_step(net, devices=["cpu"], max_grad_norm=1.0, **BITS)
    torch.manual_seed(7)
    if failing:
        net.left[0] = 3 if rank == 1 else 0
        with pytest.raises(RuntimeError, match="injected"):
            step(inputs[rows], labels[rows])
    return bits_of(
        step, step(inputs[rows], labels[rows]), step.grad_norm, step(inputs[rows], labels[rows])
    )


def test_a_step_that_failed_on_one_rank_is_repeated_with_the_same_bits():
    expected, found = (run_ranks(2, fail_on_rank, failing) for failing in (False, True))
    assert found == expected
    assert found[0] == found[1]


def run_not_finite(rank, ranks, value, devices, place):
    net = build_net()
    inputs, labels = batch(0)
    inputs[place, 0] = value
    step = parallel_step(
        net, devices=["cpu"] * devices, kind=torch.optim.AdamW, max_grad_norm=1.0, **BITS
    )
    rows = rows_of(rank, ranks)
    return bits_of(step, step(inputs[rows], labels[rows]), step.grad_norm)


@pytest.mark.parametrize(("value", "place"), [(float("nan"), 9), (float("inf"), 0)])
def test_values_that_are_not_finite_have_the_same_bits_everywhere(value, place):
    expected = run_not_finite(0, 1, value, 1, place)
    assert run_not_finite(0, 1, value, 3, place) == expected
    for ranks in (2, 3):
        assert run_ranks(ranks, run_not_finite, ranks, value, 1, place) == [expected] * ranks


# State


NUMBERS = torch.Generator().manual_seed(4)
# A rank may import this after a function that has left another default.
INPUTS, VALUES = (
    torch.randn(23, width, generator=NUMBERS, dtype=torch.float32) for width in (4, 5)
)
DATA = INPUTS, class_targets(23, 0), VALUES


def make_moving_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 5))
    model, criterion = parallelize(net, one_count, ["cpu"])
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return TrainStep(model, criterion, optimizer, scheduler=scheduler, max_grad_norm=1.0, **BITS)


def run_updates(step, numbers, rank, ranks):
    """Returns digests of losses and norms of some updates, of 3 to 13 rows."""
    found = []
    for number in numbers:
        rows = range(number, number + 3 + 5 * (number % 3))
        groups = -(-len(rows) // SIZE)
        mine = list(rows[rank * groups // ranks * SIZE : (rank + 1) * groups // ranks * SIZE])
        inputs, *targets = (part[mine] for part in DATA)
        found += [digest(step(inputs, tuple(targets))), digest(step.grad_norm)]
    return found


def go_on(rank, ranks, folder, numbers):
    """Goes on from the newest checkpoint with some updates, and saves one."""
    step = make_moving_step()
    torch.manual_seed(5)
    checkpoints = Checkpoints(folder, step=step)
    checkpoints.load_latest()
    found = run_updates(step, numbers, rank, ranks)
    checkpoints.save(numbers[-1] + 1)
    checkpoints.wait()
    return found


def test_a_checkpoint_goes_on_with_another_number_of_ranks_and_the_same_bits(tmp_path):
    expected = go_on(0, 1, tmp_path / "undisturbed", range(6))
    found = go_on(0, 1, tmp_path / "moved", (0, 1))
    for ranks, numbers in ((3, (2, 3)), (2, (4, 5))):
        first, *others = run_ranks(ranks, go_on, ranks, tmp_path / "moved", numbers)
        assert others == [first] * (ranks - 1)
        found += first
    assert found == expected
    states = []
    for name in ("undisturbed", "moved"):
        step = make_moving_step()
        Checkpoints(tmp_path / name, step=step).load_latest()
        leaves = each_leaf(step.state_dict()["optimizers"])
        states.append([bits_of(step), {place: digest(value) for place, value in leaves}])
    assert states[0] == states[1]


# Refusals


def pairs(output, labels):
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.add = SumOverRows()

    def forward(self, output, labels):
        total = self.add(output.sum(0))
        count = self.add(torch.tensor(float(len(output))))
        return F.cross_entropy(output - total / count, labels)


def count_labels(output, labels):
    return (labels != -100).sum()


def norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))


WORDS = torch.ones(ROWS, 3, dtype=torch.long), class_targets(ROWS)
SIZES = "reproducible='bits' with micro_batch_size=.*expected a number of rows"
WHOLE = "reproducible='bits' with a loss of all rows"
REFUSED = {
    "no number of rows": (SIZES, {"micro_batch_size": None}),
    "any number of rows": (SIZES, {"micro_batch_size": "auto"}),
    "shares": ("reproducible='bits' with split=", {"split": [2, 1]}),
    "costs": ("with cut=ByCost", {"cut": ByCost(len, collate=tuple)}),
    "all rows": (WHOLE, {"criterion": DataParallelCriterion(pairs, whole=True)}),
    "overlap": (WHOLE, {"criterion": DiceLoss()}),
    "batch norm over replicas": (
        "with batch norm or SumOverRows over all rows",
        {"net": convert_sync_batchnorm(norm())},
    ),
    "sums over rows": (
        "SumOverRows",
        {"criterion": DataParallelCriterion(Centered(), weight=count_labels)},
    ),
    "statistics": (
        "with a forward that writes the buffer",
        {"net": norm(), "rows": batch(rows=12)},
    ),
    "sparse": ("sparse", {"net": nn.Sequential(nn.EmbeddingBag(9, 5, sparse=True)), "rows": WORDS}),
    "another word": ("reproducible='bit', expected True, False or 'bits'", {"reproducible": "bit"}),
    "several kinds": ("expected devices of one kind", {"devices": ["sim:0", "cpu"]}),
    "many groups": (
        "with 6 micro-batches, expected 5 at most: give a larger micro_batch_size",
        {"net": build_net()},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_round_in_another_way_is_refused(name, monkeypatch):
    """The error is raised when the step is made, or runs its first batch."""
    message, given = REFUSED[name]
    settings = {"net": build_net(), "rows": batch(), **BITS, **given}
    rows = settings.pop("rows")
    if name == "many groups":
        monkeypatch.setattr(exact, "_MOST_GROUPS", 5)
    with simulate(1), pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        make_step(**settings)(*rows)


@pytest.mark.parametrize(
    ("dtype", "settings"), [(torch.float32, {"fused": True}), (torch.bfloat16, {})]
)
def test_slices_whose_rounding_depends_on_the_cut_are_refused(dtype, settings):
    with simulate(2):
        model = DataParallelModel(build_net().to(dtype), ["sim:0", "sim:1"])
        optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.1, **settings)
        with pytest.raises(
            ValueError, match="fused or has 16-bit parameters.*expected shard='parameters'"
        ):
            TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, **BITS)


def test_kernels_of_gpus_that_sum_in_any_order_are_refused(monkeypatch):
    gpu = torch.device("cuda:0")
    with pytest.raises(RuntimeError, match=r"expected torch.use_deterministic_algorithms\(True\)"):
        exact._check_determinism(gpu)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    exact._check_determinism(gpu)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 1, 2)])
def test_rows_added_between_groups_are_refused(sizes):
    step = make_step(build_net(), **BITS)
    *parts, (inputs, labels) = zip(
        *(each.split([*sizes, ROWS - sum(sizes)]) for each in batch()), strict=True
    )
    for part in parts[: len(sizes) - 1]:
        step.add(*part)
    with pytest.raises(ValueError, match="expected multiples of micro_batch_size=2"):
        step.add(inputs, labels)


def test_a_parameter_of_model_and_criterion_on_several_devices_is_refused():
    with simulate(2):
        net = build_net().to("sim:0")
        head = nn.Linear(5, 5, bias=False)
        head.weight = net[2].bias
        criterion = DataParallelCriterion(nn.Sequential(head), weight=count_labels)
        with pytest.raises(ValueError, match="that model and criterion share on several devices"):
            make_step(net, criterion, sgd(net), devices=range(2), **BITS)


def test_a_state_of_other_groups_is_loaded_with_a_warning():
    state = make_step(build_net(), **BITS).state_dict()
    make_step(build_net(), devices=3, **BITS).load_state_dict(state)
    with pytest.warns(
        UserWarning, match="goes on with .*size': 3.*, but the state was saved with .*size': 2"
    ):
        make_step(build_net(), micro_batch_size=3, reproducible="bits").load_state_dict(state)


def make_rank_step(**settings):
    settings = {"strategy": "ddp", **BITS, **settings}
    return parallel_step(build_net(), devices=["cpu"], **settings)


@on_ranks(2, fresh=True)
def test_ranks_that_would_round_in_another_way_are_refused(rank):
    inputs, labels = batch()
    with pytest.raises(ValueError, match="strategy='fsdp'.*expected strategy='ddp'"):
        make_rank_step(strategy="fsdp")
    step = make_rank_step()
    rows = slice(5) if rank == 0 else slice(5, 11)
    with pytest.raises(
        ValueError,
        match=r"\[5, 6\] rows.*expected multiples of micro_batch_size=2.*RankBatchSampler",
    ):
        step(inputs[rows], labels[rows])
    rows = slice(4) if rank == 0 else slice(4, 11)
    assert torch.isfinite(step(inputs[rows], labels[rows]))  # a refusal changes nothing
    with pytest.raises(ValueError, match="micro_batch_size"):
        make_rank_step(micro_batch_size=2 + rank)(inputs[rows], labels[rows])
    torch.set_num_threads(1 + rank)
    with pytest.raises(ValueError, match="threads"):
        make_rank_step()(inputs[rows], labels[rows])
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.13.{rank}")
        with pytest.raises(ValueError, match="torch"):
            make_rank_step()(inputs[rows], labels[rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_name_of", lambda device: f"GPU {rank}")
        with pytest.raises(ValueError, match="device"):
            make_rank_step()(inputs[rows], labels[rows])
    with pytest.raises(ValueError, match="reproducible"):
        make_rank_step(reproducible="bits" if rank else True)(inputs[rows], labels[rows])
