"""The table of tricks: the bytes that it names are those that simulated devices measure."""

import json

import pytest
import torch
from helpers.memory_problems import PROBLEMS
from torch import nn

from balanced_parallel import simulate
from balanced_parallel.__main__ import main
from balanced_parallel.memory.fitting import measure_tricks
from balanced_parallel.savings.saving import all_savings


@pytest.fixture(scope="module")
def table():
    build, batch = PROBLEMS["convolutions"]
    return measure_tricks(build(), nn.CrossEntropyLoss(), *batch(16), optimizer=torch.optim.SGD, device_kind="sim")


def saves(table, start):
    (found,) = [trick.saves for trick in table.tricks if trick.name.startswith(start)]
    return found


def measure(pieces):
    """Returns the peak of the second of two plain steps."""
    build, batch = PROBLEMS["convolutions"]
    with simulate(1) as cluster:
        net, (inputs, targets) = build().to("sim:0"), (tensor.to("sim:0") for tensor in batch(16))
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            for rows, classes in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                nn.functional.cross_entropy(net(rows), classes).backward()
            optimizer.step()
        return cluster.peak[0]


def test_bytes_are_those_of_simulated_devices(table):
    peak = measure(1)
    assert table.peak == pytest.approx(peak, rel=0.02)
    assert saves(table, "2 micro-batches") == pytest.approx(peak - measure(2), abs=0.02 * peak)


def test_every_saving_of_a_plan_has_a_row_and_a_cost(table):
    build, batch = PROBLEMS["perceptron"]
    several = measure_tricks(build(), nn.CrossEntropyLoss(), *batch(16), devices=2, device_kind="sim")
    names = [trick.name for trick in several.tricks]
    assert names == [saving.name for saving in all_savings()]
    assert saves(several, "BalancedOptimizer") > 0
    assert saves(several, 'strategy="fsdp"') > 0
    assert saves(several, "offload_optimizer") > 0
    assert all(trick.cost for trick in (*table.tricks, *several.tricks))
    assert saves(table, 'precision="bf16"') > 0
    assert saves(table, "offload_activations") == 0  # no tensor is large enough
    assert 'strategy="fsdp"' not in [trick.name for trick in table.tricks]  # on one device
    (refused,) = [trick for trick in table.tricks if trick.name == "replace_lm_head"]
    assert refused.saves is None
    assert refused.cost.startswith("not for this model: a causal model of transformers")


def test_the_command_prints_the_table(nets, capsys):
    flags = ["--problem", nets("small"), "--device-kind", "sim", "--optimizer", "sgd"]
    assert main(["tricks", *flags]) == 0
    output = capsys.readouterr().out
    assert "peak without tricks: " in output
    assert "another optimizer" not in output  # none has less state than SGD
    assert main(["tricks", *flags, "--json", "--devices", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] > 0
    assert {"name", "saves", "cost"} == set(found["tricks"][0])
