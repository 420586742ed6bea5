"""Samplers that choose the rows of an epoch: all ranks draw the same ones from seed and epoch, and cut them."""

from itertools import chain

import numpy as np
import pytest
import torch
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from helpers.steps import parallel_step, train_over
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from balanced_parallel import BalancedBatchSampler, RankBatchSampler

ROWS = 20
COSTS = [1 + 7 * row % 13 for row in range(ROWS)]
WEIGHTS = [0.0] * 12 + [1.0] * 8  # rows 12 to 19 only


class Own(Sampler):
    """Draws rows in an order that depends on the epoch, from a seed of its own."""

    def __init__(self, drawn=ROWS):
        self.drawn = drawn
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.drawn

    def __iter__(self):
        yield from torch.randperm(
            self.drawn, generator=torch.Generator().manual_seed(9 + self.epoch)
        ).tolist()


class Shrinking(Own):
    """Draws fewer rows in each epoch."""

    def __iter__(self):
        return iter(range(self.drawn - self.epoch))


class OfGlobalNumbers(Sampler):
    """Draws from torch's generator, and says so in no way."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())


class OfNumpy(OfGlobalNumbers):
    """Draws from numpy's generator, although it has the attribute of one of torch."""

    generator = None

    def __iter__(self):
        return iter(np.random.permutation(ROWS).tolist())


class Endless(Sampler):
    """A sampler without a length."""

    generator = None

    def __iter__(self):
        yield 0


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, ROWS),
    "with generator": lambda: WeightedRandomSampler(
        WEIGHTS, ROWS, generator=torch.Generator().manual_seed(4)
    ),
    "subset": lambda: SubsetRandomSampler(range(8, ROWS)),
    "all": lambda: RandomSampler(range(ROWS)),
    "replacement": lambda: RandomSampler(range(ROWS), replacement=True, num_samples=31),
    "own": Own,
}


def make_samplers(sampler, ranks, *, is_balanced=False):
    if is_balanced:
        return [
            BalancedBatchSampler(COSTS, 8, 0, sampler=sampler(), rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
    return [RankBatchSampler(sampler(), 8, 0, rank=rank, ranks=ranks) for rank in range(ranks)]


def epoch_of(samplers):
    """Returns the effective batches of an epoch, sorted, and advances."""
    batches = [sorted(chain(*parts)) for parts in zip(*samplers, strict=True)]
    for sampler in samplers:
        for _ in batches:
            sampler.advance()
    return batches


@pytest.mark.parametrize("is_balanced", [False, True], ids=["equal rows", "equal cost"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_cut_the_same_rows_in_every_epoch(name, is_balanced):
    sampler = SAMPLERS[name]
    one, several = (make_samplers(sampler, ranks, is_balanced=is_balanced) for ranks in (1, 3))
    torch.manual_seed(5)
    epochs = [epoch_of(one) for _ in range(3)]
    torch.manual_seed(6)  # The order does not follow the state of the program.
    assert [epoch_of(several) for _ in range(3)] == epochs
    assert len({str(batches) for batches in epochs}) == 3
    assert {len([*chain(*batches)]) for batches in epochs} == {len(sampler())}
    drawn = {*chain(*chain(*epochs))}
    first = {"weighted": 12, "with generator": 12, "subset": 8}.get(name, 0)
    assert drawn <= {*range(first, ROWS)}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_position_continues_in_the_middle_of_an_epoch_with_other_ranks(name):
    whole = make_samplers(SAMPLERS[name], 1)
    after = make_samplers(SAMPLERS[name], 3, is_balanced=name != "replacement")
    expected = epoch_of(whole) + epoch_of(whole)
    (before,) = make_samplers(SAMPLERS[name], 1)
    before.advance()
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    assert epoch_of(after) + epoch_of(after) == expected[1:]


def test_generators_keep_their_state():
    own = torch.Generator().manual_seed(4)
    sampler = RankBatchSampler(WeightedRandomSampler(WEIGHTS, ROWS, generator=own), 8, seed=1)
    torch.manual_seed(5)
    states = own.get_state(), torch.get_rng_state()
    first = list(sampler)
    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    of_generator = RankBatchSampler(WeightedRandomSampler(WEIGHTS, ROWS, generator=own), 8)
    assert of_generator.seed == 4
    assert first != list(of_generator)


def test_a_position_of_another_sampler_raises_an_error():
    state = RankBatchSampler(RandomSampler(range(ROWS)), 8, seed=0).state_dict()
    for other in (range(ROWS), Own(), SubsetRandomSampler(range(ROWS))):
        with pytest.raises(ValueError, match="saved with .*'sampler': 'RandomSampler'}, expected"):
            RankBatchSampler(other, 8, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="'rows': 20, .* expected {'rows': 12"):
        RankBatchSampler(RandomSampler(range(12)), 8, seed=0).load_state_dict(state)


NOT_SEEDED = ", expected the data set, or a sampler that draws its rows one by one, for all ranks, from a torch.Generator"
REFUSED = {
    f"a OfGlobalNumbers was given{NOT_SEEDED}": OfGlobalNumbers,
    f"a SequentialSampler was given{NOT_SEEDED}": lambda: SequentialSampler(range(ROWS)),
    f"a DistributedSampler was given{NOT_SEEDED}": lambda: DistributedSampler(range(ROWS), 2, 0),
    f"a BatchSampler was given{NOT_SEEDED}": lambda: BatchSampler(
        SequentialSampler(range(ROWS)), 4, False
    ),
    f"a RankBatchSampler was given{NOT_SEEDED}": lambda: RankBatchSampler(range(ROWS), 4),
    "with a length": Endless,
}


@pytest.mark.parametrize("message", REFUSED)
def test_samplers_that_ranks_cannot_draw_alike_raise_an_error(message):
    for make in (
        RankBatchSampler,
        lambda *args: BalancedBatchSampler(COSTS, *args[1:], sampler=args[0]),
    ):
        with pytest.raises(TypeError, match=message):
            make(REFUSED[message](), 8, 0)


def test_other_errors_of_samplers():
    loader = DataLoader(range(ROWS))
    with pytest.raises(TypeError, match=f"a DataLoader was given{NOT_SEEDED}"):
        RankBatchSampler(loader, 8, 0)
    with pytest.raises(
        TypeError, match="costs is a RandomSampler, expected the cost .* as sampler="
    ):
        BalancedBatchSampler(RandomSampler(range(ROWS)), 8)
    with pytest.raises(TypeError, match="sampler=.*, expected a sampler of rows"):
        BalancedBatchSampler(COSTS, 8, sampler=loader)
    with pytest.raises(
        TypeError, match="WeightedRandomSampler and seed=None were given, expected an integer"
    ):
        RankBatchSampler(WeightedRandomSampler(WEIGHTS, ROWS), 8)
    with pytest.raises(ValueError, match="the OfNumpy drew other rows from the same seed"):
        list(RankBatchSampler(OfNumpy(), 8, 0))
    with pytest.raises(ValueError, match="drew rows from 0 to 29, and there are 20 costs"):
        list(BalancedBatchSampler(COSTS, 8, 0, sampler=Own(30)))
    shrinking = RankBatchSampler(Shrinking(), 8, 0)
    epoch_of([shrinking])
    with pytest.raises(
        ValueError, match="drew 19 entries in epoch 1, .*expected 20 rows in each epoch"
    ):
        list(shrinking)


TRAINED = {
    "drawn": lambda: RankBatchSampler(WeightedRandomSampler(WEIGHTS, ROWS), 6, seed=0),
    "equal cost": lambda: BalancedBatchSampler(COSTS, 8, seed=0),
}


def losses_of(rank, name):
    torch.manual_seed(rank)
    return train_over(TRAINED[name](), ROWS)


def fail_with_weights_of(rank):
    step = parallel_step(build_net(), devices=["cpu"])
    sampler = RankBatchSampler(
        WeightedRandomSampler([*range(1 + 9 * rank, ROWS + 1 + 9 * rank)], ROWS), 6, seed=0
    )
    rows = next(iter(sampler))
    with pytest.raises(ValueError, match=r"sampler=WeightedRandomSampler, .*\) with order"):
        step(torch.randn(len(rows), 4), class_targets(len(rows)))


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_train_as_one_process(name):
    losses = losses_of(0, name)
    for losses_of_rank in run_ranks(2, losses_of, name):
        assert losses_of_rank == pytest.approx(losses, rel=1e-10)


def test_ranks_with_other_weights_raise_an_error():
    run_ranks(2, fail_with_weights_of, fresh=True)
