"""Arguments of the main job: bad input is one line and exit code 2."""

import json
import os
import subprocess
import sys

import pytest
from helpers.scripts import SCRIPT, run

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
def test_invalid_arguments_print_one_line(number, bad_runs):
    code, output, errors = bad_runs[number]
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith("train.py: error: ")
    assert BAD_INPUT[number][1] in errors
    assert not output


def test_invalid_arguments_exit_with_code_2(tmp_path):
    done = run("--out", tmp_path, "--batch-size", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: error: argument --batch-size")


def test_help_prints_the_defaults():
    done = run("--help")
    assert done.returncode == 0
    assert "(default: 24)" in " ".join(done.stdout.split())
