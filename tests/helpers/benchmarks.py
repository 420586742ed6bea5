"""Loads a benchmark as a module."""

import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(question, monkeypatch, name="main"):
    """Returns a program. The modules beside it, whose names other benchmarks use too, are forgotten with ``monkeypatch``."""
    spec = importlib.util.spec_from_file_location(
        f"{question}_benchmark", BENCHMARKS / question / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # it may add folders to it
    monkeypatch.setitem(sys.modules, spec.name, module)
    before = set(sys.modules)
    spec.loader.exec_module(module)
    for other in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[other], "__file__", "")):
            monkeypatch.setitem(sys.modules, other, sys.modules.pop(other))
    return module
