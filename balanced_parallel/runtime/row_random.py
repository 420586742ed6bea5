"""Random numbers that belong to the rows of an effective batch, however the rows are split.

A number depends on the seed of the update, the number of the draw in the forward, the row, and the element of the row::

    seed of a line  =  mix(hash of update and draw + row * F ** n + coordinate * F ** m + ...)
    number j of it  =  word j % 4 of philox4x32-10(key = seed of the line, counter = j // 4)

A line is the last dimension of a tensor. Coordinates of the other dimensions are separate, so a row that is padded to another
length has the same numbers where it has data. torch's stateless numbers (``torch.func._random``, pytorch#177229, from torch 2.14
on), integer operators where it has no kernel, and the Triton kernel of ``dropout_kernel`` make the same bits.

torch's kernels that draw are replaced during an update. A replaced kernel looks for the forward that runs, so modules, functions,
composites in C++ (``nn.LSTM``) and worker threads are covered. A call with ``generator=`` runs torch's kernel.

During a forward, the seed of the device's generator is a ticket: the forward, and the number of the next draw. Activation
checkpointing saves and sets states of generators, and so carries it into the backward.
"""

import contextlib
import contextvars
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .torch_private import DRAWS_OF_ONE_FORM, attention_in_parts, has_kernel, remove_kernels, stateless_numbers

_LOW = 2**32 - 1
_DRAW_BITS = 24  # of a ticket, for the number of a draw
_FACTOR = 0x9E3779B97F4A7C15  # of 64 bits, odd and without a pattern


def signed(number: int) -> int:
    """Returns the low 64 bits of a number as an int64."""
    return (number & (2**64 - 1)) - ((number & 2**63) << 1)


def mix(numbers: Tensor) -> Tensor:
    """Returns a bijective hash of 64 bits, the finalizer of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ ((numbers >> shift) & (2 ** (64 - shift) - 1))) * signed(factor)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def number_lines(shape: Sequence[int], rows: Tensor | None, dim: int, device: torch.device) -> tuple[Tensor, int]:
    """Returns a number for each line of a tensor, with a last dimension of 1, and the length of a line.

    ``rows`` are the numbers of the rows in the effective batch; with None all rows are the same. The size of their dimension
    ``dim`` is a multiple of them: row 0 comes first, with all of its parts.
    """
    sizes = list(shape) or [1]
    if rows is not None:
        sizes[dim : dim + 1] = [len(rows), shape[dim] // len(rows)]
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for axis, size in enumerate(sizes[:-1]):
        coordinates = torch.arange(size, device=device) if rows is None or axis != dim else rows
        numbers = numbers[..., None] + coordinates * signed(_FACTOR ** (axis + 2))
    return numbers[..., None], sizes[-1]


def philox(seeds: Tensor, words: int) -> Tensor:
    """Returns the first ``words`` words of 32 bits of each seed, ``[..., words]`` in int64, for seeds ``[..., 1]``.

    The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    c0 = torch.arange(-(-words // 4), device=seeds.device).expand(*seeds.shape[:-1], -1)
    c1 = c2 = c3 = torch.zeros((), dtype=torch.int64, device=seeds.device)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3], -1).flatten(-2)[..., :words]


def uniform(seeds: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers in [0, 1), ``[..., length]`` for seeds ``[..., 1]``, in float32 (24 bits) or float64 (53 bits)."""
    if (numbers := stateless_numbers(seeds, length, dtype)) is not None:
        return numbers
    if dtype == torch.float64:
        high, low = philox(seeds, 2 * length).unflatten(-1, (length, 2)).unbind(-1)
        bits: Tensor = ((high << 32) | low) & (2**53 - 1)
        return bits.to(dtype).mul_(2.0**-53)
    return (philox(seeds, length) & 0xFFFFFF).to(dtype).mul_(2.0**-24)


class Draw(NamedTuple):
    """A draw of a forward of two rows."""

    operator: str
    shape: tuple[int, ...]
    dim: int | None  # of the rows; None if it has none


class UpdateRandom:
    """The random numbers of one update, of a seed that is the same in all processes. Kernels are replaced until :meth:`end`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.forwards: list[Forward] = []
        _replace_kernels(+1)

    def end(self) -> None:
        """Ends the update, after its last backward. Kernels are torch's own again if no other update runs."""
        for forward in self.forwards:
            del _forwards[forward.ticket]
        _replace_kernels(-1)


class BatchRandom(NamedTuple):
    """The random numbers of one batch of an update."""

    update: UpdateRandom
    first: int  # number in the effective batch of its first row
    draws: Mapping[str, Sequence[Draw]] | None  # of the model and of the criterion; None where they are not known
    shared: dict[Any, tuple[int, ...]] | None = None  # shapes without rows; None if they may differ, as padding by cost does

    @contextlib.contextmanager
    def drawing(self, part: str, rows: Sequence[int] | None, device: torch.device) -> Iterator[None]:
        """Surrounds a forward of ``"model"`` or ``"criterion"`` in this thread. The generator's state is put back.

        ``rows`` are their numbers in the batch; None if the arguments have no rows.
        """
        generator = _generator(device)
        forward = Forward(self, part, rows, device)
        _forwards[forward.ticket] = forward
        self.update.forwards.append(forward)
        other = _forwards.get(generator.initial_seed() >> _DRAW_BITS)  # replicas of one device that take turns
        forward.state_before = generator.get_state() if other is None else other.state_before
        token = running.set(forward)
        generator.manual_seed(forward.ticket << _DRAW_BITS)
        try:
            yield
            forward.check_end(generator)
        finally:
            running.reset(token)
            generator.set_state(forward.state_before)
            forward.lines.clear()


class Forward:
    """One forward of one replica, with the numbers of its rows on its device."""

    def __init__(self, batch: BatchRandom, part: str, rows: Sequence[int] | None, device: torch.device) -> None:
        self.part, self.device, self.count = part, device, 0 if rows is None else len(rows)
        self.expected = None if batch.draws is None else batch.draws.get(part, ())
        self.shapes: list[tuple[str, tuple[int, ...]]] = []  # operator and shape of each draw
        self.lines: dict[Any, tuple[Tensor, int]] = {}  # by shape
        self.ticket, self.next_draw = next(_tickets), 0
        self.state_before: Any = None  # of the generator
        self._rows = torch.tensor(rows or (), dtype=torch.int64, device=device) + batch.first
        self._seed, self._shared = batch.update.seed + len(part), batch.shared

    def seeds(self, operator: str, draw: int, shape: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
        """Returns the seed of each line of a tensor that is drawn, and the length of a line."""
        if draw == len(self.shapes):  # not when it runs again
            self.shapes.append((operator, tuple(shape)))
        dim = self._dim(operator, draw, tuple(shape))
        key = tuple(shape), dim, device
        if (lines := self.lines.get(key)) is None:
            lines = number_lines(shape, None if dim is None else self._rows.to(device), dim or 0, device)
            if running.get() is self:  # when it runs again, nobody would forget them
                self.lines[key] = lines
        return mix(lines[0] + signed(self._seed + (2 * draw + (dim is None)) * _FACTOR)), lines[1]

    def _dim(self, operator: str, draw: int, shape: tuple[int, ...]) -> int | None:
        """Returns the dimension of the rows, or None if a tensor has no rows."""
        if self.expected is None or not self.count:
            return None
        if draw < len(self.expected):
            name, small, dim = self.expected[draw]
            shared = None if dim is not None or self._shared is None else self._shared.setdefault((self.part, draw), shape)
            is_same = operator == name and len(shape) == len(small) and shared in (None, shape)
            if is_same and (dim is None or shape[dim] % self.count == 0):
                return dim
        raise ValueError(
            f"draw {draw} of the {self.part} is {operator} of shape {shape} for {self.count} rows, expected the draws of a "
            f"forward of two rows{_AS_ROWS}"
        )

    def check_end(self, generator: Any) -> None:
        """Checks that the forward has drawn as often as expected, and that nothing else has drawn from the generator."""
        if self.expected is not None and self.count and self.next_draw != len(self.expected):
            raise ValueError(f"the {self.part} has drawn {self.next_draw} times, expected {len(self.expected)} times{_AS_ROWS}")
        fresh, seed = generator.clone_state(), generator.initial_seed()
        fresh.manual_seed(seed)
        if seed >> _DRAW_BITS == self.ticket and not torch.equal(fresh.get_state(), generator.get_state()):
            raise RuntimeError(
                f"an operator that reproducible=True does not know has drawn in the {self.part}, expected operators of torch "
                f"alone; the draws before it were {[name for name, _ in self.shapes[-3:]]}"
            )


_AS_ROWS = ": with reproducible=True, draws must not depend on the data or on chance"


def find_draws(forwards: Sequence[Forward]) -> list[Draw]:
    """Returns the draws of a forward, from forwards of two and of three rows: the dimension that grows is that of the rows."""
    two, three = (forward.shapes for forward in forwards)
    draws: list[Draw] = []
    for number, ((name, small), (other, large)) in enumerate(itertools.zip_longest(two, three, fillvalue=("nothing", ()))):
        grown = [axis for axis, (size, other_size) in enumerate(zip(small, large, strict=False)) if size != other_size]
        is_even = all(3 * small[axis] == 2 * large[axis] for axis in grown)
        if name != other or len(small) != len(large) or len(grown) > 1 or not is_even:
            raise ValueError(
                f"draw {number} of the {forwards[0].part} is {name} of shape {small} for 2 rows, and {other} of shape {large} "
                f"for 3, expected one dimension of rows{_AS_ROWS}"
            )
        draws.append(Draw(name, small, grown[0] if grown else None))
    return draws


running: contextvars.ContextVar[Forward | None] = contextvars.ContextVar("running", default=None)  # in this thread
_tickets = itertools.count((0xB1D << 28) + 1)  # 40 bits, so that nobody's seed is a ticket by chance
_forwards: dict[int, Forward] = {}  # by ticket, of the updates that run: a backward may run parts of them again


def _generator(device: torch.device) -> Any:
    """Returns the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    if generators is None:
        raise NotImplementedError(f"reproducible=True on {device}, expected CUDA or the CPU: torch does not give its generators")
    return generators[device.index]


class _Begun(NamedTuple):
    """A draw that has begun."""

    forward: Forward
    number: int
    operator: str

    def uniform(self, like: Tensor, dtype: torch.dtype | None = None, per_element: int = 1) -> Tensor:
        """Returns ``per_element`` numbers in [0, 1) for each element, in a last dimension if there are several."""
        seeds, length = self.forward.seeds(self.operator, self.number, like.shape, like.device)
        dtype = dtype or (torch.float64 if like.dtype == torch.float64 else torch.float32)
        numbers = uniform(seeds, length * per_element, dtype)
        return numbers.view(*like.shape, per_element) if per_element > 1 else numbers.view(like.shape)


def _find_forward(device: torch.device) -> tuple[Forward | None, int]:
    """Returns the forward that draws on a device, or runs again, and the number of its next draw; None if there is none."""
    forward = running.get()
    devices = [device if forward is None else forward.device]
    if forward is None and (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        # the thread of a device's backward may draw on the host
        devices.append(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    for each in devices:
        seed: int = _generator(each).initial_seed()
        ticketed = _forwards.get(seed >> _DRAW_BITS)
        if ticketed is not None and forward in (None, ticketed):
            return ticketed, seed % 2**_DRAW_BITS
    return forward, 0 if forward is None else forward.next_draw  # another replica of the device has had its turn


def _bernoulli_(begun: _Begun, self: Tensor, p: Any = 0.5) -> Tensor:
    return self.copy_(begun.uniform(self, torch.float32) < p)


def _normal_(begun: _Begun, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    first, second = begun.uniform(self, None, 2).unbind(-1)
    return self.copy_((-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second) * std + mean)


def _exponential_(begun: _Begun, self: Tensor, rate: float = 1.0) -> Tensor:
    numbers = begun.uniform(self)
    return self.copy_(-torch.log(numbers + torch.finfo(numbers.dtype).eps / 4) / rate)  # never infinite


def _integers_(begun: _Begun, self: Tensor, low: int, high: int | None) -> Tensor:
    high = 2**53 if high is None else high
    return self.copy_((begun.uniform(self, torch.float64) * (high - low)).floor() + low)


def _random_(begun: _Begun, self: Tensor) -> Tensor:
    return _integers_(begun, self, 0, 2**24 if self.is_floating_point() else min(torch.iinfo(self.dtype).max, 2**53))


def _native_dropout(begun: _Begun, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if input.is_cuda:
        with contextlib.suppress(ImportError):  # no Triton
            from .dropout_kernel import dropout

            return dropout(input, p, *begun.forward.seeds(begun.operator, begun.number, input.shape, input.device))
    mask = begun.uniform(input, torch.float32) < 1 - p  # the same elements as bernoulli_(1 - p), which the CPU calls
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _multinomial(begun: _Begun, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    bounds = self.double().cumsum(-1)
    if replacement:
        numbers = begun.uniform(bounds.new_empty(*self.shape[:-1], num_samples), torch.float64)
        return torch.searchsorted(bounds, numbers * bounds[..., -1:], right=True)
    return (_exponential_(begun, torch.empty_like(bounds)) / self).topk(num_samples, largest=False).indices


def _rrelu(begun: _Begun, self: Tensor, noise: Tensor, low: float, high: float, training: bool, _: None = None) -> Tensor:
    slopes = begun.uniform(self) * (high - low) + low if training else (low + high) / 2
    return self * noise.copy_(torch.where(self <= 0, slopes, 1.0))


def _refuse(begun: _Begun, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{begun.operator} draws in this forward, and with reproducible=True its numbers cannot follow the rows: give it a "
        "generator=, or draw before the step and pass the numbers as an input"
    )


_KERNELS: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "bernoulli.out": lambda begun, self, *, out: _bernoulli_(begun, out.resize_(self.shape), self),
    "uniform_": lambda begun, self, low=0.0, high=1.0: self.copy_(begun.uniform(self) * (high - low) + low),
    "normal_": _normal_,
    "exponential_": _exponential_,
    "random_": _random_,
    "random_.from": _integers_,
    "random_.to": lambda begun, self, high: _integers_(begun, self, 0, high),
    "native_dropout": _native_dropout,
    "multinomial": _multinomial,
    "randperm.generator_out": lambda begun, n, *, out: out.copy_(begun.uniform(out.resize_(n), torch.float64).argsort()),
    "rrelu_with_noise": _rrelu,
    **dict.fromkeys((*DRAWS_OF_ONE_FORM, "geometric_", "cauchy_", "log_normal_"), _refuse),
}
_lock = threading.Lock()
_library: torch.library.Library | None = None
_updates = 0  # that run


def _replace_kernels(change: int) -> None:
    """Replaces torch's kernels that draw while any update runs. ``change`` is that of the number of updates."""
    global _library, _updates
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _updates += change
        if _library is not None and not _updates:
            remove_kernels(_library)
            _library = None
        elif _library is None:
            _library = torch.library.Library("aten", "IMPL")
            for key in ("CPU", "CUDA", "PrivateUse1"):  # a forward on another device ends with an error
                for name, function in _KERNELS.items():
                    if has_kernel(name, key):
                        _library.impl(name, _replacement(name, key, function), key, with_keyset=True)
                if key != "PrivateUse1" and has_kernel("bernoulli_.float", key):
                    attention = "scaled_dot_product_attention"
                    _library.impl(attention, _attention(f"Autograd{key}"), f"Autograd{key}", with_keyset=True)


def _replacement(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", key)

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else kwargs["out"]
        has_generator = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        forward, number = (None, 0) if has_generator else _find_forward(first.device)
        if forward is None:
            return kernel.call_boxed(keys, *args, **kwargs)
        forward.next_draw = max(forward.next_draw, number + 1)  # a part that runs again draws earlier numbers
        _generator(forward.device).manual_seed((forward.ticket << _DRAW_BITS) + number + 1)
        kwargs.pop("generator", None)
        return function(_Begun(forward, number, name), *args, **kwargs)

    return draw


def _attention(key: str) -> Callable[..., Any]:
    """Returns attention that computes dropout in operators of its own: fused kernels draw inside."""
    kernel = torch.library.get_kernel("aten::scaled_dot_product_attention", key)

    def attend(
        keys: Any, query: Tensor, k: Tensor, value: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **kwargs: Any
    ) -> Any:
        if p > 0 and _find_forward(query.device)[0] is not None:
            return attention_in_parts(query, k, value, mask, p, causal, None, **kwargs)
        return kernel.call_boxed(keys, query, k, value, mask, p, causal, **kwargs)

    return attend
