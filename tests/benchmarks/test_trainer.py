"""The benchmark of the Trainer: its table, for a few heads."""

import re

import pytest
from helpers.benchmarks import BENCHMARKS, load
from helpers.slow import slow


@pytest.mark.filterwarnings(
    "ignore:Was asked to gather along dimension 0:UserWarning"
)  # nn.DataParallel
@pytest.mark.parametrize("head", ["answers", slow("gpt2"), slow("tags")])
def test_measurements_are_those_of_the_page(head, monkeypatch):
    benchmark = load("trainer", monkeypatch)
    alone, ours_alone, parallel, ours = benchmark.measure(head)
    line = re.search(
        rf"^\| `{benchmark.MODELS[head][0]}`.*$",
        (BENCHMARKS / "trainer" / "README.md").read_text(),
        re.MULTILINE,
    )
    numbers = [float(number) for number in re.findall(r"([\d.]+) x", line.group())]
    assert [*alone, *parallel, 1, 1] == pytest.approx(numbers, abs=0.01)
    assert [*ours_alone, *ours] == pytest.approx([1] * 4, rel=1e-4)
