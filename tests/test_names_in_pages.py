"""Files, classes and functions that the pages about the code name in backticks exist."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch
import torch.utils.flop_counter
from helpers.pages import ROOT
from helpers.sources import parse
from torch import nn

import balanced_parallel
from balanced_parallel import memory

PACKAGE = Path(balanced_parallel.__file__).parent
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
DEFINED = set(re.findall(r"^\s*(?:class|def) (\w+)", SOURCES, re.MULTILINE))
NAMESPACES = (balanced_parallel, nn, nn.parallel, torch.utils.flop_counter)
ROOTS = {
    "torch": torch,
    "nn": nn,
    "sys": sys,
    "plan": memory.MemoryPlan,
    "report": memory.MemoryReport,
}
WRITTEN = "metrics.jsonl"  # scripts/train.py writes it.


def names(text):
    """Returns the code in backticks, without blocks of code and names with places to fill in."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return sorted({name for name in inline if "<" not in name})


def is_missing(name):
    """Returns True for a path, a dotted name, a class or a call of a function that does not exist. Other code is not checked."""
    if re.fullmatch(r"[\w./-]+(/|\.py|\.md|\.yml|\.cff)", name):
        return not any((folder / name).exists() for folder in (ROOT, PACKAGE, ROOT / "tests"))
    match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?", name)
    if (
        match is None
        or name == WRITTEN
        or not (match[2] or "." in match[1] or re.match("[A-Z][a-z]", name))
    ):
        return False
    first, *rest = match[1].split(".")
    if not rest:
        is_argument = first in ("model", "criterion")
        return not (
            is_argument
            or first in DEFINED
            or any(hasattr(namespace, first) for namespace in NAMESPACES)
        )
    owner = ROOTS.get(first) or getattr(balanced_parallel, first, None)
    for part in rest:
        owner = getattr(owner, part, None)
    return owner is None


@pytest.mark.parametrize("page", ["docs/internals.md", "docs/memory.md", "CONTRIBUTING.md"])
def test_names_exist(page):
    assert [
        name for name in names((ROOT / page).read_text(encoding="utf-8")) if is_missing(name)
    ] == []


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def additions(text):
    """Yields each row of the first day: its example, its file, and the files of the tables that name it, with these."""
    for row in re.findall(r"^\| a [^|]*\| `(\w+)` \| `([\w/.]+)` \| (.*) \|$", text, re.MULTILINE):
        example, path, tables = row
        yield example, path, re.findall(r"`(\w+)` in `([\w/.]+)`", tables)


def words(source):
    """Returns the words of a source, without those of comments and docstrings."""
    docstrings = {
        line
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [
        each.string
        for each in tokens
        if each.type != tokenize.COMMENT and each.start[0] not in docstrings
    ]
    return set(re.findall(r"\w+", "\n".join(code)))


def definitions_of(path):
    """Returns the names that a file defines at its top."""
    names = set()
    for node in parse((PACKAGE / path).read_text(encoding="utf-8")).body:
        names |= {getattr(node, "name", "")}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return names


def test_the_first_day_names_the_files_that_an_addition_touches():
    found = [*additions(CONTRIBUTING)]
    assert [example for example, *_ in found] == ["offload_optimizer", "Coupled", "ShardedModel"]
    sources = {file: words(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
    for example, path, tables in found:
        assert example in definitions_of(path)
        assert all(name in definitions_of(file) for name, file in tables)
        naming = {
            file.relative_to(PACKAGE).as_posix()
            for file, used in sources.items()
            if example in used
        }
        assert naming <= {path, *[file for _, file in tables]}, example


def test_the_first_day_says_how_long_files_and_paths_are():
    for file, pattern in {
        "test_walls.py": r"splitlines\(\)\) > (\d+)",
        "test_path.py": r"\(1, 4, \((\d+), (\d+), (\d+)\)\)",
    }.items():
        numbers = re.search(pattern, (ROOT / "tests" / file).read_text(encoding="utf-8")).groups()
        assert all(re.search(rf"\b{number}\b", CONTRIBUTING) for number in numbers), numbers
