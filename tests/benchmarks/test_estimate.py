"""Claims of the page about predicted memory, measured again on a small scale."""

import re

import pytest
from helpers.benchmarks import BENCHMARKS, load
from helpers.releases import released_at_once
from helpers.slow import slow_but

pytestmark = pytest.mark.usefixtures("trace_in_this_process")

TABLES = [
    "| group | cases |",
    "| model | checkpoint |",
    "| model | cpu | h200 |",
    "| layout | model | fp32: first, MiB |",
    "| layout | model | | tensors, MiB |",
    "| model | used, MiB | memory.estimate |",
    "| model | first call, s |",
]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load("estimate", monkeypatch)


BERT = "BERT (transformers)"
SETTINGS = [  # tests/memory/test_estimation.py has all combinations for networks like the first three
    ("MLP", "fp32", False),
    ("GPT", "bf16", True),
    ("MobileNet-like", "bf16", False),
    (BERT, "fp32", False),
]


@pytest.mark.parametrize(("name", "precision", "checkpoint"), slow_but(SETTINGS, SETTINGS[0]))
def test_estimate_equals_the_peak_of_the_allocator(benchmark, name, precision, checkpoint):
    if "transformers" in name:
        pytest.importorskip("transformers")
    problem = benchmark.build(name, rows=2)
    used, error = benchmark.single_error(problem, precision, checkpoint)
    assert used > sum(parameter.nbytes for parameter in problem.module.parameters()) * 3
    assert abs(error) <= benchmark.LIMITS[benchmark.MODELS[name].group]


@pytest.mark.slow
def test_report_extrapolates_to_other_numbers_of_rows(benchmark):
    assert benchmark.rows_error("MLP", "h200", (1, 17)) <= 1e-4


@released_at_once
@pytest.mark.slow
def test_estimate_of_data_parallel_of_torch_equals_the_simulated_peak(benchmark):
    problem, layout = benchmark.build("MLP", rows=64), "torch_data_parallel"
    used = benchmark.layouts.simulated_peaks(problem, layout, False, "fp32")
    guess = benchmark.estimate(problem, layout=layout, devices=4, device_kind="sim").allocated
    assert guess == pytest.approx(used, rel=1e-3)


def test_page_has_all_tables():
    page = re.sub(" +", " ", (BENCHMARKS / "estimate" / "README.md").read_text())
    assert [table for table in TABLES if table not in page] == []
    assert "Environment: " in page
