"""``TrainStep(reproducible="bits")``: random trainings have the same bits in all layouts."""

import pytest
import torch
from helpers.exact import (
    Layout,
    differences,
    draw_layouts,
    draw_problem,
    train,
    train_all,
    train_values,
)
from helpers.ranks import run_ranks
from helpers.slow import slow

ONE = Layout()
# Several threads of several ranks are slow where they share few cores.
FEW = [seed for seed in range(25) if draw_problem(seed).threads == 1]
MANY = range(25, 40)
NAMED = {"ids": lambda seeds: f"{seeds[0]}-{seeds[-1]}"}


def draw_problems(seeds):
    """Returns problems. Those of a short test have two updates, and short pauses."""
    problems = [draw_problem(seed) for seed in seeds]
    if len(seeds) >= 20:
        return problems
    return [problem._replace(rows=problem.rows[:2], pause=0.0005) for problem in problems]


def describe(problem, layout, rank, names):
    return f"{problem}\n  {layout}, rank {rank}: {len(names)} differ, such as {names[:5]}"


def compare(problems, cases, results, expected):
    """Returns how many results were compared, and a text for each with other bits. ``results`` are those of each rank."""
    failures = []
    count = 0
    for rank, found in enumerate(results):
        for (problem, layout), digests in zip(cases, found, strict=True):
            names = differences(digests, expected[problem.seed], rank)
            failures += [describe(problem, layout, rank, names)] if names else []
            count += 1
    return count, failures


def check(seeds, replicas, ranks):
    """Compares layouts of each problem, ``replicas`` of one process and ``ranks`` of several, with one device."""
    problems = draw_problems(seeds)
    expected = {problem.seed: train(0, problem, ONE) for problem in problems}
    cases = [
        (problem, layout)
        for problem in problems
        for layout in draw_layouts(problem, "replicas", 1 + replicas)[1:]
    ]
    counted, failures = compare(problems, cases, [train_all(0, cases)], expected)
    everywhere = [
        (problem, layout)
        for problem in problems
        for layout in draw_layouts(problem, "ranks", ranks)
    ]
    for size in (2, 3):
        cases = [(problem, layout) for problem, layout in everywhere if layout.ranks == size]
        count, others = compare(
            problems, cases, run_ranks(size, train_all, cases, timeout=600), expected
        )
        assert count, f"no layout of {size} ranks"
        counted += count
        failures += others
    assert counted >= len(problems) * (replicas + 2 * ranks)
    assert not failures, f"{len(failures)} of {counted} differ:\n" + "\n".join(failures)


@pytest.mark.parametrize("seeds", [FEW[:10]], **NAMED)
def test_layouts_have_the_same_bits(seeds):
    check(seeds, 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_layouts_have_the_same_bits():
    check(MANY, 2, 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [FEW[:5], slow(range(200, 210))], **NAMED)
def test_simulated_devices_have_the_same_bits_among_each_other(seeds):
    failures = []
    for problem in draw_problems(seeds):
        # The parameters move with the last output, and a state would stay behind.
        if problem.loss == "uncertainty":
            problem = problem._replace(optimizer="SGD")
        first, *others = draw_layouts(problem, "simulated", 3 if len(seeds) < 20 else 5)
        expected = train(0, problem, first)
        for layout in others:
            names = differences(train(0, problem, layout), expected)
            failures += [describe(problem, layout, 0, names)] if names else []
    assert not failures, f"{len(failures)} differ:\n" + "\n".join(failures)


@pytest.mark.parametrize("seeds", [FEW[15:], slow(range(20))], **NAMED)
def test_losses_and_norms_are_those_of_rows_without_exact_sums(seeds):
    """``reproducible=True`` computes them in another way, on the whole batch at once."""
    compared = 0
    for problem in draw_problems(seeds):
        if problem.dtype != torch.float64:
            continue
        expected = train_values(0, problem._replace(reproducible=True, micro_batch_size=None), ONE)
        found = train_values(0, problem, Layout(in_turn=(("cpu",) * 3,)))
        for name, value in found.items():
            if name.startswith(("loss", "grad_norm")):
                torch.testing.assert_close(
                    value,
                    expected[name],
                    rtol=1e-8,
                    atol=1e-10,
                    equal_nan=True,
                    msg=f"{problem}: {name}",
                )
                compared += 1
    assert compared >= len(seeds) / 4


def test_two_threads_have_the_same_bits_in_all_layouts():
    problem = draw_problem(
        0, net="Bag", threads=2, width=128, rows=(40,), micro_batch_size=24, dtype=torch.float32
    )
    expected = train(0, problem, ONE)
    assert not differences(train(0, problem, Layout(in_turn=(("cpu",) * 3,))), expected)
    # The number of threads matters here.
    assert differences(train(0, problem._replace(threads=1), ONE), expected)
