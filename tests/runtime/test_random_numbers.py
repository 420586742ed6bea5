"""Random numbers of replicas and ranks: different for equal shards, the same for the same seed and layout."""

import itertools

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.steps import parallel_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import DataParallelModel, parallelize, simulate

X = torch.ones(6, 64)
LAYOUTS = [
    ["sim:0", "sim:1", "sim:2"],
    ["sim:1", "sim:0"],
    ["sim:0", "sim:1", "sim:0"],
    ["cpu", "sim:0", "sim:1"],
    ["sim:1"] * 3,
]


def masks(model, x=X):
    return [output.cpu() for output in model(x)]


def are_equal(some, others):
    return all(one.equal(other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_equal_shards_draw_different_numbers_that_follow_the_seed(devices):
    with simulate(3):
        torch.manual_seed(5)
        plain = nn.Dropout()(torch.ones(6 // len(devices), 64, device=devices[0])).cpu()
        torch.manual_seed(5)
        model = DataParallelModel(nn.Dropout(), devices)
        first = masks(model)
        second = masks(model)
        assert first[0].equal(plain)
        assert not any(
            one.equal(other) for one, other in itertools.combinations([*first, *second], 2)
        )
        for _ in range(3):  # again with the same model, and before any of it is made
            torch.manual_seed(5)
            assert are_equal([*masks(model), *masks(model)], [*first, *second])
            model = DataParallelModel(nn.Dropout(), devices)


def test_seeding_each_device_alike_is_enough():
    with simulate(3):
        model = DataParallelModel(nn.Dropout())
        torch.sim.manual_seed_all(7)
        first = masks(model)
        assert not any(one.equal(other) for one, other in itertools.combinations(first, 2))
        torch.sim.manual_seed_all(7)
        assert are_equal(masks(model), first)


def test_states_that_were_set_stay():
    with simulate(3):
        torch.manual_seed(5)
        model = DataParallelModel(nn.Dropout())
        masks(model)
        states = [torch.sim.get_rng_state(index) for index in range(3)]
        of_cpu = torch.get_rng_state()
        expected = masks(model)
        torch.manual_seed(9)
        for index, state in enumerate(states):
            torch.sim.set_rng_state(state, index)
        torch.set_rng_state(of_cpu)
        assert are_equal(masks(model), expected)


def test_a_single_replica_draws_the_numbers_of_the_plain_program_and_seeds_no_device():
    with simulate(3):
        torch.manual_seed(5)
        before = [torch.sim.get_rng_state(index) for index in range(3)]
        plain = nn.Dropout()(X[:1].to("sim:0"))
        torch.manual_seed(5)
        assert masks(DataParallelModel(nn.Dropout()), X[:1])[0].equal(plain.cpu())
        assert all(torch.sim.get_rng_state(index).equal(before[index]) for index in (1, 2))


def test_the_generator_of_the_cpu_stays():
    before = torch.get_rng_state()
    with simulate(3):
        masks(DataParallelModel(nn.Dropout()))
        masks(DataParallelModel(nn.Dropout(), ["sim:0", "cpu", "sim:1"]), X[:1])
    assert torch.get_rng_state().equal(before)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.drop = nn.Dropout()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.drop, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    "devices", [*(each for each in LAYOUTS if "cpu" not in each), ["cpu"] * 3], ids=str
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_numbers_again(devices, use_reentrant):
    with simulate(3):
        model = DataParallelModel(Checkpointed(use_reentrant), devices)
        for _ in range(3):
            x = X.clone().requires_grad_()
            outputs = model(x)
            sum(output.cpu().sum() for output in outputs).backward()
            assert x.grad.equal(outputs.gather("cpu"))


def draw_on_rank(rank):
    with simulate(2):
        model = parallelize(nn.Sequential(nn.Linear(64, 64), nn.Dropout()))
        drawn = []
        for _ in range(2):
            torch.manual_seed(5)
            drawn.append([(mask == 0).tolist() for mask in (*masks(model), *masks(model))])
        torch.manual_seed(5)
        return drawn, (nn.Dropout()(torch.ones(6, 64, device=f"sim:{rank}")) == 0).tolist()


def test_ranks_draw_different_numbers_that_follow_the_seed():
    (drawn, plain), (of_other, _) = run_ranks(2, draw_on_rank, fresh=True)
    assert drawn[0] == drawn[1]
    assert of_other[0] == of_other[1]
    assert drawn[0][0] == plain
    assert drawn[0][0] != drawn[0][1]
    assert drawn[0][0] != of_other[0][0]


def draw_on_cpu_rank(rank, rows):
    model = parallelize(nn.Sequential(nn.Linear(64, 64), nn.Dropout()))
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append([(model(torch.ones(rows[rank], 64))[0] == 0).tolist() for _ in range(2)])
    following = torch.rand(3).tolist()
    model.eval()
    torch.manual_seed(5)
    model(torch.ones(2, 64))
    return drawn, following, torch.rand(3).tolist()


@pytest.mark.parametrize("rows", [(6, 6), (6, 3)])
def test_ranks_on_the_cpu_draw_different_numbers_and_keep_the_generator_alike(rows):
    (drawn, following, evaluated), (of_other, *others) = run_ranks(2, draw_on_cpu_rank, rows)
    assert drawn[0] == drawn[1]
    assert of_other[0] == of_other[1]
    assert drawn[0][0] != drawn[0][1]
    assert drawn[0][0][:3] != of_other[0][0][:3]
    assert [following, evaluated] == others
    torch.manual_seed(5)
    assert evaluated == torch.rand(3).tolist()


class Drawing(nn.Module):
    """Keeps its masks, and refuses rows of nan."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.drop = nn.Dropout()
        self.masks = []

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("nan")
        output = self.drop(self.linear(x))
        self.masks.append((output == 0).tolist())
        return output


def draw_in_updates(rank, strategy):
    step = parallel_step(Drawing(), nn.MSELoss(), strategy=strategy, micro_batch_size=2)
    parts = [torch.ones(rows, 64) for rows in ((5, 2) if rank == 0 else (2, 0))]
    drawn = []
    following = []
    for _ in range(2):
        torch.manual_seed(5)
        step.model.module.masks.clear()
        for rows in parts:  # the second update has no rows on rank 1
            step(rows, rows)
        if strategy == "ddp":  # Other ranks would wait for it if they had shards.
            step.add(parts[0], parts[0])
            if rank == 0:
                with pytest.raises(ValueError, match="nan"):
                    step.add(parts[1] * torch.nan, parts[1])
            else:
                with pytest.raises(RuntimeError, match="1 of 2 ranks failed"):
                    step.apply()
        step.add(parts[0], parts[0])
        step.apply()
        drawn.append([*step.model.module.masks])
        following.append(torch.rand(3).tolist())
    return drawn, following


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_updates_of_ranks_with_any_rows_keep_the_generator_alike(strategy):
    (drawn, following), (of_other, following_of_other) = run_ranks(2, draw_in_updates, strategy)
    assert following[0] == following[1]
    assert following == following_of_other  # it was only that of ranks with as many forwards
    assert drawn[0] == drawn[1]
    assert (
        of_other[0] == of_other[1] or strategy == "fsdp"
    )  # whose first update cuts the rows of this rank into more parts
    masks = [str(mask[:2]) for mask in (*drawn[0], *of_other[0]) if len(mask) > 1]
    assert len({*masks}) == len(masks)
