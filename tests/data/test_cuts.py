"""Cuts by cost, against all partitions of small batches."""

import math
import random

import pytest

from balanced_parallel.data.cuts import cut_by_cost, cut_to_budget


def padded(costs):
    return len(costs) * max(costs)


def partitions(rows, shards):
    def assign(row, groups):
        if row == rows:
            yield groups
            return
        for group in list(groups):
            group.append(row)
            yield from assign(row + 1, groups)
            group.pop()
        if len(groups) < shards:
            yield from assign(row + 1, [*groups, [row]])

    return assign(0, [])


def largest(groups, costs, combine):
    return max(combine([costs[row] for row in group]) for group in groups)


DRAWS = {
    "whole": lambda numbers: numbers.randint(1, 50),
    "long tail": lambda numbers: numbers.expovariate(1.0),
    "equal": lambda numbers: 5.0,
    "often zero": lambda numbers: numbers.choice([0, 0, 1, 3]),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    ("combine", "limit"),
    [(None, 1.0002), (sum, 1.05), (lambda costs: len(costs) * max(costs) ** 2, 1.0002)],
    ids=["padded", "sum", "own"],
)
def test_largest_cost_is_that_of_the_best_partition(draw, combine, limit):
    numbers = random.Random(0)
    for _ in range(60):
        rows = numbers.randint(1, 7)
        shards = numbers.randint(1, 4)
        costs = [DRAWS[draw](numbers) for _ in range(rows)]
        cut = cut_by_cost(costs, shards, combine)
        assert sorted(row for run in cut for row in run) == list(range(rows))
        assert len(cut) == min(rows, shards)
        assert all(cut)
        best = min(largest(groups, costs, combine or padded) for groups in partitions(rows, shards))
        assert largest(cut, costs, combine or padded) <= limit * best, (costs, shards, cut)


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match="row 2 alone costs 30, expected at most the budget of 24"):
        cut_to_budget([3, 4, 30], 24)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf])
def test_a_cost_out_of_range_is_named(cost):
    for cut in (lambda costs: cut_by_cost(costs, 2), lambda costs: cut_to_budget(costs, 9)):
        with pytest.raises(
            ValueError,
            match=f"the cost of row 1 is {cost}, expected a finite number that is not negative",
        ):
            cut([3, cost])


@pytest.mark.parametrize(
    "combine", [None, sum, lambda costs: sum(costs)], ids=["padded", "sum", "own"]
)
def test_shards_within_a_budget(combine):
    numbers = random.Random(0)
    for _ in range(30):
        costs = [numbers.randint(1, 20) for _ in range(numbers.randint(1, 7))]
        cut = cut_to_budget(costs, 24, combine)
        assert sorted(row for run in cut for row in run) == list(range(len(costs)))
        assert largest(cut, costs, combine or padded) <= 24
        fewest = next(
            n
            for n in range(1, 8)
            if any(largest(g, costs, combine or padded) <= 24 for g in partitions(len(costs), n))
        )
        assert len(cut) <= fewest + (combine is not None)
