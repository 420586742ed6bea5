"""Snapshots of an estimate, as torch's memory visualiser reads them."""

import dataclasses
import pickle

import pytest
from helpers.memory_problems import PROBLEMS
from torch import nn
from torch.cuda import _memory_viz

from balanced_parallel import memory


@pytest.fixture
def snapshot(tmp_path, one_trace):
    """Returns a report of two devices, and the snapshot that it has written."""
    build, batch = PROBLEMS["language model"]
    settings = {"layout": "replicas", "devices": 2, "device_kind": "h200"}
    report = memory.estimate(build(), nn.CrossEntropyLoss(), *batch(8), **settings)
    report.save_snapshot(tmp_path / "snapshot.pickle")
    return report, pickle.loads((tmp_path / "snapshot.pickle").read_bytes())


def live_bytes(events):
    """Yields the bytes in use after each event, and checks that no two allocations overlap."""
    live = {}
    for event in events:
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= other or start >= other + size for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
        yield sum(-(-size // 512) * 512 for size in live.values())


def test_events_of_each_device_reach_the_peak_of_the_report(snapshot):
    report, found = snapshot
    for device, events in enumerate(found["device_traces"]):
        assert max(live_bytes(events)) + report.parts[device]["rounding"] == pytest.approx(report.allocated[device], rel=0.001)


def test_events_name_modules_and_lines(snapshot):
    frames = [event["frames"][0] for event in snapshot[1]["device_traces"][0]]
    assert any(
        frame["filename"].endswith(".py") and frame["line"] > 0 and "embedding" not in frame["filename"] for frame in frames
    )
    assert {"parameters", "gradients", "optimizer state"} <= {event["category"] for event in snapshot[1]["device_traces"][0]}


def test_tools_of_torch_read_it(snapshot):
    _, found = snapshot
    assert "Device 1" in _memory_viz.trace(found)
    assert "segments" in _memory_viz.segsum(found).lower()
    assert "snapshot" in _memory_viz.trace_plot(found)


def test_a_report_from_a_file_has_no_snapshot(snapshot, tmp_path):
    report = dataclasses.replace(snapshot[0], _batches=None)
    with pytest.raises(ValueError, match="this report was read from a file"):
        report.save_snapshot(tmp_path / "other.pickle")
