"""The documentation site has every page, every benchmark and every public name."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import balanced_parallel

ROOT = Path(__file__).parents[1]
CONTENTS = (ROOT / "docs" / "site" / "contents.md").read_text()
PAGES = [path for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]


def test_pages_are_in_the_table_of_contents():
    names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES]
    assert not [name for name in names if not re.search(rf"^(.*<)?{name}>?$", CONTENTS, re.MULTILINE)]


def test_the_front_page_leads_to_each_promise():
    promises = re.search(r":caption: Promises\n:hidden:\n\n(.*?)```", CONTENTS, re.DOTALL)[1].split()
    assert len(promises) == 7
    assert promises == [link.removesuffix(".md") for link in re.findall(r"^\|.*\]\((.*)\) \|$", CONTENTS, re.MULTILINE)]


def test_the_list_of_benchmarks_leads_to_each():
    listed = re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "benchmarks" / "README.md").read_text())
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/README.md"))


def test_reference_has_a_page_for_every_public_name():
    lists = re.findall(r"autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", (ROOT / "docs" / "api.md").read_text())
    names = {name for name in balanced_parallel.__all__ if name not in ("memory", "savings")}
    names |= {f"memory.{name}" for name in ("estimate", "plan", "fit", "MemoryReport", "MemoryPlan")}
    names |= {f"savings.{name}" for name in balanced_parallel.savings.__all__}
    names.add("integrations.transformers.BalancedTrainer")
    assert sorted("".join(lists).split()) == sorted(names)


def test_pictures_of_the_internals_are_those_of_the_program():
    drawings = runpy.run_path(ROOT / "docs" / "drawings.py")
    page = (ROOT / "docs" / "internals.md").read_text()
    for name, draw in drawings["DRAWINGS"].items():
        picture = draw().svg()
        assert (drawings["IMAGES"] / f"{name}.svg").read_text() == picture, "run python docs/drawings.py"
        ElementTree.fromstring(picture)
        assert f"](images/{name}.svg)" in page


@pytest.mark.slow
def test_site_has_a_folder_for_each_release(tmp_path):
    pytest.importorskip("sphinx")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", clone], check=True)
    subprocess.run(["git", "tag", "v0.0.9"], cwd=clone, check=True)
    subprocess.run(["docs/site/build.sh"], cwd=clone, env={**os.environ, "PYTHON": sys.executable}, check=True)
    site = clone / "build" / "site"
    for page, links in {
        "README.html": ["#", "v0.0.9/README.html"],
        "docs/training.html": ["../README.html", "../v0.0.9/README.html"],
        "v0.0.9/docs/training.html": ["../../README.html", "../../v0.0.9/README.html"],
    }.items():
        versions = (site / page).read_text().partition(">Versions<")[2].partition("</ul>")[0]
        assert re.findall(r'href="([^"]*)"', versions) == links
        assert all((site / page).parent.joinpath(link).exists() for link in links if link != "#")
