"""The main job on simulated GPUs, compared with the plain program and ``nn.DataParallel``."""

import re

import pytest
from helpers.scripts import run, train

FLAGS = "--simulate 4 --memory 2GiB --steps 3 --batch-size 8 --vocabulary 500 --table"


@pytest.mark.slow
def test_simulated_gpus_print_losses_and_memory_and_write_the_plot(tmp_path):
    plot = tmp_path / "plots" / "peak.png"
    output, lines, summary = train(tmp_path / "sim", FLAGS, "--plot", plot)
    names = [f"sim:{index}" for index in range(4)]
    assert summary["devices"] == names
    assert output.startswith(
        "LanguageModel, 0.5 M parameters; 8 rows per update, AdamW, fp32; simulated GPUs: 3 updates\n"
    )
    assert output.splitlines()[-1].startswith(f"wrote {plot}, ")
    table = [line for line in output.splitlines() if line.lstrip().startswith("sim:")]
    assert [line.split()[0] for line in table] == names
    assert "temporaries" in output
    assert ", 1, " in table[0]  # the loss, in the second step
    assert plot.read_bytes().startswith(b"\x89PNG")
    check_rows(rows_of(output), [line["loss"] for line in lines])


def check_rows(rows, losses):
    """Checks that all programs have the same losses, and that memory is balanced by one of them."""
    plain, parallel, balanced = rows
    assert [row[2] for row in rows] == [pytest.approx(losses, rel=1e-4)] * 3
    assert [row[0] for row in rows] == [
        "plain PyTorch, 1 GPU",
        "nn.DataParallel, 4 GPUs",
        "balanced_parallel, 4 GPUs",
    ]
    assert parallel[3] / parallel[4] > 1.5  # the hottest over the mean
    assert balanced[3] / balanced[4] < 1.1
    assert plain[3] == plain[4]


def rows_of(output):
    """Returns the lines of the table: name, difference, losses, hottest and mean in MiB."""
    rows = []
    for line in output.splitlines():
        match = re.fullmatch(
            r"(\S.*GPUs?)((?: +\d+\.\d{6})+) +([\de.+-]*) +([\d.]+) MiB +([\d.]+) MiB", line
        )
        if match:
            name, losses, difference, hottest, mean = match.groups()
            rows.append(
                (name, difference, [*map(float, losses.split())], float(hottest), float(mean))
            )
    return rows


def test_a_simulation_prints_one_line_for_each_configuration_and_no_table(tmp_path):
    done = run("--simulate 2 --task digits --steps 2 --precision bf16 --out", tmp_path)
    output = done.stdout
    errors = done.stderr.splitlines()
    assert [line.partition(": loss")[0] for line in errors if line.startswith("step ")] == [
        "step 1/2",
        "step 2/2",
    ]
    assert [line for line in errors if line.startswith("plain")] == [
        f"plain PyTorch on {n} x sim: 2 steps" for n in (1, 2)
    ]
    assert "\r" not in done.stderr
    assert [row[0] for row in rows_of(output)] == [
        "plain PyTorch, 1 GPU",
        "nn.DataParallel, 2 GPUs",
        "balanced_parallel, 2 GPUs",
    ]
    assert "sim:0" not in output
    assert len(output.splitlines()) == 10
    assert not output.endswith("\n\n")


@pytest.mark.slow
def test_missing_compiler_falls_back_to_cpu_replicas(tmp_path):
    flags = f"--simulate 3 --task digits --out {tmp_path}/run"
    nowhere = dict.fromkeys(["PATH", "HOME", "XDG_CACHE_HOME"], str(tmp_path)) | {"CXX": ""}
    done = run(flags, f"--steps 2 --plot {tmp_path}/peak.png", **nowhere)
    assert done.returncode == 0, done.stderr
    assert "found no compiler" in done.stdout
    assert "Running 3 replicas on the CPU instead. Their memory is estimated." in done.stdout
    plain, balanced = rows_of(done.stdout)
    assert plain[2] == pytest.approx(balanced[2], rel=1e-4)
    assert plain[3] > balanced[3] >= balanced[4]
    assert (tmp_path / "peak.png").exists()
    done = run(flags, "--memory 1GiB", **nowhere)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
