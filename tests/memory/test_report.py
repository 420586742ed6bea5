"""The report of an estimate."""

import dataclasses

import pytest
from helpers.memory_problems import PROBLEMS
from torch.nn import functional as F

from balanced_parallel import memory


@pytest.mark.usefixtures("one_trace")
def test_report_has_timeline_phases_and_source_lines():
    build, batch = PROBLEMS["language model"]
    report = memory.estimate(build(), F.cross_entropy, *batch(24), device_kind="cpu")
    assert max(report.timeline[0]) == report.peak[0]
    assert 0 < report.phases["backward"] < report.phases["update"] < len(report.timeline[0])
    sizes = [holder.bytes for holder in report.where[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert any(holder.module.startswith("layers.") and holder.part == "saved activations" for holder in report.where[0])
    assert any("memory_problems.py:" in holder.line for holder in report.where[0])
    assert report.flops > 0
    for text in ("parameters", "saved activations", "layers.", "MiB"):
        assert text in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rows = 3


@pytest.mark.usefixtures("one_trace")
def test_where_names_the_modules_of_every_replica():
    build, batch = PROBLEMS["language model"]
    settings = {"layout": "replicas", "devices": 2, "device_kind": "cpu"}
    first, second = memory.estimate(build(), F.cross_entropy, *batch(24), **settings).where
    assert any(holder.module.startswith("layers.") for holder in first)
    assert any(holder.module.startswith("layers.") for holder in second)
