"""Files for TensorBoard and W&B, of a run that was killed and goes on."""

import json
import sys

import pytest
from helpers.scripts import SCRIPT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture
def charts_of(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    from charts import Charts

    return Charts


def history(out):
    return [json.loads(line) for line in (out / "wandb-history.jsonl").read_text().splitlines()]


def test_killed_run_that_goes_on_from_step_3_has_each_step_once(charts_of, tmp_path):
    first = charts_of(tmp_path, tensorboard=True)
    first.go_back(0)
    for step in range(1, 6):
        first.record(step, {"loss": 10.0 + step})
    first.save()
    with (tmp_path / "wandb-history.jsonl").open("a") as file:
        file.write('{"_step": 6, "_ru')  # the line that was being written
    first.close()

    second = charts_of(tmp_path, tensorboard=True)
    second.go_back(3)
    for step in range(4, 7):
        second.record(step, {"loss": 20.0 + step, "accuracy": 0.5})
    second.close()

    expected = [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0), (6, 26.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == expected
    assert [event.step for event in events.Scalars("accuracy")] == [4, 5, 6]
    lines = history(tmp_path)
    assert [(line["_step"], line["loss"]) for line in lines] == expected
    assert [line["_runtime"] for line in lines] == sorted(line["_runtime"] for line in lines)
    assert all(isinstance(value, int | float) for line in lines for value in line.values())  # flat: W&B draws each


def test_new_run_in_the_folder_of_another_has_its_own_steps_only(charts_of, tmp_path):
    for loss in (1.0, 2.0):
        charts = charts_of(tmp_path, tensorboard=False)
        charts.go_back(0)
        charts.record(1, {"loss": loss})
        charts.close()
    assert [line["loss"] for line in history(tmp_path)] == [2.0]
    assert not (tmp_path / "tensorboard").exists()
