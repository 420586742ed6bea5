"""The command ``tricks``: the bytes that it names are those that simulated devices measure."""

import re

import pytest
import torch
from helpers.memory_problems import PROBLEMS, estimated, peak_of_updates
from torch import nn

from balanced_parallel import simulate
from balanced_parallel.__main__ import main
from balanced_parallel.memory.fitting import saved_bytes
from balanced_parallel.memory.savings import PLANNED


def table_of(problem, savings, devices=1, **settings):
    """Returns the peak of a step, and by name the bytes that each saving takes off it."""
    layout = "single" if devices == 1 else "replicas"
    report = estimated(
        problem,
        16,
        nn.CrossEntropyLoss(),
        devices=devices,
        layout=layout,
        device_kind="sim",
        **settings,
    )
    peak = max(report.allocated)
    saved = saved_bytes(report.batches.request, 16, peak, savings)
    return peak, {planned.saving.name: size for planned, size in saved.items()}


def measure(pieces):
    """Returns the peak of the second of two plain steps."""
    build, batch = PROBLEMS["convolutions"]
    with simulate(1) as cluster:
        net = build().to("sim:0")
        optimizer = torch.optim.SGD(net.parameters())

        def step(inputs, targets):
            optimizer.zero_grad()
            for rows, classes in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                nn.functional.cross_entropy(net(rows), classes).backward()
            optimizer.step()

        return peak_of_updates(cluster, step, *[tensor.to("sim:0") for tensor in batch(16)])[0]


def test_every_saving_that_suits_the_step_is_traced_and_bytes_are_those_of_simulated_devices():
    peak, saved = table_of("convolutions", PLANNED, optimizer=torch.optim.SGD)
    measured = measure(1)
    assert peak == pytest.approx(measured, rel=0.02)
    assert saved["2 micro-batches"] == pytest.approx(measured - measure(2), abs=0.02 * measured)
    assert list(saved) == [each.saving.name for each in PLANNED if each.saving.name in saved]
    assert saved['precision="bf16"'] > 0
    assert saved["offload_activations"] == 0  # no tensor is large enough
    assert saved.keys().isdisjoint(['strategy="fsdp"', "replace_lm_head"])
    assert not [
        name for name in saved if name.startswith("another optimizer")
    ]  # none has less state than SGD


def test_the_command_prints_the_table_and_writes_the_page_of_the_step(nets, tmp_path, capsys):
    page = tmp_path / "step.html"
    flags = f"tricks --problem {nets('small')} --device-kind sim --optimizer sgd --html {page}"
    assert main(flags.split()) == 0
    peak, table, others = capsys.readouterr().out.split("\n\n")
    assert peak.startswith("peak without tricks: ")
    header, _, *rows = table.splitlines()
    assert re.split(" {2,}", header) == ["trick", "saves", "of the peak", "cost"]
    traced = [re.split(" {2,}", row)[0] for row in rows]
    others, wrote = others.splitlines()
    start, _, names = others.partition(": ")
    assert start == "not traced for this step"
    assert sorted([*traced, *names.split(", ")]) == sorted(each.saving.name for each in PLANNED)
    assert "another optimizer: SGD" not in traced
    assert wrote == f"wrote {page}"
    assert "Options of the plan" not in page.read_text()
