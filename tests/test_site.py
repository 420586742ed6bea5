"""The documentation site has every page, every benchmark and every public name."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.questions import ANSWERS

import balanced_parallel

ROOT = Path(__file__).parents[1]
CONTENTS = (ROOT / "docs" / "site" / "contents.md").read_text()
NAVIGATION = {  # A page may have a label before it: Label <page>
    caption: re.findall(r"^(?:.* <)?([\w/]+)>?$", pages, re.MULTILINE)
    for caption, pages in re.findall(r":caption: (\w+)\n:hidden:\n\n(.*?)```", CONTENTS, re.DOTALL)
}
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "recipes").glob("*.md")]


def test_the_navigation_has_all_pages_but_internals_once():
    assert [*NAVIGATION] == ["Start", "Recipes", "Concepts", "Reference"]
    names = {page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES} - {
        "docs/README",
        "docs/internals",
    }
    names |= {"examples/README", "benchmarks/README", "CONTRIBUTING", "CHANGELOG"}
    assert sorted(page for pages in NAVIGATION.values() for page in pages) == sorted(names)


def test_pages_have_the_words_of_their_questions_in_a_heading():
    """A word of a heading counts more in the search. The browser's test asks for the order."""
    assert len(ANSWERS) >= 20
    for question, name in ANSWERS.items():
        page = (ROOT / f"{name}.md").read_text()
        headings = " ".join(re.findall(r"^#+ (.*)$", page, re.MULTILINE)).lower()
        words = [word for word in question.lower().split() if word != "cuda"]
        assert all(word in headings for word in words), (question, name)


def test_recipes_of_the_navigation_are_those_of_their_folder():
    recipes = {f"docs/recipes/{path.stem}" for path in (ROOT / "docs" / "recipes").glob("*.md")}
    assert {*NAVIGATION["Recipes"]} == recipes | {"examples/README"}
    assert "](docs/recipes/notebook.ipynb)" in CONTENTS  # a file, not a page


def test_the_front_page_leads_to_each_concept():
    links = [
        link.removesuffix(".md")
        for link in re.findall(r"^\|.*\]\((.*)\) \|$", CONTENTS, re.MULTILINE)
    ]
    assert NAVIGATION["Concepts"] == links
    assert len(links) == 8


def test_the_list_of_benchmarks_leads_to_each():
    listed = re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "benchmarks" / "README.md").read_text())
    assert sorted(listed) == sorted(
        path.parent.name for path in (ROOT / "benchmarks").glob("*/README.md")
    )


def test_reference_has_a_page_for_every_public_name():
    lists = re.findall(
        r"autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", (ROOT / "docs" / "api.md").read_text()
    )
    names = {name for name in balanced_parallel.__all__ if name not in ("memory", "savings")}
    names |= {f"memory.{name}" for name in balanced_parallel.memory.__all__}
    names |= {f"savings.{name}" for name in balanced_parallel.savings.__all__}
    names.add("integrations.transformers.BalancedTrainer")
    assert sorted("".join(lists).split()) == sorted(names)


def test_drawn_pictures_are_those_of_the_program():
    drawings = runpy.run_path(ROOT / "docs" / "drawings.py")
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("internals", "debug")]
    for name, draw in drawings["DRAWINGS"].items():
        picture = draw().svg()
        assert (drawings["IMAGES"] / f"{name}.svg").read_text() == picture, (
            "run python docs/drawings.py"
        )
        ElementTree.fromstring(picture)
        assert any(f"](images/{name}.svg)" in page for page in pages)


def test_plots_are_narrow_so_that_a_phone_shows_their_words():
    """Words of 11 points are 18 of 576 dots high, so 11 of the 358 of a phone."""
    plots = [*(ROOT / "docs" / "images").glob("*.png")]
    assert len(plots) == 2
    widths = {plot.name: int.from_bytes(plot.read_bytes()[16:20], "big") for plot in plots}
    assert all(width <= 576 for width in widths.values()), widths


@pytest.mark.slow
def test_site_has_a_folder_for_each_release(tmp_path):
    pytest.importorskip("sphinx")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", clone], check=True)
    subprocess.run(["git", "tag", "v0.0.9"], cwd=clone, check=True)
    subprocess.run(
        ["docs/site/build.sh"], cwd=clone, env={**os.environ, "PYTHON": sys.executable}, check=True
    )
    site = clone / "build" / "site"
    for page, links in {
        "README.html": ["#", "v0.0.9/README.html"],
        "docs/training.html": ["../README.html", "../v0.0.9/README.html"],
        "v0.0.9/docs/training.html": ["../../README.html", "../../v0.0.9/README.html"],
    }.items():
        versions = (site / page).read_text().partition(">Versions<")[2].partition("</ul>")[0]
        assert re.findall(r'href="([^"]*)"', versions) == links
        assert all((site / page).parent.joinpath(link).exists() for link in links if link != "#")
    # The templates of autosummary list members, and not the constructor a second time.
    reference = (site / "docs" / "reference" / "balanced_parallel.TrainStep.html").read_text()
    assert "balanced_parallel.TrainStep.__call__" in reference
    assert "__init__" not in reference
