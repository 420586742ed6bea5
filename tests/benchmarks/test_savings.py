"""Claims of the page about savings, measured again on a small scale."""

import pytest
from helpers.benchmarks import load
from helpers.ranks import run_ranks

# The largest part of the plain peak that each takes.
TRAINING = dict.fromkeys(
    ["checkpoint_activations", "offload_activations", "LinearCrossEntropy"], 0.9
)
EVALUATION = {"inference": 0.5}


@pytest.fixture
def benchmark(monkeypatch):
    module = load("savings", monkeypatch)
    assert module.TRAINING.keys() == TRAINING.keys()
    assert module.EVALUATION.keys() == EVALUATION.keys()
    return module


@pytest.mark.parametrize(
    ("kind", "name", "most"),
    [("training", *each) for each in TRAINING.items()]
    + [("evaluation", *each) for each in EVALUATION.items()],
)
def test_savings_lower_the_peak_and_keep_the_result(benchmark, kind, name, most):
    change = getattr(benchmark, kind.upper())[name]
    assert benchmark.peak(benchmark.QUICK, kind, change) <= most * benchmark.peak(
        benchmark.QUICK, kind
    )
    assert benchmark.error(kind, change) <= 1e-10


def test_all_pairs_keep_the_result(benchmark):
    pairs = benchmark.pairs_of(benchmark.TRAINING)
    assert len(pairs) == len(TRAINING) * (len(TRAINING) - 1) / 2
    assert max(off for _, off in pairs) <= 1e-10


def check_ranks(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        benchmark = load("savings", monkeypatch)
        alone = [
            benchmark.error("training", change, ranks=True)
            for change in benchmark.TRAINING.values()
        ]
        alone += [
            benchmark.error("evaluation", change, ranks=True)
            for change in benchmark.EVALUATION.values()
        ]
        return max(
            [*alone, *(off for _, off in benchmark.pairs_of(benchmark.TRAINING, ranks=True))]
        )


@pytest.mark.slow
def test_ranks_keep_the_result():
    assert max(run_ranks(2, check_ranks)) <= 1e-10


def test_an_error_would_be_seen(benchmark):
    def scaled(program):
        program.net.embedding.weight.data *= 1 + 1e-8

    assert benchmark.error("training", scaled) > 1e-9


@pytest.mark.slow
def test_a_head_needs_a_fifth_of_the_memory(benchmark):
    plain, *others = benchmark.head_numbers(words=4096, tokens=4096, width=64, rounds=1)
    assert plain[1] >= 3 * 4096 * 4096 * 4 * 0.99
    assert others[-1][0] == "savings.LinearCrossEntropy"
    assert others[-1][1] <= 0.2 * plain[1]


def test_page_has_all_rows(benchmark):
    page = (benchmark.HERE / "README.md").read_text()
    assert [
        name
        for name in [*TRAINING, *EVALUATION, "savings.LinearCrossEntropy"]
        if f"| {name} " not in page
    ] == []
    assert "Environment: " in page
