"""Random numbers that belong to the rows of an effective batch, however the rows are split.

A number depends on the seed of the update, the number of the draw in the forward, the row, and the
element of the row::

    seed of a line  =  mix(hash of update and draw + row * F ** n + coordinate * F ** m + ...)
    number j of it  =  word j % 4 of philox4x32-10(key = seed of the line, counter = j // 4)

A line is the last dimension of a tensor. Coordinates of the other dimensions are separate, so a row
that is padded to another length has the same numbers where it has data. Integer operators make the
bits, those of torch's stateless numbers (``torch.func._random`` of torch 2.14, pytorch#177229).

torch's kernels that draw are replaced during an update. They look for the forward that runs, so
modules, functions, composites in C++ (``nn.LSTM``) and worker threads are covered. During a
forward, the seed of the device's generator is a ticket: the forward, and the number of the next
draw. Activation checkpointing saves and sets states of generators, and so takes it to the backward.
A kernel that was not replaced is detected, because it advances the generator.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..runtime import torch_private
from ..runtime.random_numbers import forward_by_row

_LOW = 2**32 - 1
_DRAW_BITS = 24  # These low bits of a ticket are the number of a draw.
_FACTOR = 0x9E3779B97F4A7C15  # An odd number of 64 bits without a pattern.


def signed(number: int) -> int:
    """Returns the low 64 bits of a number as an int64."""
    return (number & (2**64 - 1)) - ((number & 2**63) << 1)


def mix(numbers: Tensor) -> Tensor:
    """Returns a bijective hash of 64 bits, the finalizer of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ ((numbers >> shift) & (2 ** (64 - shift) - 1))) * signed(factor)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def number_lines(shape: Sequence[int], rows: Tensor, dim: int | None) -> tuple[Tensor, int]:
    """Returns a number for each line of a tensor, with a last dimension of 1, and the length of a
    line.

    The dimension ``dim`` has one part or several for each of ``rows``, the first row first. Without
    it, all rows are the same.
    """
    sizes = list(shape) or [1]
    if dim is not None:
        sizes[dim : dim + 1] = [len(rows), shape[dim] // len(rows)]
    numbers = torch.zeros((), dtype=torch.int64, device=rows.device)
    for axis, size in enumerate(sizes[:-1]):
        coordinates = rows if axis == dim else torch.arange(size, device=rows.device)
        numbers = numbers[..., None] + coordinates * signed(_FACTOR ** (axis + 2))
    return numbers[..., None], sizes[-1]


def philox(seeds: Tensor, words: int) -> Tensor:
    """Returns words of 32 bits, ``[..., words]`` in int64, for seeds ``[..., 1]``, as Salmon et al.
    (SC 2011) define them.
    """
    k0 = seeds & _LOW
    k1 = (seeds >> 32) & _LOW
    c0 = torch.arange(-(-words // 4), device=seeds.device).expand(*seeds.shape[:-1], -1)
    c1 = c2 = c3 = torch.zeros((), dtype=torch.int64, device=seeds.device)
    for _ in range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & _LOW) ^ c1 ^ k0
        c1 = p1 & _LOW
        c2 = ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c3 = p0 & _LOW
        k0 = (k0 + 0x9E3779B9) & _LOW
        k1 = (k1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3], -1).flatten(-2)[..., :words]


def uniform(seeds: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers in [0, 1), ``[..., length]`` for seeds ``[..., 1]``, in float32 (24 bits) or
    float64 (53 bits).
    """
    if dtype == torch.float64:
        words = philox(seeds, 2 * length)
        return (((words[..., ::2] << 32) | words[..., 1::2]) & (2**53 - 1)).to(dtype).mul_(2.0**-53)
    return (philox(seeds, length) & 0xFFFFFF).to(dtype).mul_(2.0**-24)


# operator, shape for two rows, and dimension of the rows, None without rows
Draw = tuple[str, tuple[int, ...], int | None]
DrawShapes = dict[int, tuple[int, ...]]  # The keys are the numbers of the draws.
_END: Draw = ("nothing", (), None)  # stands at the end of the model, and of the criterion
# Forward.seeds of an operator; kernels call it with the tensor that they fill
Seeds = functools.partial[tuple[Tensor, int]]


class UpdateRandom:
    """The random numbers of one update, of a seed that is the same in all processes.

    Kernels are replaced until :meth:`end`.
    """

    def __init__(self, seed: int, rows: int = 0) -> None:
        # Rows that have begun, here and in the ranks before.
        self.seed = seed
        self.rows = rows
        self.forwards = list[Forward]()
        self._library = _replace_kernels()

    def number(self, rows: int) -> int:
        """Begins ``rows`` more rows. Returns the number of the first."""
        first = self.rows
        self.rows = self.rows + rows
        return first

    def end(self) -> None:
        """Ends the update, after its last backward."""
        for forward in self.forwards:
            del _forwards[forward.ticket]
        del self._library  # the last reference: kernels are torch's own again


class Forward:
    """One forward of one replica: the model, and then the criterion.

    ``rows`` are their numbers in the effective batch, empty if arguments have no rows. ``expected``
    are the draws, or None. ``shapes`` are those of the first of several forwards, whose draws
    without rows have equal shapes.
    """

    _state_before: Tensor  # The state of the generator before this forward, while it draws.

    def __init__(
        self,
        update: UpdateRandom,
        rows: Sequence[int],
        device: torch.device,
        expected: Sequence[Draw] | None,
        shapes: DrawShapes,
    ) -> None:
        if (generator := _generator(device)) is None:
            raise NotImplementedError(
                f"reproducible=True on {device}, expected CUDA or the CPU, whose generators torch gives"
            )
        self.expected = expected
        self.ticket = next(_tickets)
        self.drawn: list[tuple[str, tuple[int, ...]]] = []  # operator and shape
        self._seed = update.seed
        self.first_row = rows[0] if rows else 0
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._shapes = shapes
        self._generator = generator
        update.forwards.append(self)
        _forwards[self.ticket] = self

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Surrounds the model or the criterion in this thread. The generator's state is put back."""
        # replicas of one device that take turns
        other = _forwards.get(self._generator.initial_seed() >> _DRAW_BITS)
        self._state_before = self._generator.get_state() if other is None else other._state_before
        token = forward_by_row.set(self)
        self._generator.manual_seed((self.ticket << _DRAW_BITS) + len(self.drawn))
        try:
            yield
            self._begin(*_END[:2])
        finally:
            forward_by_row.reset(token)
            self._generator.set_state(self._state_before)

    def seeds(self, operator: str, like: Tensor) -> tuple[Tensor, int]:
        """Begins a draw.

        Returns the seed of each line of a tensor like this one, and the length of a line.
        """
        number, dim = self._begin(operator, tuple(like.shape))
        lines, length = number_lines(like.shape, self._rows.to(like.device), dim)
        return mix(lines + signed(self._seed + (2 * number + (dim is None)) * _FACTOR)), length

    def _begin(self, operator: str, shape: tuple[int, ...]) -> tuple[int, int | None]:
        """Returns the number of a draw, and the dimension of its rows, None if it has none."""
        seed = self._generator.initial_seed()
        generator = self._generator
        ticket, number = divmod(seed, 2**_DRAW_BITS)
        if ticket != self.ticket:
            number = len(self.drawn)  # another replica of the device has had its turn
        elif not torch.equal(
            generator.clone_state().manual_seed(seed).get_state(), generator.get_state()
        ):
            raise RuntimeError(
                "an operator that reproducible=True does not know has drawn, expected operators of torch whose numbers can "
                f"follow the rows; the draws before it were {[name for name, _ in self.drawn[-3:]]}"
            )
        generator.manual_seed((self.ticket << _DRAW_BITS) + number + 1)
        if number == len(self.drawn):  # A part that runs again has its draws already.
            self.drawn.append((operator, shape))
        first = self._shapes.setdefault(number, shape)
        count = len(self._rows)
        if self.expected is None or not count:
            return number, None
        name, small, dim = self.expected[number] if number < len(self.expected) else _END
        if name == operator and (
            shape == first if dim is None else len(shape) == len(small) and shape[dim] % count == 0
        ):
            return number, dim
        raise _difference(number, (name, small, 2), (operator, shape, count))


def find_draws(two: Forward, three: Forward) -> list[Draw]:
    """Returns the draws of a forward, from forwards of two and of three rows: the dimension that
    grows is that of the rows.
    """
    draws: list[Draw] = []
    for number, ((name, small), (other, large)) in enumerate(
        itertools.zip_longest(two.drawn, three.drawn, fillvalue=_END[:2])
    ):
        grown = [
            axis
            for axis, sizes in enumerate(zip(small, large, strict=False))
            if sizes[0] != sizes[1]
        ]
        is_even = all(3 * small[axis] == 2 * large[axis] for axis in grown)
        if name != other or len(small) != len(large) or len(grown) > 1 or not is_even:
            raise _difference(number, (name, small, 2), (other, large, 3))
        draws.append((name, small, grown[0] if grown else None))
    return draws


def _difference(number: int, *draws: tuple[str, tuple[int, ...], int]) -> ValueError:
    texts = [f"{operator} of shape {shape} for {rows} rows" for operator, shape, rows in draws]
    return ValueError(
        f"draw {number} is {' and '.join(texts)}: with reproducible=True, draws must not depend on data or chance"
    )


# torch calls kernels of the process with a tensor and a generator. The seed of the generator has a
# ticket, which finds a forward.
# 40 bits, so that nobody's seed is a ticket by chance
_tickets = itertools.count((0xB1D << 28) + 1)
# Forwards of running updates by their tickets. A backward may run parts again.
_forwards: dict[int, Forward] = {}


def _generator(device: torch.device) -> torch.Generator | None:
    """Returns the default generator of a device, or None where torch does not give it."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return generators[device.index] if generators else None  # CUDA has none before its first use


def _find_forward(device: torch.device) -> Forward | None:
    """Returns the forward that draws on a device: that of this thread, or one of which a backward
    runs a part again.
    """
    forward: Forward | None = forward_by_row.get()
    if forward is not None:
        return forward
    devices = [device]  # the thread of a device's backward may draw on the host too
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    tickets = [
        generator.initial_seed() >> _DRAW_BITS
        for generator in map(_generator, devices)
        if generator is not None
    ]
    return next((_forwards[ticket] for ticket in tickets if ticket in _forwards), None)


def _uniform(
    seeds: Seeds, like: Tensor, dtype: torch.dtype | None = None, per_element: int = 1
) -> Tensor:
    """Returns ``per_element`` numbers in [0, 1) for each element, in a last dimension if there are
    several.
    """
    lines, length = seeds(like)
    numbers = uniform(
        lines,
        length * per_element,
        dtype or (torch.float64 if like.dtype == torch.float64 else torch.float32),
    )
    return numbers.view(*like.shape, per_element) if per_element > 1 else numbers.view(like.shape)


def _bernoulli_(seeds: Seeds, self: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return self.copy_(_uniform(seeds, self, torch.float32) < p)


def _normal_(seeds: Seeds, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    first, second = _uniform(seeds, self, None, 2).unbind(-1)
    return self.copy_(
        (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * torch.pi * second) * std + mean
    )


def _exponential_(seeds: Seeds, self: Tensor, rate: float = 1.0) -> Tensor:
    numbers = _uniform(seeds, self)
    # never infinite
    return self.copy_(-torch.log(numbers + torch.finfo(numbers.dtype).eps / 4) / rate)


def _integers_(seeds: Seeds, self: Tensor, low: int, high: int) -> Tensor:
    return self.copy_((_uniform(seeds, self, torch.float64) * (high - low)).floor() + low)


def _native_dropout(seeds: Seeds, input: Tensor, p: float, train: bool | None) -> object:
    if train is False:
        return NotImplemented
    # the same elements as bernoulli_(1 - p), which the CPU calls
    mask = _uniform(seeds, input, torch.float32) < 1 - p
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _multinomial(seeds: Seeds, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    bounds = self.double().cumsum(-1)
    if replacement:
        numbers = _uniform(seeds, bounds.new_empty(*self.shape[:-1], num_samples))
        return torch.searchsorted(bounds, numbers * bounds[..., -1:], right=True)
    return (
        (_exponential_(seeds, torch.empty_like(bounds)) / self)
        .topk(num_samples, largest=False)
        .indices
    )


def _refuse(seeds: Seeds, *args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError(
        f"{seeds.args[0]} draws in this forward, and with reproducible=True its numbers cannot follow the rows: give it a "
        "generator=, or draw before the step and pass the numbers as an input"
    )


# Kernels by operator. NotImplemented lets torch's kernel run, which does not draw with these
# arguments.
_KERNELS: dict[str, Callable[..., object]] = {
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "bernoulli.out": lambda seeds, self, *, out: _bernoulli_(seeds, out.resize_(self.shape), self),
    "uniform_": lambda seeds, self, low=0.0, high=1.0: self.copy_(
        _uniform(seeds, self) * (high - low) + low
    ),
    "normal_": _normal_,
    "exponential_": _exponential_,
    "random_.from": _integers_,
    "random_.to": lambda seeds, self, high: _integers_(seeds, self, 0, high),
    "native_dropout": _native_dropout,
    "multinomial": _multinomial,
    "scaled_dot_product_attention": torch_private.attention_in_parts,
    # dropout in training
    torch_private.CUDNN_LAYERS: lambda seeds, *args: (
        _refuse(seeds) if args[11] and args[12] else NotImplemented
    ),
    **dict.fromkeys((*torch_private.REFUSED_DRAWS, "random_", "randperm.generator_out"), _refuse),
}


def _replace_kernels() -> torch.library.Library:
    """Replaces torch's kernels that draw, while the result exists. Several updates may run at once."""
    library = torch.library.Library("aten", "IMPL")
    # torch warns of the first kernel that is replaced
    with warnings.catch_warnings(action="ignore"):
        # a forward on another device ends with an error
        for key in ("CPU", "CUDA", "PrivateUse1", "CompositeImplicitAutograd"):
            for name in _KERNELS:
                if torch_private.has_kernel(name, key):
                    library.impl(
                        name, _replacement(name, key), key, with_keyset=True, allow_override=True
                    )
    return library


@functools.cache  # torch's kernel is the one before any is replaced
def _replacement(name: str, key: str) -> Callable[..., object]:
    function = _KERNELS[name]
    kernel = torch.library.get_kernel(
        f"aten::{name}", "CPU" if key.startswith("Composite") else key
    )

    def draw(keys: Any, *args: Any, **kwargs: Any) -> object:
        tensor = args[0] if isinstance(args[0], Tensor) else kwargs["out"]  # randperm has out=.
        has_generator = any(
            isinstance(value, torch.Generator) for value in (*args, *kwargs.values())
        )
        forward = None if has_generator else _find_forward(tensor.device)
        if forward is not None:
            kwargs.pop("generator", None)
            if (
                result := function(functools.partial(forward.seeds, name), *args, **kwargs)
            ) is not NotImplemented:
                return result
        return kernel.call_boxed(keys, *args, **kwargs)

    return draw
