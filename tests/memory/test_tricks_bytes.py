"""The table of tricks: the bytes that it names are those that simulated devices measure."""

import json

import pytest
import torch
from helpers.memory_problems import PROBLEMS
from torch import nn

from balanced_parallel import simulate
from balanced_parallel.__main__ import main
from balanced_parallel.memory.tricks import measure_tricks


@pytest.fixture(scope="module")
def table():
    build, batch = PROBLEMS["convolutions"]
    return measure_tricks(build(), nn.CrossEntropyLoss(), *batch(16), optimizer=torch.optim.SGD, device_kind="sim")


def saves(table, start):
    (found,) = [trick.saves for trick in table.tricks if trick.name.startswith(start)]
    return found


def measure(rows=16, pieces=1, keep=False, to_none=True, size=16):
    """Returns the peak of the second of two plain steps."""
    build, batch = PROBLEMS["convolutions"]
    with simulate(1) as cluster:
        net, (_, targets) = build().to("sim:0"), (tensor.to("sim:0") for tensor in batch(rows))
        inputs = torch.zeros(rows, 3, size, size, device="sim:0")
        optimizer, kept = torch.optim.SGD(net.parameters()), None
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad(set_to_none=to_none)
            for some, wanted in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                output = net(some)
                loss = nn.functional.cross_entropy(output, wanted)
                kept = output if keep else None
                del output
                loss.backward()
                del loss
            optimizer.step()
        del kept
        return cluster.peak[0]


def test_bytes_are_those_of_simulated_devices(table):
    peak = measure()
    assert table.peak == pytest.approx(peak, rel=0.02)
    expected = {
        "fewer rows": peak - measure(rows=8),
        "split batches: 2": peak - measure(pieces=2),
        "smaller input": peak - measure(size=8),
        "clearing gradients": measure(to_none=False) - peak,
        "`del` of the output": measure(keep=True) - peak,
    }
    for name, wanted in expected.items():
        assert saves(table, name) == pytest.approx(wanted, abs=0.02 * peak), name


def test_every_trick_has_a_row_and_a_cost(table):
    assert len(table.tricks) == len({trick.name for trick in table.tricks}) >= 22
    assert all(trick.cost for trick in table.tricks)
    assert saves(table, "emptying the cache") == 0
    assert saves(table, "no_grad in evaluation") > 0
    assert saves(table, "half precision") > saves(table, "mixed precision") > 0
    assert saves(table, "offload_activations") == 0  # no tensor is large enough
    (refused,) = [trick for trick in table.tricks if trick.name == "checkpoint_activations"]
    assert refused.saves is None
    assert refused.cost.startswith("not for this model: Sequential writes to its input in place")


def test_the_command_prints_the_table(nets, capsys):
    flags = ["--problem", nets("small"), "--device-kind", "sim", "--optimizer", "sgd"]
    assert main(["tricks", *flags]) == 0
    output = capsys.readouterr().out
    assert "peak without tricks: " in output
    assert "in-place activations" in output
    assert main(["tricks", *flags, "--json", "--devices", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] > 0
    assert {"name", "saves", "cost"} == set(found["tricks"][0])
