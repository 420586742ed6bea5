"""The pairs of examples: equal losses on three replicas, in float64, and a difference of a few lines."""

import difflib
import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers.processes import run_script
from helpers.ranks import run_ranks
from helpers.slow import slow_but

from balanced_parallel import Rows, TrainStep, parallelize, simulate

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = sorted(path.parent.name for path in EXAMPLES.glob("*/plain.py"))
IMAGES = "image_classification"  # All devices compute it in float32.
TRAINED = sorted({*PAIRS} - {IMAGES})  # The third, detection, takes long.
MOST_LINES = dict.fromkeys(PAIRS, (9, 80)) | {
    IMAGES: (7, 55),
    "detection": (9, 99),
}  # Lines that are added, and lines of a program.


def load(pair, name):
    """Returns the function with which a program begins."""
    return runpy.run_path(str(EXAMPLES / pair / f"{name}.py"))["main"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("pair", slow_but(TRAINED, *TRAINED[:2], *TRAINED[3:]))
def test_losses_are_equal(pair, capsys):
    (expected, printed), (losses, printed_too) = (
        (load(pair, name)(), capsys.readouterr().out) for name in ("plain", "balanced")
    )
    assert losses == pytest.approx(expected, rel=1e-10)
    assert printed_too == printed
    assert printed.count("\n") >= 4
    assert sum(expected[-4:]) < sum(expected[:4])


def losses_of_detection(rank, strategy):
    """Trains the plain example over ranks, of which one has no row in the first step."""
    torch.set_default_dtype(torch.float64)
    example = runpy.run_path(str(EXAMPLES / "detection" / "plain.py"))
    torch.manual_seed(0)
    model, criterion = parallelize(
        example["Net"](), example["detection_loss"], ["cpu"], strategy=strategy
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=4, max_grad_norm=0.5)
    batches = [*example["load_batches"]()][:6]  # A step draws numbers.
    losses = []
    for number, (images, targets) in enumerate(batches):
        part = slice(0, number) if rank else slice(number, None)
        losses.append(step(images[part], Rows(targets[part])).item())
    return losses


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_detect_as_the_plain_program(strategy):
    expected = load("detection", "plain")()[:6]
    for losses in run_ranks(2, losses_of_detection, strategy, timeout=200):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_losses_of_images_on_three_simulated_gpus_equal_the_plain_program(monkeypatch):
    plain, balanced = (load(IMAGES, name) for name in ("plain", "balanced"))
    for main in (plain, balanced):
        monkeypatch.setitem(main.__globals__, "STEPS", 6)
    expected = plain()
    with simulate(3) as cluster:
        assert balanced() == pytest.approx(expected, rel=1e-4)
        assert min(cluster.peak) > 0
    assert len(set(expected)) == 6


@pytest.mark.slow
def test_programs_of_images_print_the_same_accuracies():
    outputs = [run_script(EXAMPLES / IMAGES / name).stdout for name in ("plain.py", "balanced.py")]
    assert outputs[0].count("accuracy") == 7
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("pair", PAIRS)
def test_programs_are_short_and_differ_in_a_few_lines(pair):
    plain, balanced = (
        (EXAMPLES / pair / f"{name}.py").read_text().splitlines() for name in ("plain", "balanced")
    )
    added = [
        line[2:]
        for line in difflib.ndiff(plain, balanced)
        if line.startswith("+ ") and line[2:].strip()
    ]
    most_added, longest = MOST_LINES[pair]
    assert len(added) <= most_added
    assert max(len(plain), len(balanced)) <= longest


def test_page_lists_every_pair_and_shows_a_true_difference():
    page = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"\((\w+)/balanced\.py\)", page)) == PAIRS
    plain, balanced = (
        (EXAMPLES / "contrastive" / f"{name}.py").read_text().splitlines()
        for name in ("plain", "balanced")
    )
    (difference,) = re.findall("```diff\n(.*?)```", page, re.DOTALL)
    assert {line[1:] for line in difference.splitlines() if line[0] in "- "} <= set(plain)
    assert {line[1:] for line in difference.splitlines() if line[0] in "+ "} <= set(balanced)
