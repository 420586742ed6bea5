"""The problem of a command line: a function in a file that returns module, criterion, inputs and targets."""

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..batch.containers import describe, map_leaves
from ..batch.rows import as_arguments
from .estimation import rows_of

# Files of torch, of this package and of Python: their lines do not show the mistake of a user
_NOT_THE_USERS = (*(str(Path(place).parent) for place in (torch.__file__, Path(__file__).parent, traceback.__file__)), "<")


@dataclass(frozen=True)
class Problem:
    """Arguments of :func:`estimate` and :func:`plan`. The doctor accepts None for all but the module."""

    module: nn.Module
    criterion: Callable[..., Any] | None
    inputs: Any
    targets: Any

    def rows(self, dim: int) -> int:
        """Returns the number of rows of the batch."""
        return rows_of(as_arguments(self.inputs), dim)

    def with_rows(self, rows: int, dim: int) -> tuple[Any, Any]:
        """Returns inputs and targets on the meta device with ``rows`` rows, or the multiple that a tensor has, along ``dim``."""
        present = self.rows(dim)

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.size(dim) % present:
                return leaf
            shape = [*leaf.shape[:dim], leaf.size(dim) // present * rows, *leaf.shape[dim + 1 :]]
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return map_leaves(resize, self.inputs), map_leaves(resize, self.targets)


def build_problem(place: str) -> Problem:
    """Makes the problem at ``place``, on the meta device if the function can run there.

    ``my_file.py:build`` or ``package.module:build`` is a function without required arguments that returns
    ``(module, criterion, inputs, targets)``; for the doctor also a module or ``(module, criterion)``.
    """
    result = _make(place, _find(place))
    parts = result if isinstance(result, tuple) else (result,)
    module, criterion, inputs, targets = (*parts, *[None] * (4 - len(parts)))[:4]
    is_problem = len(parts) in (1, 2, 4) and isinstance(module, nn.Module) and (len(parts) == 1 or callable(criterion))
    if not is_problem:
        returned = ", ".join(map(describe, parts))
        raise ValueError(f"{place} returned {returned}: expected (module, criterion, inputs, targets)")
    return Problem(module, criterion, inputs, targets)


def _find(place: str) -> Any:
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"{place!r} is not a place, expected my_file.py:name or package.module:name")
    try:
        with patch.object(sys, "argv", [where]):  # a script may read its flags at import
            result: Any = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise ValueError(f"{where} cannot be imported: {_in_one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(result, part):
            names = [key for key, value in vars(result).items() if getattr(value, "__module__", None) == result.__name__]
            raise ValueError(f"{where} has no {name!r}; it defines: {', '.join(names[:20]) or 'nothing'}")
        result = getattr(result, part)
    return result


def _load_file(path: Path) -> ModuleType:
    path = path.resolve(strict=True)
    name = re.sub(r"\W", "_", str(path))  # the file name alone may be that of another module
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as python does for a script
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _make(place: str, make: Any) -> Any:
    """Returns ``make()``, or ``make`` itself if it is a module or not callable."""
    if isinstance(make, nn.Module) or not callable(make):
        return make
    # a constructor that reads values fails on the meta device, and runs again below
    with contextlib.suppress(Exception, SystemExit), torch.device("meta"):
        return make()
    try:
        return make()
    except (Exception, SystemExit) as error:
        hint = ": expected a function without required arguments, or a class of modules" if isinstance(error, TypeError) else ""
        raise ValueError(f"{place} cannot be built: {_in_one_line(error)}{hint}") from error


def _in_one_line(error: BaseException) -> str:
    """Returns the error as one line of text, with the last line of the user's file."""
    if isinstance(error, SystemExit):
        return "it ends the program: put its main part under if __name__ == '__main__'"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 400 else text[:400] + ' ...'}{where}"
