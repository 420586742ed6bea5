"""The main job, run as a user runs it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


SENTENCES = "the cat sat on the mat . the dog ate the cat ; " * 200


def run(*flags, launcher=(sys.executable,), timeout=200, **environment):
    command = [*launcher, str(SCRIPT), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment)


def train(out, *flags, **settings):
    done = run("--out", out, *flags, **settings)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, lines, json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("task", ["text", "digits"])
def test_one_device_three_replicas_and_two_processes_give_the_same_losses(task, tmp_path):
    common = ["--task", task, "--steps", 12, "--batch-size", 24, *(["--vocabulary", 500] if task == "text" else [])]
    layouts = {
        "one": (["--devices", "cpu"], {}),
        "replicas": (["--devices", "cpu,cpu,cpu", "--micro-batch-size", 3], {}),
        "torchrun": (["--micro-batch-size", 5], {"launcher": TORCHRUN}),
    }
    losses, validation = {}, {}
    for name, (flags, settings) in layouts.items():
        _, lines, summary = train(tmp_path / name, *common, *flags, **settings)
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        validation[name] = summary["validation_loss"]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
        assert summary["ranks"] == (2 if name == "torchrun" else 1)
        assert (tmp_path / name / "model.pt").exists()
    assert losses["one"][-1] < losses["one"][0]
    for name in ("replicas", "torchrun"):
        assert losses[name] == pytest.approx(losses["one"], rel=1e-4)
        assert validation[name] == pytest.approx(validation["one"], rel=1e-4)


def test_digits_reach_95_percent(tmp_path):
    output, lines, summary = train(tmp_path / "run", "--task", "digits")
    assert summary["accuracy"] >= 0.95
    assert lines[-1] == {"step": 300, "validation_loss": summary["validation_loss"], "accuracy": summary["accuracy"]}
    assert "1 process, 1 device" in output
    assert "waiting for data" in output


def test_a_text_of_ones_own_and_the_last_short_batch(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES)
    flags = ["--data", text, "--epochs", 2, "--batch-size", 13, "--precision", "bf16", "--workers", 1]
    _, lines, summary = train(tmp_path / "run", *flags, "--devices", "cpu,cpu")
    assert len([line for line in lines if "validation_loss" in line]) == 2
    assert summary["validation_loss"] < summary["baseline_loss"]
    assert summary["steps"] == 2 * -(-35 // 13)


BAD_INPUT = [
    (["--batch-size", "0"], "argument --batch-size: '0' was given, expected a whole number of at least 1"),
    (["--steps", "many"], "argument --steps: 'many' was given"),
    (["--micro-batch-size", "-1"], "argument --micro-batch-size"),
    (["--learning-rate", "nan"], "expected a number greater than 0"),
    (["--devices", "cpu,cuda:99"], "there is no device 'cuda:99'"),
    (["--data", "/no/such/file"], "No such file or directory: '/no/such/file'"),
    (["--data", str(SCRIPT), "--vocabulary", "100000"], "a vocabulary of 100000 is larger than the text"),
    (["--data", str(SCRIPT.parent.parent / "setup.py")], "expected at least 1300"),
    (["--task", "digits", "--data", "x"], "--data and --vocabulary are for --task text"),
    (["--precision", "int8"], "invalid choice: 'int8'"),
    (["--memory", "1GiB"], "expected --simulate N beside them"),
    (["--simulate", "2", "--memory", "3 parsecs"], "'3 parsecs' is not a memory size"),
    (["--simulate", "3", "--memory", "1GiB,2GiB"], "memory has 2 entries for 3 devices"),
    (["--simulate", "65"], "devices=65, expected an integer from 1 to 64"),
    (["--simulate", "2", "--devices", "sim:2"], "there is no device 'sim:2': this machine has 2 sim devices"),
]

RUN_ALL = """
import contextlib, io, json, sys
import train

results = []
for flags in json.loads(sys.argv[1]):
    sys.argv = ["train.py", *flags]
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            train.main()
        except SystemExit as ended:
            code = ended.code
    results.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def bad_runs(tmp_path_factory):
    """Runs the script with all bad flags in one process: importing torch takes longer than refusing them."""
    flags = [["--out", str(tmp_path_factory.mktemp("bad")), *flags] for flags, _ in BAD_INPUT]
    command = [sys.executable, "-c", RUN_ALL, json.dumps(flags)]
    path = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(BAD_INPUT)), ids=[message for _, message in BAD_INPUT])
def test_bad_input_is_one_clear_line(number, bad_runs):
    code, output, errors = bad_runs[number]
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith("train.py: error: ")
    assert BAD_INPUT[number][1] in errors
    assert not output


def test_bad_input_ends_the_process_with_exit_code_2(tmp_path):
    done = run("--out", tmp_path, "--batch-size", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: error: argument --batch-size")


def test_help_shows_the_defaults():
    done = run("--help")
    assert done.returncode == 0
    assert "(default: 24)" in " ".join(done.stdout.split())


def test_simulated_gpus_with_a_table_and_a_picture(tmp_path):
    flags = ["--simulate", 4, "--memory", "2GiB", "--steps", 3, "--batch-size", 8, "--vocabulary", 500, "--micro-batch-size", 1]
    output, lines, summary = train(tmp_path / "sim", *flags, "--plot", tmp_path / "plots" / "peak.png")
    assert summary["devices"] == [f"sim:{index}" for index in range(4)]
    table = [line.split() for line in output.splitlines() if line.lstrip().startswith("sim:")]
    assert [row[0] for row in table] == summary["devices"]
    assert "optimizer state" in output
    assert (tmp_path / "plots" / "peak.png").read_bytes().startswith(b"\x89PNG")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [line["waits"] for line in lines if "loss" in line][1:] == [1, 1]  # the loss
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


def test_without_a_compiler_replicas_run_on_the_cpu_and_memory_is_estimated(tmp_path):
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


def test_scripts_and_examples_import_public_names_only():
    root = SCRIPT.parents[1]
    sources = [*root.glob("scripts/*.py"), *root.glob("examples/*.py")]
    assert len(sources) > 5
    for path in sources:
        assert len(path.read_text().splitlines()) <= 300
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("balanced_parallel.")], path.name


def test_simulated_gpus_under_torchrun(tmp_path):
    flags = ["--task", "digits", "--steps", 3, "--precision", "bf16"]
    output, _, summary = train(tmp_path / "sim", "--simulate", 2, *flags, launcher=TORCHRUN)
    assert (summary["ranks"], len(summary["peak_bytes"])) == (2, 2)
    assert sum(line.lstrip().startswith("sim:") for line in output.splitlines()) == 2


def test_a_job_that_does_not_fit_says_so_in_one_line_after_the_table(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES)
    done = run("--simulate", 2, "--memory", "4MiB", "--steps", 2, "--data", text, "--out", tmp_path)
    assert done.returncode == 1
    assert "optimizer state" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "out of memory. Tried to allocate" in done.stderr
    assert "Give --micro-batch-size fewer rows" in done.stderr


def test_the_plan_of_the_job_is_printed_without_training(tmp_path):
    flags = ["--plan", "--simulate", 2, "--memory", "3MiB", "--task", "digits", "--out", tmp_path / "nothing"]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert "rows per update on 2 x sim with 3.00 MiB" in done.stdout
    assert "chosen: " in done.stdout
    assert not (tmp_path / "nothing").exists()
    done = run("--plan", "--simulate", 2, "--task", "digits")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def gpu_check(*flags):
    command = [sys.executable, str(SCRIPT.with_name("gpu_check.py")), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_the_gpu_check_runs_on_simulated_devices():
    done = gpu_check("--simulate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 12
    assert "nn.DataParallel" in done.stdout


def test_the_gpu_check_compares_memory_on_simulated_devices():
    done = gpu_check("memory", "--simulate", "--only", "embedding")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| embedding")]
    assert len(rows) == 2
    assert all(row.count("0.00%") == 2 for row in rows)


def test_the_gpu_check_without_a_gpu_says_so():
    done = gpu_check()
    assert done.returncode in (0, 1)
    assert done.returncode == 0 or "there is no GPU here; --simulate" in done.stderr
