"""The form of the package: how much there is to read, and how hard it is. Lines are not counted, since packing lowers them."""

import ast
import functools
import io
import operator
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.sources import parse

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent

# Limits of the whole package. Lower them with what is measured. A rise has its reason in the commit.
MOST_TOKENS = 206_149
MOST_TOKENS_PER_LINE_OF_CODE = 9.0
MOST_BRANCHY_FUNCTIONS = 0
MOST_ANY_PER_1000_LINES = 18.5
MOST_ATTRIBUTES_OF_OTHERS = 28
MOST_FRAGMENTS_PER_100_COMMENTS = 0.5

BRANCHY = 15  # A function with more branches is counted.
NOT_READ = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
PRAGMAS = ("type:", "noqa", "mypy", "pragma", "fmt", "http")
FRAGMENT = re.compile(
    r"(of|that|those|by|with|without|for|in|its|their|until|since|as|where|also|not|from|to|at|on|which|who|what|has|how|whether|"
    r"behind|before|after|between|beside|but|or|and|than|such|otherwise|because|if|so)\b",
    re.IGNORECASE,
)


class Form(NamedTuple):
    """Figures of one source or, added up, of many."""

    tokens: int  # Comments, docstrings and ends of lines do not count.
    code_lines: int
    lines: int
    anys: int
    comments: int
    branchy: list[str]  # The lists have names with line numbers.
    outside: list[str]
    fragments: list[str]


def measure(source, place=""):
    """Returns the form of a source. Its ``place`` stands before line numbers."""
    tree = parse(source)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    code = code_tokens(tokens, docstring_lines(tree))
    comments = first_lines_of_comments(tokens)
    return Form(
        tokens=len(code),
        code_lines=len({token.start[0] for token in code}),
        lines=source.count("\n"),
        anys=sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree)),
        comments=len(comments),
        branchy=[place + entry for entry in branchy_functions(tree)],
        outside=[place + entry for entry in attributes_of_others(tree)],
        fragments=[f"{place}{line} {text}" for line, text in comments if FRAGMENT.match(text)],
    )


def measure_files(root):
    """Returns the form of all files below a folder, with the names of the files before the line numbers."""
    paths = sorted(root.rglob("*.py"))
    forms = [
        measure(path.read_text(encoding="utf-8"), f"{path.relative_to(root).as_posix()}:")
        for path in paths
    ]
    return Form(*(functools.reduce(operator.add, column) for column in zip(*forms, strict=True)))


def docstring_lines(tree):
    """Returns the numbers of the lines of docstrings."""
    lines = set()
    for node in ast.walk(tree):
        can_have = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if can_have and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_tokens(tokens, docstrings):
    """Returns the tokens of code."""
    return [
        token for token in tokens if token.type not in NOT_READ and token.start[0] not in docstrings
    ]


def first_lines_of_comments(tokens):
    """Returns the first line of each comment, with its line number."""
    found = []
    last = -2
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        goes_on = line == last + 1 and not token.line[:column].strip()
        last = line
        text = token.string.lstrip("# ").strip()
        if text and not goes_on and not text.startswith(PRAGMAS):
            found.append((line, text))
    return found


def branches(function):
    """Returns the cyclomatic number of a function, those inside of it included."""
    number = 1
    for node in ast.walk(function):
        if isinstance(
            node,
            (
                ast.If,
                ast.For,
                ast.While,
                ast.IfExp,
                ast.ExceptHandler,
                ast.With,
                ast.comprehension,
                ast.Assert,
            ),
        ):
            number += 1
        if isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            number += len(node.ifs)
    return number


def branchy_functions(tree):
    """Returns the functions with more than ``BRANCHY`` branches."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [
        f"{node.lineno} {node.name} {branches(node)}"
        for node in functions
        if branches(node) > BRANCHY
    ]


def attributes_of_others(tree):
    """Returns the attributes that are set on an object other than ``self``, ``cls`` and the ``ctx`` of autograd."""
    stores = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return [
        f"{node.lineno} {ast.unparse(node)}"
        for node in stores
        if ast.unparse(node.value) not in ("self", "cls", "ctx")
    ]


@pytest.fixture(scope="module", name="form")
def measure_package():
    return measure_files(PACKAGE)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="parts of an f-string are tokens there")
def test_tokens(form):
    assert form.tokens <= MOST_TOKENS
    assert round(form.tokens / form.code_lines, 1) <= MOST_TOKENS_PER_LINE_OF_CODE


def test_branchy_functions(form):
    assert len(form.branchy) <= MOST_BRANCHY_FUNCTIONS, form.branchy


def test_any(form):
    assert round(1000 * form.anys / form.lines, 1) <= MOST_ANY_PER_1000_LINES


def test_attributes_set_on_other_objects(form):
    assert len(form.outside) <= MOST_ATTRIBUTES_OF_OTHERS, form.outside


def test_fragments_among_comments(form):
    assert round(100 * len(form.fragments) / form.comments, 1) <= MOST_FRAGMENTS_PER_100_COMMENTS, (
        form.fragments
    )
