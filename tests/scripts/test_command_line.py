"""python -m balanced_parallel: what is good is printed, what is bad is one line and exit code 2."""

import json
import re
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, memory
from balanced_parallel.__main__ import main
from balanced_parallel.batch import nested
from balanced_parallel.memory import batch_shapes, model_loading, plot

NETS = """
import sys
import torch
from torch import nn

print("a model that speaks")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.head(self.embedding(x))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x, y):
        return self.linear(x * y)

class Pair(Two):
    def forward(self, x):
        return self.linear(x), x

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, pair, mask, extra=None):
        first, second = pair
        return self.linear(first + second + extra["shift"]) * mask[:, None]

class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0])

class Sum(nn.Module):
    def forward(self, x):
        return x.sum(0)

class Loses(nn.Module):
    def forward(self, x):
        return {}["nothing"]

class Waiting(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x) * x.sum().item()

class Picky(Waiting):
    def forward(self, x):
        if not x.is_meta and type(x) is torch.Tensor:
            raise ArithmeticError("I do not like small numbers")
        return nn.Linear.forward(self, x)

def small():
    return nn.Linear(4, 3)

def pair():
    return nn.Linear(4, 1), nn.BCEWithLogitsLoss()

def reads_values():
    return nn.Linear(int(torch.tensor([4]).item()), 3)

def with_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

def recurrent():
    return nn.Sequential(nn.LSTM(4, 3))

class packs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 3)
    def forward(self, inputs):
        return self.layer(nn.utils.rnn.pack_padded_sequence(inputs[None], [len(inputs)]))[1][0]

def needs(width):
    return nn.Linear(width, 3)

def fails():
    raise KeyError("weights")

def leaves():
    sys.exit(3)

def number():
    return 3

def distance(output, target):
    return (output - target).abs().mean()

made = nn.Linear(4, 3)
"""


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return lambda name: f"{tmp_path / 'nets.py'}:{name}"


def estimate(*flags, batch_size=8):
    return main(["estimate", "--batch-size", str(batch_size), *flags])


def said(capsys, *arguments):
    """The one line with which bad input ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = [line for line in errors.splitlines() if line != "a model that speaks"]
    return line


# Processes


def run(*arguments, cwd):
    command = [sys.executable, "-W", "error", "-m", "balanced_parallel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd)


def test_a_process_prints_an_estimate_of_a_model_in_its_folder(nets, tmp_path):
    flags = ["--model", "nets:Net", "--input", "3x8x8", "--batch-size", "8", "--devices", "2", "--device-kind", "cpu", "--json"]
    done = run("estimate", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["layout"], report["devices"], report["rows"]) == ("replicas", 2, 8)
    assert "assumed criterion: CrossEntropyLoss; targets: (8,) int64, class indices for the output (8, 5)" in done.stderr


def test_a_process_says_what_is_wrong_in_one_line(nets, tmp_path):
    nets("")
    done = run("estimate", "--model", "nets.py:small", "--input", "7", "--batch-size", "8", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line != "a model that speaks"]
    assert "error: Linear from nets.py:small refuses (8, 7) float32: RuntimeError: " in line


# estimate


def test_an_estimate_is_that_of_the_library(nets, capsys):
    flags = ["--model", nets("small"), "--input", "4", "--device-kind", "cpu", "--optimizer", "sgd", "--precision", "bf16"]
    assert estimate(*flags, "--json", "--micro-batch-size", "4") == 0
    found = json.loads(capsys.readouterr().out)
    inputs, targets = torch.empty(8, 4), torch.zeros(8, dtype=torch.int64)
    settings = {"optimizer": torch.optim.SGD, "precision": "bf16", "micro_batch_size": 4, "device_kind": "cpu"}
    report = memory.estimate(nn.Linear(4, 3), nn.CrossEntropyLoss(), inputs, targets, **settings)
    assert found["peak"] == list(report.peak)
    assert found["micro_batches"] == 2


def test_the_rows_of_ranks_are_their_share_of_the_batch(nets, capsys):
    flags = ["--model", nets("small"), "--input", "4", "--layout", "ddp", "--devices", "3", "--balanced-optimizer"]
    assert estimate(*flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["devices"], found["rows"]) == ("ddp", 3, 3)


def test_the_table_and_what_was_assumed_are_printed(nets, capsys):
    assert estimate("--model", nets("Tokens"), "--input", "7:int64", "--device-kind", "cpu") == 0
    output, errors = capsys.readouterr()
    first, _, second, *_ = output.splitlines()
    assert first.startswith("assumed criterion: CrossEntropyLoss over the flattened logits (8, 7, 11); targets: (8, 7) int64")
    assert second.startswith("single on 1 x cpu, fp32")
    assert errors == "a model that speaks\n"


def test_a_picture_is_drawn(nets, capsys, tmp_path):
    path = tmp_path / "new" / "memory.png"
    assert estimate("--model", nets("small"), "--input", "4", "--devices", "2", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"wrote {path}\n")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--input", "4", "--criterion", "NLLLoss", "--target", "3:float32"], "NLLLoss refuses (8, 3) float32, (8, 3) float32: "),
        (["--input", "four"], "'four' is not the shape of a row, expected sizes such as 3x224x224"),
        (["--input", "4x0"], "'4x0' is not the shape"),
        (["--input", ""], "'' is not the shape"),
        (["--input", "4:floaty"], "dtype 'floaty', expected one of torch's"),
        (["--input", "4", "--target", "2"], "CrossEntropyLoss refuses (8, 3) float32, (8, 2) int64: "),
        (["--input", "4", "--optimizer", "adamish"], "torch.optim has no 'adamish', expected one of "),
        (["--input", "4", "--criterion", "L3Loss"], "torch.nn has no 'L3Loss', expected one of "),
        (["--input", "4", "--criterion", "GaussianNLLLoss"], "give the shape of one row as --target"),
        (["--input", "4", "--criterion", "AdaptiveLogSoftmaxWithLoss"], "cannot be built: TypeError"),
        (["--input", "4", "--device-kind", "h300"], "device_kind='h300', expected one of b200, h200"),
        (["--input", "4", "--batch-size", "0"], "'0' was given, expected a whole number of at least 1"),
        (["--input", "4", "--layout", "single", "--devices", "2"], "devices=2 with layout='single'"),
        (["--input", "4", "--checkpoint", "layers.0"], "there is no module 'layers.0' to checkpoint"),
        (["--input", "4", "--precision", "fp8"], "invalid choice: 'fp8'"),
        (["--input", "4", "--optimizer", "lbfgs"], "closure"),
        ([], "the following arguments are required: --input"),
    ],
)
def test_bad_flags_are_one_line(nets, capsys, flags, wanted):
    assert wanted in said(capsys, "estimate", "--batch-size", 8, "--model", nets("small"), *flags)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("missing", "has no 'missing'; it defines: Net, Tokens"),
        ("needs", "cannot be built: TypeError: needs() missing 1 required positional argument: 'width': expected a function"),
        ("fails", "cannot be built: KeyError: 'weights' (nets.py, line "),
        ("leaves", "it ends the program"),
        ("number", "gave int, expected a torch.nn.Module, or a pair (module, criterion)"),
        ("Loses", "Loses from "),
        ("Two", "refuses (8, 4) float32: TypeError"),
        ("packs", "packs sequences by their lengths"),
    ],
)
def test_bad_models_are_one_line(nets, capsys, name, wanted):
    assert wanted in said(capsys, "estimate", "--batch-size", 8, "--input", "4", "--model", nets(name))


def test_a_model_that_is_not_there_is_one_line(capsys, tmp_path):
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "program.py").write_text("raise SystemExit(1)\n")
    for model, wanted in {
        "nowhere": "'nowhere' is not a place, expected my_file.py:name or package.module:name",
        "nowhere.py:build": "nowhere.py cannot be imported: FileNotFoundError",
        "nowhere.at.all:build": "nowhere.at.all cannot be imported: ModuleNotFoundError",
        f"{tmp_path}/broken.py:build": "cannot be imported: SyntaxError",
        f"{tmp_path}/program.py:build": "put its main part under if __name__ == '__main__'",
    }.items():
        assert wanted in said(capsys, "doctor", "--model", model)


# plan


def planned(**settings):
    return SimpleNamespace(**{"report": None, "capacity": (1,), "fits": True, "to_json": lambda: "{}"} | settings)


def test_a_plan_is_asked_for_with_what_was_said(nets, capsys, monkeypatch):
    asked = {}

    def plan(module, criterion, inputs, targets, **settings):
        asked.update(settings, module=module, criterion=criterion, inputs=inputs, targets=targets)
        return planned()

    monkeypatch.setattr(memory, "plan", plan)
    flags = ["--batch-size", "16", "--devices", "2", "--memory", "24GiB,8GiB", "--device-kind", "a10", "--optimizer", "RAdam"]
    assert main(["plan", "--model", nets("pair"), "--input", "4", *flags]) == 0
    assert capsys.readouterr().out.startswith("assumed targets: (16, 1) float32, like the output\n\n")
    assert isinstance(asked.pop("module"), nn.Linear)
    assert isinstance(asked.pop("criterion"), nn.BCEWithLogitsLoss)
    assert (asked.pop("inputs").shape, asked.pop("targets").shape) == ((16, 4), (16, 1))
    expected = {"batch_size": 16, "capacity": ["24GiB", "8GiB"], "devices": 2, "device_kind": "a10"}
    assert asked == expected | {"precision": "fp32", "optimizer": torch.optim.RAdam, "dim": 0}


@pytest.mark.parametrize(("flags", "capacity"), [([], None), (["--memory", "2GiB"], "2GiB")])
def test_a_plan_that_fits_nowhere_is_exit_code_1(nets, capsys, monkeypatch, flags, capacity):
    asked = []
    monkeypatch.setattr(memory, "plan", lambda *args, **settings: asked.append(settings["capacity"]) or planned(fits=False))
    assert main(["plan", "--model", nets("small"), "--input", "4", "--batch-size", "8", "--json", *flags]) == 1
    assert asked == [capacity]
    assert capsys.readouterr().out == "{}\n"


def test_what_plan_refuses_is_one_line(nets, capsys, monkeypatch):
    def plan(*args, **settings):
        raise ValueError("'24QB' is not a memory size,\nexpected another")

    monkeypatch.setattr(memory, "plan", plan)
    line = said(capsys, "plan", "--model", nets("small"), "--input", 4, "--batch-size", 8, "--memory", "24QB")
    assert line.endswith("error: '24QB' is not a memory size, expected another")


def test_a_warning_is_one_line_beside_the_plan(nets, capsys, monkeypatch):
    def plan(*args, **settings):
        with warnings.catch_warnings(action="always"):
            warnings.warn("twice the\nrows", stacklevel=1)
        return planned()

    monkeypatch.setattr(memory, "plan", plan)
    assert main(["plan", "--model", nets("small"), "--input", "4", "--batch-size", "8"]) == 0
    assert capsys.readouterr().err.endswith("python -m balanced_parallel: warning: twice the rows\n")


# doctor


def test_doctor_finds_nothing_in_a_good_model(nets, capsys):
    assert main(["doctor", "--model", nets("small")]) == 0
    assert capsys.readouterr().out == "nothing found: Linear runs as replicas\n"


def test_doctor_lists_what_will_break(nets, capsys):
    assert main(["doctor", "--model", nets("with_norm"), "--criterion", nets("distance")]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("- batch norm: 1: ")
    assert second.startswith("- the loss: the divisor of the mean of distance is unknown")


def test_doctor_does_not_fail_for_a_note(nets, capsys):
    assert main(["doctor", "--model", nets("recurrent")]) == 0
    assert capsys.readouterr().out.startswith("- note: 0 (LSTM) ")


def test_doctor_finds_waits_by_a_step_on_simulated_devices(nets, capsys):
    good = ["doctor", "--model", nets("small"), "--input", "4"]
    for flags in (good, [*good, "--target", ":int64"], [*good, "--criterion", "MSELoss", "--target", "3"]):
        assert main(flags) == 0
        assert capsys.readouterr().out == "nothing found: Linear runs as replicas\n"
    assert main(["doctor", "--model", nets("Waiting"), "--input", "4", "--batch-size", "6"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"- note: waits: item in .*nets\.py:\d+ makes the host wait for a GPU, 2 times in a step of two ", line)
    assert main(["doctor", "--model", nets("Picky"), "--input", "4"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "- note: waits: a step on simulated devices failed, so they are not known: I do not like small numbers"
    )


# building


def test_models_are_built_without_memory_where_that_is_possible(nets):
    for name, device in {"small": "meta", "Net": "meta", "reads_values": "cpu", "made": "cpu"}.items():
        module, criterion = model_loading.build_model(nets(name))
        assert next(module.parameters()).device.type == device
        assert criterion is None
    assert isinstance(model_loading.build_model("torch.nn:Identity")[0], nn.Identity)


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("3x224x224", (3, 224, 224), torch.float32),
        ("128:int64", (128,), torch.int64),
        (":int64", (), torch.int64),
        ("4:bfloat16", (4,), torch.bfloat16),
    ],
)
def test_shapes(text, shape, dtype):
    assert batch_shapes.parse_shape(text, torch.float32) == (shape, dtype)


def test_shapes_with_places_make_a_batch():
    def shape(*texts, dim=0):
        batch = batch_shapes.build_batch(texts, 8, dim, torch.float32)
        return nested.map_leaves(lambda leaf: tuple(leaf.shape), batch)

    assert shape("4") == (8, 4)
    assert shape("4", "3x5") == ((8, 4), (8, 3, 5))
    assert shape("ids=4:int64", "mask=4") == {"ids": (8, 4), "mask": (8, 4)}
    assert shape("pair.1=3", "pair.0=:int64", "pair.2.a=2") == {"pair": ((8,), (8, 3), {"a": (8, 2)})}
    assert shape("0.a=1", "0.b=2", "1=3") == ({"a": (8, 1), "b": (8, 2)}, (8, 3))
    assert shape("4x5", dim=1) == (4, 8, 5)
    assert shape("4", dim=1) == (4, 8)


MASKED = ["--input", "pair.0=3", "--input", "pair.1=3", "--input", "mask=:float32", "--input", "extra.shift=3"]


def test_keyword_arguments_and_nested_inputs(nets, capsys):
    assert estimate("--model", nets("Masked"), *MASKED, "--device-kind", "cpu", "--devices", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 8
    line = said(capsys, "estimate", "--batch-size", 8, "--model", nets("Masked"), *MASKED[:-1], "extra.shift=4")
    assert "Masked from" in line
    assert (
        "refuses pair [0] (8, 3) float32, [1] (8, 3) float32, mask (8,) float32, extra ['shift'] (8, 4) float32: Runtime" in line
    )


def test_rows_in_another_dimension(nets, capsys):
    flags = ["--model", nets("TimeMajor"), "--input", "7x3", "--dim", "1", "--device-kind", "cpu"]
    assert estimate(*flags, "--devices", "2", "--json") == 0
    output, errors = capsys.readouterr()
    found = json.loads(output)
    assert (found["rows"], found["devices"]) == (8, 2)
    assert "targets: (7, 8) int64" in errors
    assert estimate(*flags, "--micro-batch-size", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 4


def test_the_dimension_of_the_rows_is_kept_in_the_plan(nets, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "plan", lambda *args, **settings: asked.append(settings["dim"]) or planned())
    assert main(["plan", "--model", nets("TimeMajor"), "--input", "7x3", "--dim", "1", "--batch-size", "8"]) == 0
    assert asked == [1]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--input", "x=4", "--input", "4"], "'4' has no name where 'x' has one, expected a name for each, or for none"),
        (["--input", "x=4", "--input", "x=4"], "'x' is given twice"),
        (["--input", "x=4", "--input", "x.y=4"], "'x.y' lies in 'x', which has a shape of its own"),
        (["--input", "x.0=4", "--input", "x.2=4"], "the places in 'x' are 0, 2, expected names, or the numbers from 0 on"),
        (["--input", "0=4", "--input", "y=4"], "the places are 0, y, expected names, or the numbers from 0 on"),
        (["--input", "x-y=4"], "'x-y' is not a place in the input, expected names and numbers with dots between"),
        (["--input", "=4"], "'' is not a place in the input"),
        (["--input", "input=four"], "'four' is not the shape of a row"),
        (["--input", "output=4"], "refuses output (8, 4) float32: TypeError"),
        (["--input", "4", "--dim", "2"], "'4' has 1 sizes without the rows, expected at least 2 for rows in dimension 2"),
        (["--input", "4", "--dim", "first"], "'first' was given, expected a dimension: 0, 1, ..."),
        (["--input", "4", "--dim", "-1"], "'-1' was given, expected a dimension"),
    ],
)
def test_bad_places_are_one_line(nets, capsys, flags, wanted):
    assert wanted in said(capsys, "estimate", "--batch-size", 8, "--model", nets("small"), *flags)


def problem(model, inputs, targets=(), criterion=None):
    return model_loading.build_problem(model, inputs, targets, criterion, 8)


def test_several_inputs_and_criteria_of_ones_own(nets):
    found = problem(nets("Two"), ["3", "3"], ["1"], nets("distance"))
    assert [tuple(one.shape) for one in found.inputs] == [(8, 3), (8, 3)]
    assert (found.targets.shape, found.targets.dtype, found.assumed) == ((8, 1), torch.float32, ())
    found = problem(nets("Two"), ["3", "3"], criterion="mseloss")
    assert isinstance(found.criterion, nn.MSELoss)
    assert found.targets.shape == (8, 1)


def test_targets_that_are_not_known_have_to_be_said(nets):
    with pytest.raises(ValueError, match="targets of distance are not known: give the shape of one row as --target"):
        problem(nets("small"), ["4"], criterion=nets("distance"))
    with pytest.raises(ValueError, match="output is tuple: give --target, and a --criterion"):
        problem(nets("Pair"), ["3"])
    with pytest.raises(ValueError, match=r"output \(8,\) has no classes: give a --criterion, such as BCEWithLogitsLoss"):
        problem("torch.nn:Identity", [":float32"])
    with pytest.raises(ValueError, match=r"output \(4,\) does not have 8 rows along dimension 0: give --target"):
        problem(nets("Sum"), ["4"])


def test_classes_are_in_dimension_1_unless_the_inputs_or_targets_say_that_they_are_last(nets):
    image = problem("torch.nn:Identity", ["5x6x7"])
    assert image.targets.shape == (8, 6, 7)
    assert isinstance(image.criterion, nn.CrossEntropyLoss)
    positions = problem("torch.nn:Identity", ["5x6"])
    assert positions.targets.shape == (8, 6)
    last = problem("torch.nn:Identity", ["5x6"], ["5"])
    assert isinstance(last.criterion, model_loading.SequenceLoss)
    assert last.assumed == ("criterion: CrossEntropyLoss over the flattened logits (8, 5, 6)",)


def test_the_loss_of_sequences_is_exact_in_parts():
    output, targets = torch.randn(6, 5, 4), torch.randint(0, 4, (6, 5))
    targets[0, 1:] = -100
    loss = model_loading.SequenceLoss(nn.CrossEntropyLoss())
    whole = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss(output, targets), whole)
    parts = DataParallelCriterion(loss, ["cpu", "cpu"])([output[:3], output[3:]], targets)
    torch.testing.assert_close(parts, whole)


def test_files_see_their_neighbours_and_are_run_once(tmp_path):
    (tmp_path / "neighbour_of_model.py").write_text("width = 4\n")
    (tmp_path / "types.py").write_text(  # named as a module of Python's
        textwrap.dedent("""
        from pathlib import Path
        from dataclasses import dataclass
        from torch import nn
        from neighbour_of_model import width

        @dataclass
        class Settings:
            width: int = width

        with Path(__file__).with_name("runs").open("a") as runs:
            runs.write("x")

        def build():
            return nn.Linear(Settings().width, 3)

        loss = nn.MSELoss()
        """)
    )
    found = problem(f"{tmp_path}/types.py:build", ["4"], criterion=f"{tmp_path}/types.py:loss")
    assert isinstance(found.criterion, nn.MSELoss)
    assert (tmp_path / "runs").read_text() == "x"


# Pictures


def test_a_picture_without_matplotlib_says_what_to_install(nets, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = said(capsys, "estimate", "--model", nets("small"), "--input", 4, "--batch-size", 8, "--plot", tmp_path / "a.png")
    assert "pip install 'balanced-parallel[plot]'" in line


def test_a_picture_of_unequal_devices(tmp_path):
    settings = {"layout": "replicas", "devices": 2, "device_kind": "cpu"}
    report = memory.estimate(nn.Linear(64, 3), nn.CrossEntropyLoss(), torch.empty(8, 64), torch.zeros(8).long(), **settings)
    plot.draw_report(tmp_path / "a.png", report, ["64KiB", 2**20])
    plot.draw_report(tmp_path / "b.svg", report)
    plot.draw_report(tmp_path / "c.png", report, 1)  # not one row
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="3 sizes for 2 devices"):
        plot.draw_report(tmp_path / "d.png", report, [1, 2, 3])
