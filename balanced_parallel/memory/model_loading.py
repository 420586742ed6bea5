"""Makes a module and a batch without memory from a command line: a place in a file, and shapes such as ``3x224x224``."""

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public module of fake tensors

from ..batch.microbatches import as_arguments
from ..batch.nested import leaves, spread
from ..batch.row_marks import Arguments
from ..loss.rules import loss_weight
from ..loss.targets import targets_of
from .batch_shapes import build_batch
from .errors import UnknownMemory
from .trace.allocations import Count
from .trace.coupled_update import plain_criterion
from .trace.fake_tensors import fake_batch, fake_copy

__all__: list[str] = []

# Files of torch, of this package and of Python: their lines do not show the mistake of a user
_NOT_THE_USERS = (*(str(Path(place).parent) for place in (torch.__file__, Path(__file__).parent, traceback.__file__)), "<")


@dataclass(frozen=True)
class Problem:
    """Arguments of :func:`estimate` and :func:`plan`. ``assumed`` names, as text, those that the command line did not give."""

    module: nn.Module
    criterion: Callable[..., Any]
    inputs: Any
    targets: Any
    assumed: tuple[str, ...]


class SequenceLoss(nn.Module):
    """``loss`` at each position of a sequence: logits (rows, length, classes) and targets (rows, length)."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, targets: Tensor) -> Tensor:
        """Returns the loss over all positions."""
        return self.loss(*self.flat(output, targets))

    def flat(self, output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (rows x length, classes) and targets (rows x length)."""
        return _logits(output).flatten(0, -2), targets.flatten()


@loss_weight.register(SequenceLoss)
def _weigh_sequences(criterion: SequenceLoss, output: Any, targets: Tensor) -> Tensor:
    return loss_weight(criterion.loss, *criterion.flat(output, targets))


def build_problem(
    model: str, inputs: Sequence[str], targets: Sequence[str], criterion: str | None, rows: int, dim: int = 0
) -> Problem:
    """Makes the model, the criterion, and a batch of ``rows`` rows on the meta device.

    Args:
        model: as for :func:`build_model`.
        inputs, targets: the shape of one row of each, as for :func:`build_batch`. Without targets, they follow from the
            criterion and the output.
        criterion: as for :func:`build_criterion`. ``None`` is the model's own, else ``nn.CrossEntropyLoss()``.
        dim: the dimension of the rows.

    Raises:
        ValueError: a name is not found, or the object cannot be built; the model refuses the inputs; the targets of the
            criterion are not known.
    """
    batch = build_batch(inputs, rows, dim, torch.float32)
    arguments = as_arguments(batch)
    module, own = build_model(model)
    given = build_criterion(criterion) if criterion is not None else own or nn.CrossEntropyLoss()
    loss = plain = plain_criterion(given)
    named = "" if criterion or own else "criterion: CrossEntropyLoss"
    index = torch.int64 if targets_of(loss) == "classes" else torch.float32
    following = spread(build_batch(targets, rows, dim, index)) if targets else ()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    output = _run(module, arguments, rows, mode, f"{_name(module)} from {model}")
    if targets_of(loss) == "classes" and _has_classes_last(output, arguments, following, dim):
        loss, named = SequenceLoss(loss), f"criterion: {_name(loss)} over the flattened logits {_shape(_logits(output))}"
    assumed = [named] if named else []
    if not following:
        following = (_suit(loss, output, rows, dim),)
        what = "like the output" if following[0].is_floating_point() else f"class indices for the output {_shape(output)}"
        assumed.append(f"targets: {_shape(following[0])} {_dtype(following[0])}, {what}")
    _run(loss, Arguments((*spread(output), *following), {}), rows, mode, _name(loss))
    loss = given if loss is plain else loss
    return Problem(module, loss, batch, following if len(following) > 1 else following[0], tuple(assumed))


def build_model(place: str) -> tuple[nn.Module, Callable[..., Any] | None]:
    """Makes the module at ``place``, and its criterion if it has one. On the meta device if possible.

    Args:
        place: ``my_file.py:build`` or ``package.module:build``: a function without required arguments that returns a module or
            (module, criterion), a class of modules, or a module.

    Raises:
        ValueError: the place does not exist, or the function fails.
    """
    made = _make(place, _find(place))
    module, criterion = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (criterion is None or callable(criterion)):
        raise ValueError(f"{place} gave {_name(made)}, expected a torch.nn.Module, or a pair (module, criterion)")
    return module, criterion


def build_criterion(name: str) -> Callable[..., Any]:
    """Makes a criterion from the name of a class of ``torch.nn``, in any case, or from a place as for :func:`build_model`.

    Raises:
        ValueError: there is no loss of that name, or it needs arguments.
    """
    found = _find(name) if ":" in name else _find_class(name, torch.nn, nn.Module, "Loss", "or my_file.py:name")
    criterion = _make(name, found) if isinstance(found, type) else found
    if not callable(criterion):
        raise ValueError(f"{name} is {_name(criterion)}, expected a module or a function of output and targets")
    return criterion  # type: ignore[no-any-return]


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Returns a class of ``torch.optim`` by its name, in any case.

    Raises:
        ValueError: there is no optimizer of that name.
    """
    found: type[torch.optim.Optimizer] = _find_class(name, torch.optim, torch.optim.Optimizer, "")
    return found


def _find(place: str) -> Any:
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"{place!r} is not a place, expected my_file.py:name or package.module:name")
    arguments, sys.argv = sys.argv, [where]  # a script may read its flags at import
    try:
        found: Any = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise ValueError(f"{where} cannot be imported: {_in_one_line(error)}") from error
    finally:
        sys.argv = arguments
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
            raise ValueError(f"{where} has no {name!r}; it defines: {', '.join(own[:20]) or 'nothing'}")
        found = getattr(found, part)
    return found


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


def _find_class(name: str, package: ModuleType, base: type, ending: str, *others: str) -> Any:
    classes = [
        value for value in vars(package).values() if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    names = {kind.__name__.lower(): kind for kind in classes if kind.__name__.endswith(ending)}
    if name.lower() not in names:
        expected = ", ".join([*(kind.__name__ for kind in names.values()), *others])
        raise ValueError(f"{package.__name__} has no {name!r}, expected one of {expected}")
    return names[name.lower()]


def _make(place: str, make: Any) -> Any:
    """Returns ``make()``, or ``make`` itself if it is a module or not callable."""
    if isinstance(make, nn.Module) or not callable(make):
        return make
    with (
        contextlib.suppress(Exception, SystemExit),
        torch.device("meta"),
    ):  # a constructor that reads values fails there, and runs again below
        return make()
    try:
        return make()
    except (Exception, SystemExit) as error:
        hint = ": expected a function without required arguments, or a class of modules" if isinstance(error, TypeError) else ""
        raise ValueError(f"{place} cannot be built: {_in_one_line(error)}{hint}") from error


def _run(call: Callable[..., Any], arguments: Arguments, rows: int, mode: FakeTensorMode, what: str) -> Any:
    """Returns the result of a copy of ``call`` on fake tensors."""
    home = torch.device("cpu")
    copied, batch = fake_copy(call, mode, home), fake_batch(arguments, rows, rows, mode, home)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), mode, Count({}):
            return copied(*batch.inputs, **batch.kwargs)
    except UnknownMemory:
        raise
    except Exception as error:  # a module or a criterion may raise anything
        named = [f"{name} {_listed(value)}" for name, value in arguments.kwargs.items()]
        shapes = ", ".join([*map(_listed, arguments.inputs), *named])
        raise ValueError(f"{what} refuses {shapes}: {_in_one_line(error)}") from error


def _logits(output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _has_classes_last(output: Any, inputs: Any, targets: Any, dim: int) -> bool:
    """Returns True if the classes are in the last dimension. The losses of torch expect them in dimension 1."""
    logits = _logits(output)
    if not isinstance(logits, Tensor) or logits.dim() < 3:
        return logits is not output and isinstance(logits, Tensor)
    if logits is not output or dim == 1:  # dimension 1 has the rows
        return True
    given, wanted = ([leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)] for batch in (inputs, targets))
    is_index = [one.shape == logits.shape[:-1] and not one.is_floating_point() for one in (*given, *wanted)]
    first = logits.shape[:1] + logits.shape[2:]
    return any(is_index[: len(given)]) or (any(is_index) and wanted[0].shape != first)


def _suit(criterion: Any, output: Any, rows: int, dim: int) -> Tensor:
    """Returns targets that the criterion takes with this output, on the meta device."""
    logits, kind = _logits(output), targets_of(getattr(criterion, "loss", criterion))
    if not isinstance(logits, Tensor):
        raise ValueError(f"the model's output is {_name(output)}: give --target, and a --criterion of it and the targets")
    if logits.dim() <= dim or logits.size(dim) != rows:
        raise ValueError(f"the model's output {_shape(logits)} does not have {rows} rows along dimension {dim}: give --target")
    if kind == "like the output":
        return torch.empty(logits.shape, dtype=logits.dtype, device="meta")
    if kind != "classes":
        raise ValueError(f"the targets of {_name(criterion)} are not known: give the shape of one row as --target")
    if logits.dim() < 2:
        raise ValueError(f"the model's output {_shape(logits)} has no classes: give a --criterion, such as BCEWithLogitsLoss")
    shape = logits.shape[:-1] if isinstance(criterion, SequenceLoss) else logits.shape[:1] + logits.shape[2:]
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _shape(value: Any) -> str:
    return str(tuple(getattr(_logits(value), "shape", ())))


def _listed(value: Any) -> str:
    """Returns the shapes and dtypes in one argument, as text."""
    inner = list(leaves(value)) if isinstance(value, (dict, tuple)) and not hasattr(value, "logits") else [("", value)]
    return ", ".join(" ".join(part for part in (place, _shape(one), _dtype(one)) if part) for place, one in inner)


def _dtype(value: Any) -> str:
    return str(getattr(_logits(value), "dtype", _name(value))).removeprefix("torch.")


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", None) or type(value).__name__)


def _in_one_line(error: BaseException) -> str:
    """Returns the error as one line of text, with the last line of the user's file."""
    if isinstance(error, SystemExit):
        return "it ends the program: put its main part under if __name__ == '__main__'"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 400 else text[:400] + ' ...'}{where}"
