"""Claims of the page about balance, measured again on a small scale."""

import pytest
from helpers.benchmarks import load
from helpers.releases import released_at_once
from helpers.slow import slow

from balanced_parallel import simulate


@pytest.mark.parametrize("problem", ["language_problem", slow("segmentation_problem")])
def test_outputs_are_not_copied_to_the_first_device(problem, monkeypatch):
    benchmark = load("balance", monkeypatch)
    problem = getattr(benchmark, problem)()
    expected = benchmark.plain_parameters(problem)
    ours, theirs = (benchmark.measure(name, problem, 4, expected) for name in ("balanced_parallel", "nn.DataParallel"))
    size = sum(parameter.nbytes for parameter in problem.module.parameters())
    batch = problem.inputs.nbytes + problem.targets.nbytes
    assert max(ours.through) <= 6 * size + batch + 1024
    assert max(theirs.through) > max(ours.through) + 2 * batch
    assert max(ours.peak) < max(theirs.peak)
    assert max(ours.error, theirs.error) < 1e-10


@released_at_once
@pytest.mark.parametrize(("problem", "devices"), [("language_problem", 8), slow("segmentation_problem", 4)])
def test_balanced_optimizer_balances_peak_memory(problem, devices, monkeypatch):
    benchmark = load("balance", monkeypatch)
    problem = getattr(benchmark, problem)()
    expected = benchmark.plain_parameters(problem)
    ours, rule = (benchmark.measure(name, problem, devices, expected) for name in ("+ BalancedOptimizer", "loss per replica"))
    size = sum(parameter.nbytes for parameter in problem.module.parameters())
    assert max(ours.peak) <= 1.02 * sum(ours.peak) / devices
    assert sum(ours.peak) <= 1.02 * sum(rule.peak)
    shards = 4 * (devices - 1) / devices * size  # reduce-scatter and all-gather
    refresh = (
        2 * size + size / devices
    )  # before the forward each device receives and sends on; before the update the owners' pieces
    assert max(ours.through) <= 1.02 * (shards + refresh)
    collective, scalars = 2 * (devices - 1), 3 * (devices - 1)  # of the loss
    assert benchmark.longest_chain(ours.copies) <= 2 * collective + scalars + 2 * (devices - 1)  # the parameters, twice
    assert ours.error < 1e-10


def test_categories_add_up_to_the_peak_of_every_device(monkeypatch):
    benchmark = load("balance", monkeypatch)
    for name in benchmark.WAYS:
        with simulate(3) as cluster:
            benchmark.train(name, benchmark.language_problem(), cluster)
        assert [sum(cluster.categories(index).values()) for index in range(3)] == cluster.peak
