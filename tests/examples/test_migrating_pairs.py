"""Programs before and after a migration: their real differences, their errors, and the plain program."""

import difflib
import os
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from helpers import pytorch_encoding
from helpers.optimizers import sgd
from helpers.pages import PAGES, ROOT, blocks
from helpers.ranks import run_ranks
from torch.nn import functional as F
from torch.utils.data import default_collate

from balanced_parallel import simulate

FOLDER = ROOT / "examples" / "migrating"
GPUS = 4
LEARNING_RATE = 0.5

# Errors of the programs before. Those that are not here, and all programs after, train as the plain program does.
ERRORS = {
    "encoding": 0.087,  # the mean of the GPUs' means
    "ddp": 0.13,  # the mean over ranks and micro-batches
    "accelerate": 0.15,
    "fabric": 0.13,
    "trainer": 0.80,  # the last batch of an epoch
}


def test_the_difference_of_the_page_is_that_of_the_programs():
    """The page leaves lines out, such as those of a docstring, and changes none."""
    (block,) = blocks("docs/recipes/torchrun.md", "diff")
    texts = [(FOLDER / "ddp" / name).read_text().splitlines() for name in ("before.py", "after.py")]
    difference = iter(difflib.unified_diff(*texts, n=0, lineterm=""))
    assert all(line in difference for line in block.splitlines())  # They have one order.
    assert len(block.splitlines()) >= 15


def test_pages_link_to_every_program():
    text = "".join(PAGES[f"docs/recipes/{name}.md"] for name in ("dataparallel", "torchrun"))
    linked = {
        Path(name).parent
        for name in re.findall(r"\(\.\./\.\./(examples/migrating/\w+/after\.py)\)", text)
    }
    assert linked == {path.relative_to(ROOT) for path in FOLDER.iterdir() if path.is_dir()}


def test_programs_are_short():
    assert all(len(path.read_text().splitlines()) <= 66 for path in FOLDER.glob("*/*.py"))


def run_plain(name, loss_of, batch_size):
    """Trains the model of a program on one device. Returns its weights before and after, and the losses."""
    program = runpy.run_path(str(FOLDER / name / "after.py"))
    torch.manual_seed(0)
    model = program["Tagger" if "Tagger" in program else "make_net"]()
    first = {key: value.clone() for key, value in model.state_dict().items()}
    rows = program["load_rows"]()
    optimizer = sgd(model, lr=LEARNING_RATE)
    losses = []
    for start in range(0, len(rows), batch_size):
        loss = loss_of(
            model,
            default_collate(
                [rows[row] for row in range(start, min(start + batch_size, len(rows)))]
            ),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return first, model.state_dict(), losses


def tags_loss(model, batch):
    words, tags = batch
    output = model(words)
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, tags)


def relative_error(weights, first, expected):
    """Returns the norm of the difference over the norm of the change that training has made."""
    difference, change = (
        torch.cat([(one[key] - other[key]).flatten() for key in expected]).norm()
        for one, other in ((weights, expected), (expected, first))
    )
    return float(difference / change)


def run_simulated(name, which):
    """Returns the weights after a program has trained on simulated GPUs, and the losses of its log."""
    with simulate(GPUS):
        module, losses = runpy.run_path(str(FOLDER / name / f"{which}.py"))["main"]()
        return {key: value.cpu() for key, value in module.state_dict().items()}, losses


def run_rank(rank, path):
    """Runs a program on one of two ranks. Returns the weights and the losses."""
    torch.set_default_dtype(torch.float64)
    os.environ.update(TORCHELASTIC_RUN_ID="test", ACCELERATE_USE_CPU="true")
    module, losses = runpy.run_path(path)["main"]()
    return module.state_dict(), losses


def check(name, plain, runs):
    first, expected, expected_losses = plain
    for which, (weights, losses) in runs.items():
        error = relative_error(weights, first, expected)
        if which == "before" and name in ERRORS:
            assert error == pytest.approx(ERRORS[name], rel=0.05)
        else:
            assert error < 1e-10
            assert losses == pytest.approx(expected_losses, rel=1e-10)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "batch_size"), [("data_parallel", 14), ("encoding", 16)])
def test_programs_of_one_process(name, batch_size, monkeypatch):
    monkeypatch.setitem(sys.modules, "encoding", types.ModuleType("encoding"))
    monkeypatch.setitem(sys.modules, "encoding.parallel", pytorch_encoding)
    check(
        name,
        run_plain(name, tags_loss, batch_size),
        {which: run_simulated(name, which) for which in ("before", "after")},
    )


@pytest.mark.usefixtures("double")
@pytest.mark.slow  # the programs of one process have the same forms
@pytest.mark.parametrize("name", ["ddp", "accelerate", "fabric"])
def test_programs_of_two_ranks(name):
    ranks = {
        which: run_ranks(2, run_rank, str(FOLDER / name / f"{which}.py"), fresh=True)
        for which in ("before", "after")
    }
    plain = run_plain(name, tags_loss, 16)
    for rank in (0, 1):
        check(name, plain, {which: results[rank] for which, results in ranks.items()})


@pytest.mark.usefixtures("double")
def test_trainer_left(monkeypatch):
    arguments = transformers.TrainingArguments
    monkeypatch.setattr(
        torch.Tensor, "float", lambda tensor: tensor
    )  # the model's loss casts to float32, which hides errors
    monkeypatch.setattr(arguments, "n_gpu", GPUS)
    monkeypatch.setattr(
        arguments, "device", property(lambda self: (self._setup_devices, torch.device("sim:0"))[1])
    )
    runs = {which: run_simulated("trainer", which) for which in ("before", "after")}
    plain = run_plain("trainer", lambda model, batch: model(**batch).loss, 16)
    check("trainer", plain, runs)
    logged = runs["before"][1]
    losses = plain[2]
    assert logged == pytest.approx(
        [*losses[:-1], 2 * losses[-1]], rel=1e-10
    )  # two of the four GPUs have rows
