"""Progress of a plan: lines on a terminal, none elsewhere."""

import sys

import pytest
import torch
from torch import nn

from balanced_parallel import memory
from balanced_parallel.__main__ import main
from balanced_parallel.memory.progress import telling

BATCH = torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)
SETTINGS = {"batch_size": 8, "device_kind": "sim", "capacity": "8KiB"}


def test_each_stage_is_told_before_it_is_traced():
    steps = []
    with telling(steps.append):
        plan = memory.plan(nn.Linear(16, 8), nn.CrossEntropyLoss(), *BATCH, **SETTINGS)
    assert not plan.fits
    assert steps[0] == "replicas"
    assert {name for step in steps for name in step.split("; ")} >= {choice.name for choice in plan.choices}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_plan_on_a_terminal_prints_what_it_tries(tmp_path, monkeypatch, capsys, is_terminal):
    result = "nn.Linear(16, 8), nn.CrossEntropyLoss(), torch.zeros(8, 16), torch.zeros(8, dtype=int)"
    (tmp_path / "small_net.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef build():\n    return {result}\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    flags = ["--device-kind", "sim", "--memory", "8KiB"]
    assert main(["plan", "--problem", f"{tmp_path}/small_net.py:build", *flags]) == 1
    output, errors = capsys.readouterr()
    assert ("trying: replicas\n" in errors) == is_terminal
    assert "trying" not in output


def test_a_stage_without_activations_in_place_is_left_out():
    """On a GPU the mask of dropout in place is wider than the result that it saves."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 8))
    plan = memory.plan(net, nn.CrossEntropyLoss(), *BATCH, **SETTINGS)
    assert not any(choice.inplace or "in-place" in choice.name for choice in plan.choices)
