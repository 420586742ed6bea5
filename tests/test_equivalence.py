"""Comparison with the plain program: loss and gradients of any split are equal, in float64, to 1e-10."""

import dataclasses
import itertools

import pytest
import torch
from helpers.by_row import Dropping, drawing_by_row
from helpers.optimizers import sgd
from helpers.problems import (
    BODIES,
    LOSSES,
    OnTop,
    assert_equal,
    assert_exact,
    assert_same_gradients,
    gradients,
    make_targets,
    plain_program,
)
from helpers.ranks import run_ranks
from helpers.slow import slow, slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize

pytestmark = pytest.mark.usefixtures("double")

ROWS = [1, 7, 12]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_three_replicas_equal_the_plain_program(name, rows):
    make_criterion, kind = LOSSES[name]
    module = OnTop(name)
    criterion = make_criterion()
    inputs = torch.randn(rows, 4)
    for ignored in (
        [0, rows // 2, -(-rows // 3), rows] if kind == "classes" else [0]
    ):  # among them a whole shard, and all
        assert_exact(module, criterion, inputs, *make_targets(kind, rows, ignored))


CUTS = list(itertools.product(ROWS, [None, 1, 2]))


@pytest.mark.parametrize(("rows", "micro_batch_size"), slow_but(CUTS, (1, 1), (7, 2), most=2))
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_equal_the_plain_program(name, rows, micro_batch_size):
    make_criterion, kind = LOSSES[name]
    module = OnTop(name)
    criterion = make_criterion()
    inputs = torch.randn(rows, 4)
    targets = make_targets(kind, rows, rows // 2)
    loss, expected = plain_program(module, criterion, inputs, targets)
    parameters = [
        *module.parameters(),
        *(criterion.parameters() if isinstance(criterion, torch.nn.Module) else ()),
    ]
    step = TrainStep(
        DataParallelModel(module, ["cpu"] * 3),
        DataParallelCriterion(criterion),
        torch.optim.SGD(parameters, lr=0.1),
        micro_batch_size=micro_batch_size,
    )
    before = [parameter.detach().clone() for parameter in parameters]
    assert_equal(step(inputs, targets), loss)
    assert_same_gradients(gradients(module, criterion), expected)
    for parameter, old, gradient in zip(parameters, before, expected, strict=True):
        assert_equal(parameter, old if gradient is None else old - 0.1 * gradient)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and one way to cut it: rows of each ``add`` on each rank, devices, micro-batches."""

    body: str
    loss: str
    ignored: float
    devices: int
    micro_batch_size: int | None
    windows: list[list[int]]  # Each rank has a list: the rows of what it adds.
    whole: bool  # True if each rank passes all of its rows to step(...) instead.
    dropout: bool = False  # Random numbers follow the rows.


@st.composite
def cases(draw, ranks):
    windows = [draw(st.lists(st.integers(0, 5), max_size=3)) for _ in range(ranks)]
    if sum(map(sum, windows)) == 0:
        windows[draw(st.integers(0, ranks - 1))] = [draw(st.integers(1, 7))]
    dropout = draw(st.booleans())
    return Case(
        body=draw(st.sampled_from(sorted(BODIES))),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.7])),
        devices=draw(st.integers(1, 4)) if ranks == 1 else 1,
        micro_batch_size=draw(st.sampled_from([None, 1, 2, 3])),
        windows=windows,
        whole=draw(st.booleans()) or (dropout and ranks > 1),
        dropout=dropout,
    )


def check_case(rank, case):
    """Compares this rank's loss and gradients with those of the plain program; returns how many gradients there were."""
    make_criterion, kind = LOSSES[case.loss]
    rows = sum(map(sum, case.windows))
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    targets = make_targets(kind, rows, int(case.ignored * rows))
    plain = OnTop(case.loss, case.body)
    module = OnTop(case.loss, case.body)
    plain_criterion = make_criterion()
    criterion = make_criterion()
    if not case.dropout:
        loss, expected = plain_program(plain, plain_criterion, inputs, targets)
    else:
        plain = Dropping(plain)
        module = Dropping(module)
        seed = int(
            torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(7))
        )
        with drawing_by_row(seed, range(rows), lambda count: plain(inputs[:1].expand(count, -1))):
            loss, expected = plain_program(plain, plain_criterion, inputs, targets)
        torch.manual_seed(7 + rank)  # the first rank's seed is that of all

    model, parallel = parallelize(module, criterion, ["cpu"] * case.devices)
    optimizer = sgd(module, parallel, lr=0.0)
    step = TrainStep(
        model,
        parallel,
        optimizer,
        micro_batch_size=case.micro_batch_size,
        reproducible=case.dropout,
    )
    mine = case.windows[rank]
    start = sum(map(sum, case.windows[:rank]))
    if case.whole:
        end = start + sum(mine)
        found = step(inputs[start:end], tuple(target[start:end] for target in targets))
    else:
        for size in mine:
            step.add(
                inputs[start : start + size],
                tuple(target[start : start + size] for target in targets),
            )
            start += size
        found = step.apply()
    assert_equal(found, loss)
    assert_same_gradients(without_zeros(gradients(module, criterion)), without_zeros(expected))
    return len(expected)


def without_zeros(found):
    """A gradient of zeros and none at all are the same update for whoever has nothing to learn: an empty or uncounted shard."""
    return [
        torch.zeros(()) if gradient is None or not gradient.any() else gradient
        for gradient in found
    ]


@pytest.mark.parametrize(("ranks", "examples"), [(1, 40), (2, 10), slow(1, 90), slow(3, 16)])
def test_random_splits_equal_the_plain_program(ranks, examples):
    checked = []

    @settings(max_examples=examples)
    @given(cases(ranks))
    def check(case):
        counts = [check_case(0, case)] if ranks == 1 else run_ranks(ranks, check_case, case)
        checked.append(min(counts))

    check()
    assert len(checked) >= examples
    assert min(checked) > 0
