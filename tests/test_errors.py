"""Errors of the package: one sentence, which says what is expected or what to do."""

import ast
import re
from pathlib import Path

from helpers.sources import parse

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent
VERBS = (
    "add begin build call estimate freeze give install keep leave look lower make name pass pip put register run say see select "
    "set simulate start train try unset use wrap write"
)
WAY_OUT = re.compile(rf"[Ee]xpected|[:;,] ((and|or|also|so|for .*) )?({VERBS.replace(' ', '|')})\b")
END_OF_SENTENCE = re.compile(r"[\w)\]…']\. [A-Z]")
# Texts that are part of another message, or whose way out is the opposite of what they say.
WITHOUT = (
    "… has other contents than were written",
    "… is not a plain file of the folder",
    "ranks … have not started within",
    "there is no device …: …; device_ids may repeat",
    "… is not a memory size, it has no unit",
    "the memory does not depend on the rows",
    "the process that traced the step ended without a result",
    "…: …; a plan needs",
)
# Errors of a GPU that is not known, and of a trace, whose first sentence is that of the program.
LONGER = ("device_kind=…", "the allocator of … devices is not known", "…: …. Before it")


def errors_of(source):
    """Yields line number and text of each raised error.

    The text has all arguments. An ellipsis stands for values, but not for constants of the module.
    """
    tree = parse(source)
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {
        target.id: node.value
        for node in assignments
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node):
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        if isinstance(node, ast.FormattedValue):
            return text(node.value)
        return (
            text(constants[node.id]) if isinstance(node, ast.Name) and node.id in constants else "…"
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.lineno, "".join(map(text, node.exc.args))


def faults(source):
    """Returns the errors of a source that have several sentences, or neither "expected" nor something to do.

    Those that end with a text of another place are left out.
    """
    found = []
    for line, text in errors_of(source):
        if END_OF_SENTENCE.search(text) and not text.startswith(LONGER):
            found.append(f"{line}: several sentences: {text}")
        if not text.endswith("…") and not WAY_OUT.search(text) and not text.startswith(WITHOUT):
            found.append(f"{line}: nothing to do: {text}")
    return found


def test_errors_are_one_sentence_that_says_what_to_do():
    found = {
        path.relative_to(PACKAGE).as_posix(): faults(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert not {name: texts for name, texts in found.items() if texts}
