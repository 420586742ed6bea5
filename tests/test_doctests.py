"""Examples in the docstrings of the package run, and the public names have one."""

import doctest
import importlib.util
import inspect
import operator
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import balanced_parallel

NAMES = {
    "torch": torch,
    "nn": nn,
    **{name: getattr(balanced_parallel, name) for name in balanced_parallel.__all__},
}
WITH_EXAMPLE = {
    name for name in balanced_parallel.__all__ if callable(getattr(balanced_parallel, name))
}
assert set(balanced_parallel.__all__) - WITH_EXAMPLE == {"memory", "savings"}  # packages
REFERENCE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
IN_PACKAGES = [f"savings.{name}" for name in balanced_parallel.savings.__all__]
IN_PACKAGES += re.findall(
    r"^   (memory\.(?!MemoryPlan)\w+)$", REFERENCE, re.MULTILINE
)  # plan makes one


def examples():
    finder = doctest.DocTestFinder()
    for info in pkgutil.walk_packages(balanced_parallel.__path__, "balanced_parallel."):
        *_, package, name = info.name.split(".")
        is_there = package != "integrations" or importlib.util.find_spec(name)
        if is_there and name != "__main__":
            module = importlib.import_module(info.name)
            for example in finder.find(module, globs={**NAMES, **vars(module)}):
                if example.examples:
                    yield pytest.param(example, id=example.name)


def is_skipped(example):
    return example.options.get(doctest.SKIP, False)


@pytest.mark.usefixtures("trace_in_this_process")
@pytest.mark.parametrize("example", list(examples()))
def test_examples_in_docstrings_run(example):
    report = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLE) + IN_PACKAGES)
def test_public_names_have_an_example(name):
    docstring = inspect.getdoc(operator.attrgetter(name)(balanced_parallel))
    parsed = doctest.DocTestParser().get_examples(docstring)
    assert [example for example in parsed if not is_skipped(example)]
