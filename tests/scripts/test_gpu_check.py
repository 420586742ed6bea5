"""The check of a machine's GPUs, on simulated devices."""

import json
import re

import pytest
import torch
from helpers.processes import run_script
from helpers.scripts import SCRIPT

from balanced_parallel import simulate

CHECKS = {
    "one": [
        "estimate of embedding, fp32",
        "[sim:0, cpu]: gradients, bf16",
        "[cpu, sim:0]: losses, fp16",
        "[sim:0, cpu]: reach",
        "gloo group of one: losses",
        "[sim:0]: no waits, targets on pinned host, fp32",
        "[sim:0, sim:0]: no waits, targets on device, bf16",
        "[sim:0, cpu]: late inputs and parameters, inputs on cpu",
        "[sim:0, sim:0]: the same bits twice",
        "[sim:0, sim:0]: fp16 overflow",
        "[sim:0, sim:0]: out of memory",
        "[sim:0]: torch.compile, eager",
        "[sim:0, sim:0]: cudnn.benchmark, host memory",
        "train.py's model: peak of [sim:0] / plain loop",
    ],
    "many": [
        "[sim:0, sim:1]: gradients, fp32",
        "[sim:1, sim:0]: losses, bf16",
        "[sim:0, sim:1]: late outputs and gradients, inputs on sim:1",
        "[sim:0, sim:1]: a stream inside of forward, inputs on sim:0",
        "[sim:0, sim:1]: waits of fp16, targets on device",
        "2 devices: TrainStep",
    ],
}
NOT_HERE = {
    "one": ["cudnn.benchmark, step", "CUDA_LAUNCH_BLOCKING=1", "time of [sim:0] / plain loop"],
    "many": ["TrainStep / nn.DataParallel", "one rank per GPU"],
}


def gpu_check(*flags, **environment):
    return run_script(SCRIPT.with_name("gpu_check.py"), *flags, **environment)


def rows_of(text):
    """Returns the rows of a page: name, measured, result."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {name: (measured, result) for name, measured, result, _ in lines[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("part", list(CHECKS))
def test_gpu_check_passes_on_simulated_devices(part, tmp_path):
    done = gpu_check(part, "--simulate", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / f"gpu_check_{part}.md").read_text()
    assert "- simulated devices: no GPU was used" in page
    assert re.search(r"- torch 2\.\S+, Python 3\.", page)
    assert re.search(r"- 20\d\d-\d\d-\d\d \d\d:\d\d UTC", page)
    rows = rows_of(page)
    assert rows == rows_of(done.stdout)
    assert [rows[name][1] for name in CHECKS[part]] == ["ok"] * len(CHECKS[part])
    for name in NOT_HERE[part]:
        results = [result for row, (_, result) in rows.items() if name in row]
        assert results, name
        assert all(re.fullmatch("not possible here: .{10,}", result) for result in results)


def test_an_error_is_a_row_and_the_other_checks_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.with_name("gpu_check"))
    monkeypatch.setenv("OUT", str(tmp_path / "page.md"))
    import table
    from machine import Machine, NotPossible

    def fails(machine):
        yield table.at_most("before", "error", 1.0, 2.0)
        raise RuntimeError("no\nmemory | left")

    def cannot(machine):
        yield table.attempt("two GPUs", lambda: (_ for _ in ()).throw(NotPossible("there is one")))
        yield table.attempt("a time", lambda: table.judge("a time", "3 s", True), "it has no clock")

    def nan(machine):
        yield table.at_most("nan", "error", float("nan"), 2.0)

    with simulate(1) as cluster:
        machine = Machine(cluster.devices, cluster)
        assert table.run_checks("some", machine, {"cannot": cannot})
        assert not table.run_checks("some", machine, {"fails": fails, "cannot": cannot, "nan": nan})
    assert rows_of((tmp_path / "page.md").read_text()) == {
        "before": ("error: 1 (limit 2)", "ok"),
        "fails": ("RuntimeError: no memory / left", "TOO FAR"),
        "two GPUs": ("", "not possible here: there is one"),
        "a time": ("ran", "not possible here: it has no clock"),
        "nan": ("error: nan (limit 2)", "TOO FAR"),
    }
    assert "2 failed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would check the GPU")
def test_gpu_check_without_a_gpu_exits_with_an_error():
    done = gpu_check()
    assert done.returncode == 1
    assert "there is no GPU here; --simulate" in done.stderr


def test_gpu_check_names_the_checks_that_exist():
    done = gpu_check("one", "--simulate", "--only", "speed")
    assert done.returncode == 2
    assert "--only='speed', expected one of memory, layouts, reach" in done.stderr


@pytest.mark.parametrize("part", ["digest", "rank"])
def test_processes_of_the_check_print_json(part):
    done = gpu_check(part, "--simulate")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["digest"]) == 64 if part == "digest" else answer["error"] < 1e-4
