"""Predictions of the page about published measurements, made again for its small programs."""

import pytest
from helpers.benchmarks import BENCHMARKS, load
from helpers.slow import slow_but

pytestmark = pytest.mark.usefixtures("trace_in_this_process")
EXACT = [
    "LayerNorm of 4096 x 1024",
    "cross entropy of 16384 x 4096",
    "20 linear layers, DDP, Adam, ZeRO-1 of 2",
    "MLP of Llama, silu, 4 x 1024",
]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return load("published", monkeypatch)


@pytest.mark.parametrize("name", slow_but(EXACT, *EXACT[:2]))
def test_prediction_equals_the_published_number(benchmark, name):
    row = next(row for row in benchmark.ROWS if row.name == name)
    assert abs(benchmark.difference(row, benchmark.predict(row))) <= 2e-3


def test_page_has_every_row_and_explains_large_differences(benchmark):
    page = (BENCHMARKS / "published" / "README.md").read_text()
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| ")
    ][1:]
    assert [line[1] for line in lines[: len(benchmark.ROWS)]] == [
        row.name for row in benchmark.ROWS
    ]
    assert all(reason for *_, error, reason in lines if abs(float(error.rstrip("%"))) > 5)
