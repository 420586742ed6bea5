"""Claims of the page about balance, measured again on a small scale."""

import functools

import pytest
from helpers.benchmarks import load
from helpers.releases import released_at_once
from helpers.slow import slow


@pytest.fixture(params=["language", slow("segmentation")])
def measured(request, monkeypatch):
    """The benchmark, and a function of a way of training and a number of devices that returns the measurement."""
    benchmark = load("balance", monkeypatch)
    problem = (
        benchmark.language_problem(words=1024)
        if request.param == "language"
        else benchmark.segmentation_problem()
    )
    return (
        benchmark,
        problem,
        functools.partial(
            benchmark.measure, problem=problem, expected=benchmark.plain_parameters(problem)
        ),
    )


def test_outputs_are_not_copied_to_the_first_device(measured):
    _, problem, measure = measured
    ours, theirs = (measure(name, devices=4) for name in ("balanced_parallel", "nn.DataParallel"))
    size = sum(parameter.nbytes for parameter in problem.module.parameters())
    batch = problem.inputs.nbytes + problem.targets.nbytes
    assert max(ours.through) <= 6 * size + batch + 1024
    assert max(theirs.through) > max(ours.through) + 2 * batch
    assert max(ours.peak) < max(theirs.peak)
    assert max(ours.error, theirs.error) < 1e-10


@released_at_once
def test_balanced_optimizer_balances_peak_memory(measured, request):
    benchmark, problem, measure = measured
    devices = 8 if "language" in request.node.name else 4
    ours, rule = (
        measure(name, devices=devices) for name in ("+ BalancedOptimizer", "loss per replica")
    )
    size = sum(parameter.nbytes for parameter in problem.module.parameters())
    assert max(ours.peak) <= 1.02 * sum(ours.peak) / devices
    assert sum(ours.peak) <= 1.02 * sum(rule.peak)
    # A reduce-scatter and an all-gather, and no broadcast.
    assert max(ours.through) <= (3.6 if devices == 8 else 3.1) * size
    collective, scalars = 2 * (devices - 1), 3 * (devices - 1)  # The scalars are those of the loss.
    assert benchmark.longest_chain(ours.copies) <= 2 * collective + scalars + 2 * (
        devices - 1
    )  # the parameters, twice
    assert ours.error < 1e-10
