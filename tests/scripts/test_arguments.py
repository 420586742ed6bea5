"""Arguments of the main job: bad input is one line and exit code 2."""

import sys

import pytest
from helpers.scripts import SCRIPT, run, run_in_new_process

BAD_INPUT = [
    (["--batch-size", "0"], "argument --batch-size: '0' was given, expected a whole number of at least 1"),
    (["--steps", "many"], "argument --steps: 'many' was given"),
    (["--micro-batch-size", "-1"], "argument --micro-batch-size"),
    (["--learning-rate", "nan"], "expected a number greater than 0"),
    (["--task", "digits", "--devices", "cpu,cuda:99"], "there is no device 'cuda:99'"),
    (
        ["--seed", str(2**64)],
        "'18446744073709551616' was given, expected a whole number of at least 0 and below 18446744073709551616",
    ),
    (["--data", "/no/such/file"], "No such file or directory: '/no/such/file'"),
    (["--data", str(SCRIPT), "--vocabulary", "100000"], "a vocabulary of 100000 is larger than the text"),
    (["--data", str(SCRIPT.parent.parent / "setup.py")], "expected at least 1300"),
    (["--task", "digits", "--data", "x"], "--data and --vocabulary are for --task text"),
    (["--simulate", "2", "--plot", "x.png", "--dropout", "0.1"], "whose --dropout draws other numbers: give one of them"),
    (["--precision", "int8"], "invalid choice: 'int8'"),
    (["--memory", "1GiB"], "expected --simulate N beside them"),
    (["--task", "digits", "--simulate", "2", "--memory", "3 parsecs"], "'3 parsecs' is not a memory size"),
    (["--task", "digits", "--simulate", "3", "--memory", "1GiB,2GiB"], "memory has 2 entries for 3 devices"),
    (["--task", "digits", "--simulate", "65"], "devices=65, expected an integer from 1 to 64"),
    (["--task", "digits", "--simulate", "2", "--devices", "sim:2"], "there is no device 'sim:2': this machine has 2 sim devices"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_invalid_arguments_print_one_line(flags, message, tmp_path):
    done = run("--out", tmp_path, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: error: ")
    assert message in done.stderr


def test_invalid_arguments_exit_with_code_2(tmp_path):
    done = run_in_new_process("--out", tmp_path, "--batch-size", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: error: argument --batch-size")


@pytest.mark.parametrize(("flag", "package"), [("tensorboard", "tensorboard"), ("html", "plotly")])
def test_missing_packages_are_named_with_the_command(flag, package, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    import arguments

    monkeypatch.setitem(sys.modules, package, None)
    flags = arguments.make_parser().parse_args(["--out", str(tmp_path), f"--{flag}", *(["x.html"] if flag == "html" else [])])
    with pytest.raises(ImportError, match=f"--{flag} needs the package {package}: pip install {package}"):
        arguments.check(flags)


def test_help_prints_the_defaults():
    done = run("--help")
    assert done.returncode == 0
    assert "(default: 24)" in " ".join(done.stdout.split())
