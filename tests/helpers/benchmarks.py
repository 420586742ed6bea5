"""Loads a benchmark as a module."""

import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(question, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"{question}_benchmark", BENCHMARKS / question / "main.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # it may add the scripts to it
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
