"""Programs of docs/recipes/ that need other libraries."""

import os
import re
import subprocess
import sys

import pytest
from helpers.pages import ROOT, blocks

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

ENVIRONMENT = {
    **os.environ,
    "WANDB_MODE": "offline",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "OMP_NUM_THREADS": "1",
}
OF_ACCELERATE = "from accelerate import"
OF_FABRIC = "from lightning.fabric import"


def run(program, folder, *launcher):
    (folder / "recipe.py").write_text(program)
    command = [sys.executable, *launcher, "recipe.py"]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def program_of_loggers(package):
    """Returns a program of the page. That for Fabric has the lines of the one for Accelerate, but for those of Accelerate."""
    loggers, accelerate, fabric = blocks("docs/recipes/logging.md", "py")
    assert OF_ACCELERATE in accelerate
    assert OF_FABRIC in fabric
    lines = accelerate.partition("for number")[0].splitlines()
    shared = [
        line for line in lines if not re.search("accelerator|accelerate |trackers|cpu=", line)
    ]
    return {"loggers": loggers, "accelerate": accelerate, "fabric": "\n".join([*shared, fabric])}[
        package
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("package", ["loggers", "accelerate", "fabric"])
def test_loggers(package, ranks, tmp_path):
    """They run in one process and under torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    run(program_of_loggers(package), tmp_path, *launcher)
    assert [*tmp_path.glob("**/events.out.tfevents*")]
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == (package != "fabric")


def test_lightning(tmp_path):
    program, _ = blocks("docs/recipes/lightning.md", "py")
    run(program, tmp_path)
    assert [*tmp_path.glob("**/events.out.tfevents*")]


def test_a_plan_of_adapters(tmp_path):
    (plan,) = blocks("docs/recipes/lora.md", "py")
    printed = run("\n".join([*blocks("docs/recipes/lora.md", "python"), plan]), tmp_path)
    assert printed.startswith("fits: yes")


def test_a_trainer_of_trl(tmp_path):
    """A program has a model and rows of tests before it, and devices without GPUs."""
    (program,) = blocks("docs/recipes/trainer.md", "py")
    before = """
import torch
from helpers.language_rows import language_rows, make_language_model, make_tokenizer

model, rows, tokenizer = make_language_model(), language_rows(13, "prompt", "completion"), make_tokenizer()
"""
    program = program.replace(
        'SFTConfig("run", ',
        'SFTConfig("run", use_cpu=True, bf16=False, max_steps=2, report_to="none", ',
    )
    program = program.replace(
        "    processing_class", '    device_ids=["cpu"] * 2,\n    processing_class'
    )
    run(before + program + "assert trainer.state.global_step == 2\n", tmp_path)


def test_packed_rows(tmp_path):
    (program,) = blocks("docs/recipes/transformers.md", "py")
    before = """
from transformers import DataCollatorWithFlattening

from balanced_parallel import ByCost, Whole

texts = [{"input_ids": row[: 3 + number].tolist()} for number, row in enumerate(tokens)]
net.train()
"""
    after = """
expected = sum(
    net(input_ids=torch.tensor([text["input_ids"]]), labels=torch.tensor([text["input_ids"]])).loss * (len(text["input_ids"]) - 1)
    for text in texts
) / sum(len(text["input_ids"]) - 1 for text in texts)
torch.testing.assert_close(loss, expected)
"""
    start = "\n".join(blocks("docs/recipes/transformers.md", "python"))
    start = start.replace("**sizes", "resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **sizes")
    run(
        start
        + before
        + program.replace("optimizer, cut", "torch.optim.SGD(net.parameters(), lr=0.0), cut")
        + after,
        tmp_path,
    )
