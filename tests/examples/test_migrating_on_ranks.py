"""Programs of the pages about ranks: they run under torchrun, and print what they print in one process."""

import re

import pytest
from helpers.pages import blocks
from helpers.processes import run_script
from helpers.torchrun import run_torchrun


def run_page(page, folder, run=run_torchrun, change=("", "")):
    """Runs the blocks of a page as one program. Returns what it prints."""
    program = folder / "page.py"
    program.write_text("\n".join(blocks(page, "python")).replace(*change))
    done = run(program, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/torchrun.md", "docs/recipes/several_hosts.md"])
def test_blocks_run_on_two_ranks(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
def test_the_recipe_prints_the_same_lines_in_each_layout(tmp_path):
    page = "docs/recipes/torchrun.md"
    shards = ("nn.CrossEntropyLoss())", 'nn.CrossEntropyLoss(), strategy="fsdp")')
    printed = [
        run_page(page, tmp_path, run_script),
        run_page(page, tmp_path),
        run_page(page, tmp_path, change=shards),
    ]
    # lines of ranks may run together
    lines = [set(re.findall(r"epoch \d, loss [\d.]+, \d+ of 90 right", text)) for text in printed]
    assert len(lines[0]) == 2
    assert lines[1:] == lines[:1] * 2
