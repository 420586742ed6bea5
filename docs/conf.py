"""Settings of the documentation site. To build it: ``sphinx-build -W -c docs . build/site``."""

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import balanced_parallel  # noqa: E402 - this checkout, not an installed version

project = "balanced_parallel"
author = "The balanced_parallel maintainers"
copyright = f"2026 {author}"
release = version = balanced_parallel.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# the root of the repository is the source, so that links between its files work here as they do on GitHub
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/recipes/*.md", "docs/images/**"]
include_patterns += ["examples/README.md", "benchmarks/README.md", "benchmarks/*/README.md"]
include_patterns += ["docs/reference/*.rst"]  # autosummary writes them
outside_of_the_navigation = {"docs/README", "docs/internals"}  # the first lists the pages for readers of the repository
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
highlight_language = "none"  # of a block without a language: a drawing or an output
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

templates_path = [str(ROOT / "docs" / "site" / "templates")]  # autosummary looks from the root, sphinx from docs/
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # A signature with <class ...> would be one long text.
maximum_signature_line_length = 72  # A longer signature has a line for each argument.
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_rtype = False

html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/balanced-parallel/balanced_parallel/",
    "source_branch": "main",
    "source_directory": "",
}
pygments_style, pygments_dark_style = "friendly", "monokai"
html_title = f"{project} {release}"
# docs/site/build.sh builds the releases too, each in a folder of its tag
versions = [("main", ""), *((tag, f"{tag}/") for tag in os.environ.get("DOCS_RELEASES", "").split())]
folder = os.environ.get("DOCS_ROOT", "")  # of the site of main, seen from this one
html_context = {"versions": [(name, f"{folder}{place}README.html") for name, place in versions if versions[1:]]}
html_sidebars = {
    "**": [f"sidebar/{part}.html" for part in ("brand", "search", "scroll-start", "navigation", "versions", "scroll-end")]
}
html_static_path = ["site/static"]
html_css_files = ["pages.css"]
html_search_scorer = str(ROOT / "docs" / "site" / "search_order.js")
html_extra_path = ["site/index.html"]  # index.html, which leads to the first page
html_copy_source = False
html_show_sourcelink = False


def add_contents(app: object, page: str, source: list[str]) -> None:
    """Adds what GitHub would show as text: the tables of contents of the front page and the list of benchmarks, and the
    mark of pages that are in none.
    """
    if page in outside_of_the_navigation:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    if page == root_doc:
        source[0] += "\n" + (Path(__file__).parent / "site" / "contents.md").read_text()
    if page == "benchmarks/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*/README\n```\n"


def break_names(app: object, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Lets long names of headings and of code break behind dots, for phones."""
    if "body" in context:
        parts = re.split(r"(<h1>.*?</h1>|<span class=\"pre\">[^<]*</span>)", context["body"])
        parts[1::2] = [re.sub(r"(?<=\w)\.(?=\w)", ".<wbr>", part) for part in parts[1::2]]
        context["body"] = "".join(parts)


def setup(app: Any) -> None:
    """Connects the changes of pages."""
    app.connect("source-read", add_contents)
    app.connect("html-page-context", break_names)
