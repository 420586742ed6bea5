"""``python -m balanced_parallel``: estimates, plans and findings are printed; errors are one line and exit code 2."""

import json
import re
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.processes import run_script
from helpers.scripts import words_of
from torch import nn

from balanced_parallel import memory
from balanced_parallel.__main__ import main

pytestmark = pytest.mark.usefixtures("trace_in_this_process")


def run(*flags):
    return main(words_of(flags))


def said(capsys, *arguments):
    """The one line with which bad input ends, after those about what a plan tries."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = [
        line
        for line in errors.splitlines()
        if not line.startswith(("a model that speaks", "trying: "))
    ]
    return line


def test_estimate_runs_as_a_process_in_the_folder_of_the_model(nets, tmp_path):
    nets("")
    flags = words_of(["estimate --problem nets:small --devices 2 --device-kind cpu --json"])
    done = run_script("balanced_parallel", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["layout"], report["devices"], report["rows"]) == ("replicas", 2, 8)


# estimate


def test_estimate_prints_the_report_of_memory_estimate(nets, capsys):
    flags = "--device-kind cpu --optimizer sgd --precision bf16 --json --micro-batch-size 4"
    assert run("estimate --problem", nets("small"), flags) == 0
    found = json.loads(capsys.readouterr().out)
    inputs = torch.empty(8, 4)
    targets = torch.zeros(8, dtype=torch.int64)
    settings = {
        "optimizer": torch.optim.SGD,
        "precision": "bf16",
        "micro_batch_size": 4,
        "device_kind": "cpu",
    }
    report = memory.estimate(nn.Linear(4, 3), nn.CrossEntropyLoss(), inputs, targets, **settings)
    assert found["allocated"] == list(report.allocated)
    assert found["micro_batches"] == 2


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("small", "", {"rows": 8}),
        ("small", "--batch-size 24", {"rows": 24}),
        (
            "small",
            "--layout ddp --devices 3 --balanced-optimizer",
            {"layout": "ddp", "devices": 3, "rows": 9},
        ),
        ("keywords", "--batch-size 6 --devices 2", {"rows": 6}),
        (
            "time_major",
            "--batch-size 8 --dim 1 --devices 2 --micro-batch-size 2",
            {"rows": 4, "devices": 2, "micro_batches": 2},
        ),
    ],
)
def test_flags_decide_about_rows_and_layout(nets, capsys, name, flags, expected):
    assert run("estimate --device-kind cpu --json --problem", nets(name), flags) == 0
    assert json.loads(capsys.readouterr().out).items() >= expected.items()


def test_estimate_prints_the_table(nets, capsys):
    assert run("estimate --device-kind cpu --problem", nets("small")) == 0
    output, errors = capsys.readouterr()
    assert output.startswith("single on 1 x cpu, fp32")
    assert errors == "a model that speaks\n"


@pytest.mark.parametrize(
    ("name", "flags", "wanted"),
    [
        ("small", "--optimizer adamish", "torch.optim has no 'adamish', expected one of "),
        ("small", "--device-kind h300", "device_kind='h300', expected one of gb200, b200"),
        ("small", "--batch-size 0", "'0' was given, expected a whole number of at least 1"),
        ("small", "--layout single --devices 2", "devices=2 with layout='single'"),
        ("small", "--precision fp8", "invalid choice: 'fp8'"),
        ("small", "--optimizer lbfgs", "closure"),
        ("small", "--dim first", "'first' was given, expected a dimension: 0, 1, ..."),
        ("small", "--dim -1", "'-1' was given, expected a dimension"),
        ("missing", "", "has no 'missing'; it defines: TimeMajor"),
        (
            "needs",
            "",
            "cannot be built: TypeError: needs() missing 1 required positional argument: 'width': expected a function",
        ),
        ("fails", "", "cannot be built: KeyError: 'weights' (nets.py, line "),
        ("leaves", "", "it ends the program"),
        ("number", "", "returned int 3: expected (module, criterion, inputs, targets)"),
        (
            "net",
            "",
            "returned an object of type Linear: expected (module, criterion, inputs, targets)",
        ),
        ("distance", "", "cannot be built: TypeError"),
        ("loses", "", "KeyError: 'nothing'"),
        ("wide", "", "error: RuntimeError: "),
        ("packs", "", "packs sequences by their lengths"),
    ],
)
def test_invalid_flags_and_problems_print_one_line(nets, capsys, name, flags, wanted):
    assert wanted in said(capsys, "estimate --problem", nets(name), flags)


def test_missing_problems_print_one_line(capsys, tmp_path):
    assert "the following arguments are required: --problem" in said(capsys, "estimate")
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "program.py").write_text("raise SystemExit(1)\n")
    for place, wanted in {
        "nowhere": "'nowhere' is not a place, expected my_file.py:name or package.module:name",
        "nowhere.py:build": "nowhere.py cannot be imported: FileNotFoundError",
        "nowhere.at.all:build": "nowhere.at.all cannot be imported: ModuleNotFoundError",
        f"{tmp_path}/broken.py:build": "cannot be imported: SyntaxError",
        f"{tmp_path}/program.py:build": "put its main part under if __name__ == '__main__'",
    }.items():
        assert wanted in said(capsys, "estimate --problem", place)


# plan


@pytest.fixture
def plan(monkeypatch):
    """Replaces ``memory.plan``. The fixture has the arguments that it received; ``does`` runs in it."""

    def make(module, criterion, inputs, targets, **settings):
        arguments = module, criterion, inputs, targets
        calls.last = arguments
        calls.settings = settings
        calls.does()
        return SimpleNamespace(
            report=None,
            capacity=(1,),
            fits=calls.fits,
            lines=(),
            to_json=lambda: "{}",
            describe=lambda verbose: "",
        )

    calls = SimpleNamespace(fits=True, does=lambda: None)
    monkeypatch.setattr(memory, "plan", make)
    return calls


def test_plan_receives_the_arguments(nets, plan):
    flags = "--batch-size 16 --devices 2 --memory 24GiB,8GiB --device-kind a10 --optimizer RAdam"
    assert run("plan --problem", nets("pair"), flags) == 0
    module, criterion, inputs, targets = plan.last
    assert (type(module), type(criterion)) == (nn.Linear, nn.BCEWithLogitsLoss)
    assert (inputs.shape, targets.shape) == ((6, 4), (6, 1))
    expected = {
        "batch_size": 16,
        "capacity": [24 * 2**30, 2**33],
        "devices": 2,
        "device_kind": "a10",
        "precision": "fp32",
        "optimizer": torch.optim.RAdam,
        "dim": 0,
        "hosts": 1,
        "scalar": None,
        "seconds": float("inf"),
    }
    assert plan.settings == expected
    assert run("plan --dim 1 --problem", nets("time_major")) == 0
    assert plan.settings["dim"] == 1


@pytest.mark.parametrize(("flags", "capacity"), [("", None), ("--memory 2GiB", 2**31)])
def test_plan_that_does_not_fit_exits_with_code_1(nets, capsys, plan, flags, capacity):
    plan.fits = False
    assert run("plan --json --problem", nets("small"), flags) == 1
    assert plan.settings["capacity"] == capacity
    assert capsys.readouterr().out == "{}\n"


@pytest.mark.filterwarnings("always:twice")
def test_errors_and_warnings_of_plan_print_one_line(nets, capsys, plan):
    plan.does = lambda: warnings.warn("twice the\nrows", stacklevel=1)
    assert run("plan --problem", nets("small")) == 0
    assert capsys.readouterr().err.endswith(
        "python -m balanced_parallel: warning: twice the rows\n"
    )
    plan.does = Mock(side_effect=ValueError("no such device,\nexpected another"))
    line = said(capsys, "plan --memory 24GiB --problem", nets("small"))
    assert line.endswith("error: no such device, expected another")
    assert "'24' is not a memory size, it has no unit: 24GiB?" in said(
        capsys, "plan --problem nowhere --memory 24"
    )


# The program


def test_without_a_command_the_help_is_printed(capsys, monkeypatch):
    assert main([]) == 0
    assert "python -m balanced_parallel plan --problem" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["/usr/bin/balanced-parallel"])
    main([])
    assert "balanced-parallel plan --problem" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"balanced_parallel \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_value_that_the_module_reads_is_given_as_its_error_says(tmp_path, capsys):
    (tmp_path / "reads.py").write_text(
        "import torch\n"
        "class Reads(torch.nn.Linear):\n"
        "    def forward(self, rows):\n"
        "        return super().forward(rows)[:, : int(rows.sum().item())]\n"
        "def build():\n"
        "    return Reads(4, 8), lambda out, _: out.sum(), torch.zeros(6, 4), torch.zeros(6)\n"
    )
    for command in ("estimate", "plan --batch-size 6 --memory 1GiB", "tricks"):
        flags = f"{command} --problem {tmp_path}/reads.py:build --device-kind cpu"
        assert "(--scalar)" in said(capsys, flags)
        assert run(flags, "--scalar 8") == 0
        capsys.readouterr()


def test_estimate_compares_kinds_and_applies_savings(nets, capsys):
    flags = f"estimate --problem {nets('small')}"
    assert run(flags, "--device-kind t4,a100") == 0
    table = capsys.readouterr().out
    assert "largest micro-batch" in table
    assert "t4" in table
    assert run(flags, "--device-kind t4,a100 --json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["t4", "a100"]
    assert run(flags, "--savings offload_activations --json") == 0
    capsys.readouterr()
    assert "expected functions of balanced_parallel.savings" in said(capsys, flags, "--savings x")


def test_fit_prints_the_rows_of_a_micro_batch(nets, capsys):
    flags = f"fit --problem {nets('small')} --device-kind cpu --batch-size 64"
    assert run(flags, "--memory 1GiB") == 0
    assert capsys.readouterr().out.startswith("micro_batch_size=64, in 1 micro-batch(es)")
    assert "has no capacity, expected --memory" in said(capsys, flags)
