"""Values of arguments: memory sizes as text, checks with errors that name the argument, and the
precision of a training step.
"""

import contextlib
import functools
import inspect
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import torch

from .devices import NO_BLOCK

P = ParamSpec("P")
T = TypeVar("T")
UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(size: int | str) -> int:
    """Returns the number of bytes in ``size``, a positive integer, or text such as ``"24GiB"`` or
    ``"1.5 GB"``, with a unit.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    number, unit = match.groups() if match else ("0", "B")
    if float(number) and not unit:
        raise ValueError(f"{size!r} is not a memory size, it has no unit: {number}GiB?")
    factors = {name.lower(): factor for name, factor in UNITS.items()}
    count = round(float(number) * factors.get(unit.lower(), 0))
    if count == 0:
        raise ValueError(
            f"{size!r} is not a memory size, expected a positive number of bytes, or text with a unit, as '512MiB' or '80GB'"
        )
    return count


def format_bytes(count: int) -> str:
    """Formats ``count`` in the largest unit of which it is at least one: ``"1.50 GiB"``, ``"512
    B"``.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"


# The text to write in place of an argument that is gone.
_REMOVED = {
    "in_dims": "dim=1 for rows in dimension 1, and marks at the call for other arguments: Along(x, 1), Whole(x), Rows(x)",
    "weight": "DataParallelCriterion(criterion, weight=...)",
    "dim": "DataParallelModel(module, dim=...)",
    "trim": "collate=, which pads a list of samples: DataLoader(..., collate_fn=list)",
}


def naming_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function whose error for arguments that it does not take names those that it takes."""
    parameters = inspect.signature(function).parameters.values()
    shown = [
        each.replace(default=each.empty, annotation=each.empty)
        for each in parameters
        if each.name != "self"
    ]
    name = re.sub(r"\.__(init|call)__$", "", function.__qualname__)
    form = f"{name}{inspect.Signature(shown)}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                raise
            # The call itself raised it.
            removed = [instead for name, instead in _REMOVED.items() if name in kwargs]
            # Python 3.13 adds a guess.
            text = str(error).partition(". Did you mean")[0]
            raise TypeError(f"{text}, expected {' and '.join(removed) or form}") from None

    return call


class SaysInstead:
    """An object that names what replaces the calls of another library that it does not have."""

    instead: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises ``AttributeError``, which says what replaces a call."""
            if name in self.instead:
                raise AttributeError(
                    f"a {type(self).__name__} has no {name}(): {self.instead[name]}"
                )
            return object.__getattribute__(self, name)


def check_type(name: str, value: object, kinds: Any, expected: str) -> None:
    """Raises ``TypeError`` if the value of the argument ``name`` is not of ``kinds``, which
    ``expected`` describes.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name}={' '.join(reprlib.repr(value).split())}, expected {expected}")


def check_number(
    name: str, value: Any, expected: str, *, at_least: float = -math.inf, whole: bool = False
) -> None:
    """Checks that the value of the argument ``name`` is a finite number, as ``expected`` describes.

    ``True`` is not one here.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}={value}, expected {expected}")
    check_type(name, value, numbers.Integral if whole else numbers.Real, expected)
    if not at_least <= value < math.inf:
        raise ValueError(f"{name}={value!r}, expected {expected}")


def check_positive(**arguments: object) -> None:
    """Checks that each argument is a whole number of at least 1."""
    for name, value in arguments.items():
        check_number(name, value, "a positive number", at_least=1, whole=True)


def check_cost(name: str, cost: object) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``cost`` is a positive number or None."""
    if cost is not None:  # ulp(0) is the smallest positive number
        check_number(
            name,
            cost,
            "a positive number, the cost of a device in one forward",
            at_least=math.ulp(0.0),
        )


_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


PrecisionName = Literal["fp32", "bf16", "fp16"]


class Precision:
    """Mixed precision of a training step.

    ``"bf16"`` and ``"fp16"`` run forward and criterion under ``torch.autocast`` with that dtype, in
    every replica. ``"fp32"`` casts nothing itself. An autocast block around the call still applies,
    and reaches every replica.

    Args:
        name: ``"fp32"``, ``"bf16"``, ``"fp16"``, or another ``Precision``.
        scaler: gradient scaler for ``"fp16"``. ``None`` creates one on first use. The gradients of
            all replicas and ranks are summed before the scaler checks them, so all replicas and
            ranks skip the same updates.

    Raises:
        ValueError: if ``name`` is unknown, or if a scaler is given with another precision than
            ``"fp16"``.

    Example:
        >>> net = torch.nn.Linear(4, 2)
        >>> with Precision("bf16").autocast([torch.device("cpu")]):
        ...     net(torch.zeros(8, 4)).dtype
        torch.bfloat16
        >>> Precision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
        Precision('fp16')
    """

    @naming_arguments
    def __init__(
        self, name: "PrecisionName | Precision" = "fp32", scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if isinstance(name, Precision):
            scaler = scaler or name.scaler
            name = name.name
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(f"precision={name!r}, expected one of {', '.join(map(repr, _DTYPES))}")
        if scaler is not None and name != "fp16":
            raise ValueError(
                f"precision {name!r} was given a gradient scaler, expected none: only 'fp16' needs one"
            )
        self.name: PrecisionName = name
        self.scaler = scaler
        self.dtype = _DTYPES[name]  # The dtype of autocast; None without autocast.

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def autocast(self, devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that enables autocast for the types of ``devices``.

        Workers of replicas inherit it.
        """
        return NO_BLOCK if self.dtype is None else _autocast(self.dtype, devices)

    def scaler_on(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Returns the gradient scaler of ``"fp16"``, created for ``device`` on first use; otherwise
        None.
        """
        if self.name == "fp16":
            self.scaler = self.scaler or torch.amp.GradScaler(device.type)
            # This makes its tensors. A failure in the middle of an update would break each update.
            self.scaler.scale(torch.zeros((), device=device))
        return self.scaler


def scaled(loss: torch.Tensor, scaler: torch.amp.GradScaler | None) -> torch.Tensor:
    """Returns the loss times the scale, if there is a scaler."""
    return loss if scaler is None else scaler.scale(loss)


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Gives a parameter another gradient."""
    set_gradients([(parameter, gradient)])


def set_gradients(gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Gives each parameter the gradient beside it."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


def set_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a tensor the memory of another one, of any shape and device."""
    tensor.data = values


def forget_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Sets the gradients of parameters to None."""
    for parameter in parameters:
        parameter.grad = None  # The path of an update: without another call for each.


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, devices: Iterable[torch.device]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            stack.enter_context(torch.autocast(kind, dtype))
        yield


class _Setting:
    """A descriptor of an attribute that is read from the instance, without a call."""

    def __init__(self, check: Callable[[str, Any], None] | None) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: object, value: object) -> None:
        if self._check is not None:
            self._check(self._name, value)
        elif self._name in vars(instance):
            raise AttributeError(
                f"{self._name} was assigned to a {type(instance).__name__}, expected a new one: "
                f"{type(instance).__name__}(..., {self._name}=...)"
            )
        vars(instance)[self._name] = value


def setting(check: Callable[[str, Any], None] | None = None) -> Any:
    """Returns a class attribute for a setting.

    With ``check``, a function of its name and a value, each assignment is checked. Otherwise only
    the first one, that of the constructor, is allowed.
    """
    return _Setting(check)
