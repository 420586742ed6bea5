"""The main job on simulated GPUs, compared with the plain program and ``nn.DataParallel``."""

import json

import pytest
from helpers.scripts import run, train


@pytest.mark.slow
def test_simulated_gpus_print_losses_and_memory_and_write_the_plot(tmp_path):
    flags = ["--simulate", 4, "--memory", "2GiB", "--steps", 3, "--batch-size", 8, "--vocabulary", 500]
    output, lines, summary = train(tmp_path / "sim", *flags, "--plot", tmp_path / "plots" / "peak.png")
    assert summary["devices"] == [f"sim:{index}" for index in range(4)]
    table = [line.split() for line in output.splitlines() if line.lstrip().startswith("sim:")]
    assert [row[0] for row in table] == summary["devices"]
    assert "optimizer state" in output
    assert (tmp_path / "plots" / "peak.png").read_bytes().startswith(b"\x89PNG")
    losses = [line["loss"] for line in lines if "loss" in line]
    speed = [json.loads(line) for line in (tmp_path / "sim" / "speed.jsonl").read_text().splitlines()]
    assert [line["waits"] for line in speed][1:] == [1, 1]  # the loss
    assert "waits for a GPU: 1" in output
    for step in (1, 2, 3):
        plain, ours = side_by_side(output)[step]
        assert plain == pytest.approx(losses[step - 1], rel=1e-4)
        assert ours == pytest.approx(losses[step - 1], abs=1e-6)
    rows = [line.split() for line in output.partition("MiB at the peak of an update")[2].splitlines()]
    peaks = {
        row[0]: [float(word) for word in row[1:]] for row in rows if row and row[0] in ("nn.DataParallel", "balanced_parallel")
    }
    assert [len(row) for row in peaks.values()] == [5, 5]
    assert peaks["nn.DataParallel"][-1] > 1.5  # the hottest over the mean
    assert peaks["balanced_parallel"][-1] < 1.1


def side_by_side(output):
    """Returns the two losses of each step that the script compares."""
    words = [line.split() for line in output.partition("The loss of the same steps")[2].splitlines()]
    return {int(row[0]): (float(row[1]), float(row[2])) for row in words if len(row) == 3 and row[0].isdecimal()}


@pytest.mark.slow
def test_missing_compiler_falls_back_to_cpu_replicas(tmp_path):
    flags = ["--simulate", 3, "--task", "digits", "--steps", 2, "--plot", tmp_path / "peak.png", "--out", tmp_path / "run"]
    nowhere = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CXX": ""}
    done = run(*flags, **nowhere)
    assert done.returncode == 0, done.stderr
    assert "found no compiler" in done.stdout
    assert "Running 3 replicas on the CPU instead. Their memory is estimated." in done.stdout
    plain, ours = side_by_side(done.stdout)[2]
    assert ours == pytest.approx(plain, rel=1e-4)
    assert "hottest / mean" in done.stdout
    assert (tmp_path / "peak.png").exists()
    done = run("--simulate", 3, "--memory", "1GiB", "--task", "digits", "--out", tmp_path / "run", **nowhere)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
