"""Docstrings open with a verb or a noun, and every public definition has one."""

import ast
import itertools
import re
from pathlib import Path

import pytest
from helpers.sources import parse

ROOT = Path(__file__).parents[1]
FOLDERS = ("balanced_parallel", "benchmarks", "examples", "scripts")

# Words that open a fragment of a sentence, or refer to a word that is not there.
PRONOUNS = (
    "he her his it its itself neither nobody none nothing other others same she such that their "
    "theirs them these they this those"
)
QUESTIONS = (
    "how what whatever when whenever where wherever whether which who whoever whom whose why"
)
CONJUNCTIONS = "although and as because but if nor or since so than though unless until while yet"
PREPOSITIONS = (
    "after at before beside beyond by down during for from in inside into like of on out outside over through till to toward "
    "under unlike up upon with within without"
)
OTHERS = "are can had has have having here is just less more most much no not once only rather said then there too was were"
FORBIDDEN = {
    word
    for words in (PRONOUNS, QUESTIONS, CONJUNCTIONS, PREPOSITIONS, OTHERS)
    for word in words.split()
}


def definitions(source):
    """Yields the module, and all functions and classes, as ``(node, is_public)``; definitions inside functions are private."""
    tree = parse(source)
    waiting = [(tree, True)]
    while waiting:
        node, is_public = waiting.pop()
        yield node, is_public
        inside_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node) if inside_function else _statements(node):
            if child is not node and isinstance(
                child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ):
                public = (
                    is_public
                    and not inside_function
                    and not child.name.startswith("_")
                    and not _has_no_docstring(child)
                )
                waiting.append((child, public))


def _statements(node):
    """Yields the statements of a module or a class, including those under ``if`` and ``try``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.If, ast.Try)):
            yield from _statements(child)


def _has_no_docstring(node):
    """Returns True for setters of properties and for overloads, whose docstring is that of another definition."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(
        re.fullmatch(r".*\.(setter|deleter)|(typing\.)?overload", decorator)
        for decorator in decorators
    )


def opens_badly(node):
    """Returns True for a docstring with a forbidden first word, and for that of a function if it opens with code."""
    docstring = ast.get_docstring(node) or ""
    if docstring.startswith(("`", ":")):
        return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    word = re.match(r"\W*([A-Za-z']+)", docstring)
    return word is not None and word[1].lower() in FORBIDDEN


def bad_openers(source):
    """Returns the first lines of docstrings that open neither with a verb nor with a noun."""
    return [
        ast.get_docstring(node).splitlines()[0]
        for node, _ in definitions(source)
        if opens_badly(node)
    ]


def undocumented(source):
    """Returns the names of public definitions without a docstring."""
    missing = [
        node
        for node, is_public in definitions(source)
        if is_public and ast.get_docstring(node) is None
    ]
    return [getattr(node, "name", "module") for node in missing]


def unmarked_drawings(source):
    """Returns the first lines of indented blocks of the module's docstring that no ``::`` marks as literal.

    Formatters fill the lines of other blocks, as those of a paragraph.
    """
    docstring = ast.get_docstring(parse(source)) or ""
    paragraphs = docstring.split("\n\n")
    drawings = []
    for before, after in itertools.pairwise(paragraphs):
        if after.startswith(" ") and not before.startswith(" ") and not before.endswith("::"):
            drawings.append(after.splitlines()[0])
    return drawings


WIDTH = 100  # Formatters fill the lines of docstrings up to this column.


def refilled_lines(source):
    """Returns the lines of literal blocks that begin in the middle of a sentence of the line before.

    A formatter has filled that line: it has no room for the first word of the next one, and no column of both is the same.
    """
    found = []
    for node, _ in definitions(source):
        docstring = ast.get_docstring(node, clean=False) or ""
        for paragraph in docstring.replace("::\n\n", "::\0").split("\n\n"):
            block = paragraph.rpartition("::\0")[2] if "::\0" in paragraph else ""
            found += [
                after.strip()
                for before, after in itertools.pairwise(block.splitlines())
                if _goes_on(before, after)
            ]
    return found


def _goes_on(before, after):
    """Returns True if ``after`` begins with a word for which ``before`` had no room."""
    words = after.split()
    is_filled = len(before) <= WIDTH < len(before) + 1 + len(words[0]) if words else False
    return (
        is_filled and _indent(before) == _indent(after) and not _columns(before) & _columns(after)
    )


def _indent(line):
    return len(line) - len(line.lstrip())


def _columns(line):
    """Returns the places where a column begins: after several spaces or a bar."""
    return {match.end() for match in re.finditer(r"\S(?: {2,}| \| ?)", line)}


CHECKS = [bad_openers, undocumented, unmarked_drawings, refilled_lines]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_have_the_form_of_those_of_torch(folder, check):
    """They open with a verb or a noun, and formatters fill no drawing of theirs as prose."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {path: check(path.read_text(encoding="utf-8")) for path in paths}
    assert found
    assert {path: lines for path, lines in found.items() if lines} == {}
