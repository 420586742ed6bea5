"""The main job, interrupted and resumed: its results are those of a run that was never interrupted."""

import json
import os
import signal
import sys
import time

import pytest
import torch
from helpers.processes import Script, run_script
from helpers.scripts import SCRIPT, run, train, words_of
from helpers.slow import slow
from helpers.torchrun import ranks_of, run_torchrun

FAULTS = SCRIPT.parents[1] / "benchmarks" / "faults" / "inject.py"
FLAGS = "--task digits --steps 30 --batch-size 100 --checkpoint-every 4"
WORDS = words_of([FLAGS])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The lines of the run that was never interrupted. An epoch has 15 steps."""
    out = tmp_path_factory.mktemp("undisturbed")
    train(out, FLAGS)
    return lines_of(out)


def lines_of(out):
    return (out / "metrics.jsonl").read_text().splitlines()


def run_fault(place, step, out):
    """Runs until a fault that ``benchmarks/faults`` injects."""
    return run_script(
        FAULTS, out / "faults", f"{place}:0:{step}", SCRIPT, "--out", out, *WORDS, "--resume"
    )


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Gives new processes one thread, as the others have."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("place", "step"), [("between", 15), slow("checkpoint", 3), slow("checkpoint-complete", 4)]
)
def test_killed_run_has_the_lines_of_the_undisturbed_one(undisturbed, tmp_path, place, step):
    done = run_fault(place, step, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 0 < len(lines_of(tmp_path)) < len(undisturbed)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "lo')  # the line that was being written
    train(tmp_path, FLAGS, "--resume")
    assert lines_of(tmp_path) == undisturbed


def signalled(number, step, *arguments, send=os.killpg):
    """Runs a script until it prints a step, sends a signal to its session, and returns its number and the end."""
    script = Script(*arguments, session=True)
    deadline = time.monotonic() + 100
    while f"step {step}/" not in script.texts[0]:
        assert script.process.is_alive(), script.texts
        assert time.monotonic() < deadline
        time.sleep(0.01)
    send(script.process.pid, number)
    return script.process.pid, script.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_saves_and_exits_with_0_and_the_run_goes_on(undisturbed, tmp_path, number):
    """After Ctrl-C the steps since the last checkpoint were lost, with a traceback. The workers get the signal too."""
    _, done = signalled(number, 3, SCRIPT, "--out", tmp_path, *WORDS, "--workers", 1)
    assert done.returncode == 0
    assert "all state is saved: go on with --resume" in done.stdout
    done = run("--out", tmp_path, FLAGS)
    assert done.returncode == 2
    assert "checkpoints is of another run: go on with it by --resume" in done.stderr
    train(tmp_path, FLAGS, "--resume")
    assert lines_of(tmp_path) == undisturbed


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_all_ranks(undisturbed, tmp_path):
    signalled(signal.SIGTERM, 3, *ranks_of(SCRIPT, "--out", tmp_path, *WORDS), send=os.kill)
    saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir()]
    assert len(lines_of(tmp_path)) == max(
        saved
    )  # the ranks may have passed step 4, whose checkpoint stays
    train(tmp_path, FLAGS, "--resume")
    losses = [
        [json.loads(line).get("loss", 0.0) for line in lines]
        for lines in (lines_of(tmp_path), undisturbed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_finished_run_is_loaded_with_three_lines_of_plain_torch(undisturbed, tmp_path):
    train(tmp_path, "--task digits --steps 1")
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from tasks import DigitClassifier
    finally:
        sys.path.pop(0)
    from safetensors.torch import load_file

    net = DigitClassifier()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    rows = torch.rand(3, 1, 8, 8)
    assert net(rows).shape == (3, 10)


def test_full_disk_ends_the_run_with_one_line_and_leaves_the_last_checkpoint(tmp_path):
    done = run_fault("disk-full", 2, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: error: the checkpoint at 8 in ")
    assert "No space left on device); step-00000004 is the last good one" in done.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_their_folder(tmp_path):
    """The second start emptied ``metrics.jsonl``."""
    train(tmp_path, "--task digits --steps 4 --checkpoint-every 4")
    lines = lines_of(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "checkpoint.json").write_text("")
    for _ in range(2):
        done = run("--task digits --steps 8 --resume --out", tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (
            2,
            3,
        )  # each run warns of the damage, in two lines
        assert "are damaged (step-00000004): begin anew in another folder" in done.stderr
        assert lines_of(tmp_path) == lines


def test_ctrl_c_without_checkpoints_says_in_one_line_that_nothing_was_saved(tmp_path):
    """It was a traceback."""
    _, done = signalled(
        signal.SIGINT, 1, SCRIPT, "--out", tmp_path, "--task", "digits", "--steps", 10**6
    )
    assert (done.returncode, done.stderr) == (
        130,
        "stopped by Ctrl-C: nothing was saved, except by --checkpoint-every\n",
    )


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind(tmp_path):
    session, _ = signalled(
        signal.SIGINT, 3, *ranks_of(SCRIPT, "--out", tmp_path, *WORDS, "--workers", 1)
    )
    deadline = time.monotonic() + 10
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(session) == []


def processes_of(session):
    """Returns the processes of a session that are not zombies."""
    found = []
    for folder in os.scandir("/proc"):
        if folder.name.isdecimal():
            try:
                with open(f"/proc/{folder.name}/stat") as file:
                    state, _, _, number = file.read().rpartition(") ")[2].split()[:4]
            except OSError:  # it has ended
                continue
            if int(number) == session and state != "Z":
                found.append(folder.name)
    return found


@pytest.mark.slow
def test_resumed_run_on_two_ranks_stays_within_tolerance(undisturbed, tmp_path):
    assert run_fault("between", 8, tmp_path).returncode != 0
    done = run_torchrun(SCRIPT, "--out", tmp_path, *WORDS, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(tmp_path)) == len(undisturbed)
    for found, expected in zip(lines_of(tmp_path), undisturbed, strict=True):
        assert json.loads(found) == pytest.approx(json.loads(expected), rel=1e-4)
