"""Claims of the page about tricks, measured again."""

import re

import torch
from helpers.benchmarks import load
from helpers.pages import ROOT
from helpers.releases import released_at_once
from torch import nn

from balanced_parallel.memory.fitting import measure_tricks


def numbers(claim):
    return [float(number) for number in re.findall(r"-?\d+\.\d+", claim.measured)]


@released_at_once
def test_claims_about_memory_are_measured(monkeypatch):
    claims = load("tricks", monkeypatch).trick_claims
    assert numbers(claims.activations_without_parameters())[-1] > 4
    _, freed, cycle = numbers(claims.emptying_the_cache())
    assert (freed, cycle) == (0, 1)
    in_training, in_evaluation = numbers(claims.running_loss())
    assert in_training < 1 < 1000 < in_evaluation
    below, above = numbers(claims.multiples_of_eight())
    assert below == above


def test_intermediates_do_not_double_in_the_backward(monkeypatch):
    benchmark = load("tricks", monkeypatch)
    first, *_ = benchmark.problems(4)
    claim = benchmark.trick_claims.doubling_in_backward([(first.name, first.module, first.inputs, first.targets)])
    assert 1 < numbers(claim)[0] < 1.9


def test_the_page_has_every_trick_and_claim(monkeypatch):
    benchmark = load("tricks", monkeypatch)
    batch = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    table = measure_tricks(nn.Linear(8, 3), nn.CrossEntropyLoss(), *batch, device_kind="sim")
    problem = benchmark.problems(2)[0]
    page = (ROOT / "benchmarks" / "tricks" / "README.md").read_text()
    for line in benchmark.trick_table([(problem, table)]).splitlines()[2:]:
        assert f"| {line.split('|')[1].strip()} " in page
    for verdict in ("wrong", "exaggerated", "held"):
        assert verdict in page
