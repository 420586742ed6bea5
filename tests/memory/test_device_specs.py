"""Constants of GPUs."""

import functools

import pytest
from helpers.memory_problems import PROBLEMS, LanguageModel
from torch.nn import functional as F

from balanced_parallel import memory


@pytest.mark.usefixtures("one_trace")
def test_gpu_estimate_has_smaller_activations_and_assumed_workspace():
    build, batch = functools.partial(LanguageModel, 0.1), PROBLEMS["language model"][1]
    reports = {kind: memory.estimate(build(), F.cross_entropy, *batch(24), device_kind=kind) for kind in ("cpu", "sim", "h200")}
    assert reports["h200"].parts[0]["saved activations"] < 0.8 * reports["cpu"].parts[0]["saved activations"]  # masks, attention
    assert reports["h200"].parts[0]["workspace"] == 4096 * 8 * 1024
    assert set(reports["h200"].assumed) == {"workspace", "context"}
    assert all("assumed" in source for source in reports["h200"].assumed.values())
    assert reports["h200"].reserved[0] >= reports["h200"].peak[0]
    assert not reports["cpu"].assumed
