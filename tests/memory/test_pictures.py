"""Pictures of a report."""

import pytest
import torch
from torch import nn

from balanced_parallel import memory
from balanced_parallel.memory import pictures


def test_draw_report_writes_png_and_svg(tmp_path):
    settings = {"layout": "replicas", "devices": 2, "device_kind": "cpu"}
    report = memory.estimate(nn.Linear(64, 3), nn.CrossEntropyLoss(), torch.empty(8, 64), torch.zeros(8).long(), **settings)
    pictures.draw_report(tmp_path / "a.png", report, ["64KiB", 2**20])
    pictures.draw_report(tmp_path / "b.svg", report)
    pictures.draw_report(tmp_path / "c.png", report, 1)  # not one row
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="3 sizes for 2 devices"):
        pictures.draw_report(tmp_path / "d.png", report, [1, 2, 3])
