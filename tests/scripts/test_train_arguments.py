"""Arguments of the main job: bad input is one line and exit code 2."""

import importlib.util

import pytest
from helpers.scripts import SCRIPT, run

BAD_INPUT = [
    (
        "--batch-size 0",
        "argument --batch-size: '0' was given, expected a whole number of at least 1",
    ),
    ("--steps many", "argument --steps: 'many' was given"),
    ("--micro-batch-size -1", "argument --micro-batch-size"),
    ("--task digits --learning-rate nan", "Invalid learning rate: nan"),
    ("--task digits --dropout 2", "dropout probability has to be between 0 and 1, but got 2.0"),
    ("--workers -1", "argument --workers: '-1' was given, expected a whole number of at least 0"),
    ("--task digits --devices cpu,cuda:99", "there is no device 'cuda:99'"),
    ("--data /no/such/file", "No such file or directory: '/no/such/file'"),
    (f"--data {SCRIPT} --vocabulary 100000", "a vocabulary of 100000 is larger than the text"),
    (f"--data {SCRIPT.parents[1]}/setup.py", "expected at least 1300"),
    ("--task digits --data x", "--data and --vocabulary are for --task text"),
    ("--precision int8", "invalid choice: 'int8'"),
    ("--reproducible rows", "argument --reproducible: invalid choice: 'rows'"),
    (
        "--task digits --reproducible bits --micro-batch-size auto",
        "micro_batch_size='auto', expected a number",
    ),
    ("--memory 1GiB", "expected --simulate N beside them"),
    ("--table", "expected --simulate N beside them"),
    ("--plan --simulate 2 --task digits", "expected a size, as '24GiB'"),
    ("--task digits --simulate 2 --memory '3 parsecs'", "'3 parsecs' is not a memory size"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_invalid_arguments_print_one_line(flags, message, tmp_path):
    done = run("--out", tmp_path, flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: error: ")
    assert message in done.stderr


def test_devices_that_are_not_there_are_refused_after_the_title_and_help_prints_the_defaults(
    tmp_path,
):
    done = run("--task digits --simulate 2 --devices sim:2 --out", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "there is no device 'sim:2': this machine has 2 sim devices" in done.stderr
    done = run("--help")
    assert done.returncode == 0
    assert "(default: 24)" in " ".join(done.stdout.split())


def test_missing_matplotlib_is_named_with_the_command(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import comparison
    import train

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flags = train.make_parser().parse_args(["--simulate", "2", "--plot", "x.png"])
    with pytest.raises(
        ImportError, match="--plot needs the package matplotlib: pip install matplotlib"
    ):
        comparison.Comparison(None, flags, None)
