"""The check of a machine's GPUs."""

from helpers.processes import run_script
from helpers.scripts import SCRIPT


def gpu_check(*flags):
    return run_script(SCRIPT.with_name("gpu_check.py"), *flags)


def test_gpu_check_passes_on_simulated_devices():
    done = gpu_check("--simulate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 12
    assert "nn.DataParallel" in done.stdout


def test_gpu_check_compares_memory_on_simulated_devices():
    done = gpu_check("memory", "--simulate", "--only", "embedding")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| embedding")]
    assert len(rows) == 2
    assert all(row.count("0.00%") == 2 for row in rows)


def test_gpu_check_without_a_gpu_exits_with_an_error():
    done = gpu_check()
    assert done.returncode in (0, 1)
    assert done.returncode == 0 or "there is no GPU here; --simulate" in done.stderr
