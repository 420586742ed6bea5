"""Copies of a criterion on the devices of the outputs, and what calls of them have shown."""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica
from ..batch.plan import consecutive, proportional_sizes, split_sizes
from ..batch.rows import NOTHING, Shard, cut, move_arguments, move_leaves, spread
from ..replicas.all_rows import ALL, UNEXPECTED, forward_of
from ..replicas.replicas import Replicas
from ..runtime.collectives import OnCollective, gather_objects, world_size
from ..runtime.devices import NO_BLOCK, pin
from ..runtime.module_state import StateEntries
from ..runtime.torch_private import is_differentiable, is_profiled, profiled
from ..runtime.values import Precision
from .checks import Checks
from .rules import instead_of
from .sums import zero_of

Criterion = nn.Module | Callable[..., Tensor]
T = TypeVar("T")
_COLLECTIVES = "the criterion communicates with the other ranks itself"
_WITHOUT = (
    "write it without collectives, as for one process with all rows, and give weight=, AdditiveLoss or whole=True; in place of "
    "all_reduce of a statistic, such as a centre, use a SumOverRows"
)


@dataclass(eq=False)
class OwnCollectives:
    """Collectives of a criterion's own, as in programs that come from ``DistributedDataParallel``.

    The first call tells whether there are some. The loss is what that class makes of it then: the
    mean of the values of all ranks. Each rank has to call the criterion once, so ranks tell how
    often they will.
    """

    is_possible: bool = False
    is_mean: bool = False
    sums_rows: bool = False  # It has a SumOverRows, also for no rows. Nothing else is looked for.

    def __post_init__(self) -> None:
        # Each rank calls the criterion once in common ones.
        self.is_used = self._is_common = False
        # It is open until the first call has come to its end.
        self.asks = self.is_open = self.is_possible and not self.sums_rows

    def agree(self, calls: int) -> None:
        """Learns how often each rank calls the criterion in an update. All ranks call this."""
        if self.asks and world_size() > 1:
            counts = {*gather_objects(calls)}
            self._is_common = self.is_mean and counts == {1}
            self.asks = self.is_used or 0 in counts
            if self.is_used and not self._is_common:
                self.refuse()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Surrounds a call of the criterion.

        The first one finds collectives, or refuses them before they wait for a rank.
        """
        names = set[str]()
        act = names.add if self._is_common else self.refuse
        with contextlib.ExitStack() as stack:
            if world_size() > 1:
                stack.enter_context(forward_of(UNEXPECTED))
                stack.enter_context(OnCollective(act))
            yield
        self.is_open = False
        if names:
            self.is_used = self.asks = True
            warnings.warn(
                f"{_COLLECTIVES}, so its values are averaged over them, and weight= is not used: better {_WITHOUT}",
                stacklevel=2,
            )

    def refuse(self, name: str = "") -> NoReturn:
        """Raises ``ValueError`` in place of a collective."""
        raise ValueError(
            f"{_COLLECTIVES}, expected rows and one micro-batch on each rank, and a mean, if it does: {_WITHOUT}"
        )


class ShardLoss(NamedTuple):
    """Arguments of one replica: its copy of the criterion, its number of rows, its output, and its
    rows of the targets.
    """

    criterion: Criterion
    rows: int
    output: Any
    targets: tuple[Any, ...]
    kwargs: dict[str, object]
    collectives: OwnCollectives = OwnCollectives()  # The call may have some.
    notes: Any = None  # The notes of a forward that computes the loss.
    has_columns: bool = True  # Reductions along the first dimension are those of all rows.

    def call(self, criterion: Criterion | None = None) -> Any:
        """Calls the criterion, or another in its place, and returns the loss. See :func:`loss_of`."""
        with self.collectives.watch() if self.collectives.is_open else NO_BLOCK:
            result = call_spread(
                criterion or self.criterion, self.output, self.targets, self.kwargs
            )
        loss = result if isinstance(result, Tensor) else loss_of(result)
        if loss is None:
            raise TypeError(
                "the criterion returned None, expected a loss: a scalar tensor, or a structure of them"
            )
        return loss

    def nothing(self) -> Tensor:
        """Returns a zero that is connected to all arguments and to the criterion's parameters.

        Without rows, a criterion that sums over all rows is called, since others wait for it.
        """
        is_awaited = self.collectives.sums_rows and not self.rows
        results = [self.output, self.targets, self.kwargs, self.call() if is_awaited else None]
        tensors = [
            *filter(is_differentiable, containers.tensors_in(results)),
            *parameters_in(self.criterion),
        ]
        return zero_of(*tensors) if tensors else torch.zeros(())


def parameters_in(criterion: object) -> list[nn.Parameter]:
    """Returns the parameters of a criterion."""
    return [*criterion.parameters()] if isinstance(criterion, nn.Module) else []


def call_spread(
    function: Callable[..., object],
    output: object,
    targets: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """Calls a function of output and targets.

    The entries of a tuple fill its leading arguments, which an error tells.
    """
    leading = spread(output)
    try:
        return function(*leading, *targets, **kwargs)
    except TypeError as error:
        if len(leading) == 1 or "positional argument" not in str(error):
            raise
        raise TypeError(
            f"{error}: the output is a tuple, whose {len(leading)} entries fill the first {len(leading)} arguments; name each of "
            "them, or take *arguments, or return a list from the model, which is one argument"
        ) from error


def loss_of(result: object) -> Any:
    """Returns the attribute ``loss`` of a record with other things than numbers, such as that of
    ``AdaptiveLogSoftmaxWithLoss``, or the result itself.
    """
    container = containers.open_container(result)
    if container is None or not hasattr(result, "loss"):
        return getattr(result, "loss", result)
    shapes = [getattr(leaf, "shape", ()) for _, leaf in containers.leaves(result)]
    if any(shapes):
        return result.loss
    return Entries(zip(containers.entry_names(container), container.children, strict=True))


class Entries(dict[str, object]):
    """The numbers of a named tuple or a dataclass, by name.

    Other ranks may not have its class.
    """

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass(frozen=True, eq=False)
class CriterionCopies:
    """A criterion and its copies, one on the device of each output.

    ``halves`` and ``collectives`` note what the calls have shown. A second user of the criterion
    has notes of its own (:meth:`without_notes`). Traces, and criteria that
    sum over all rows, do not compare halves.
    """

    criterion: Criterion
    devices: Sequence[torch.device] | None  # Outputs may be on these; ``None`` allows all.
    # A loss is moved there; ``None`` is the device of the first output.
    output_device: torch.device | None
    dim: int  # Unmarked targets have their rows in this dimension.
    precision: Precision
    replicas: Replicas
    collectives: OwnCollectives
    halves: Checks | None

    def without_notes(self) -> "CriterionCopies":
        """Returns the same copies for another user."""
        collectives = dataclasses.replace(self.collectives)
        return dataclasses.replace(self, collectives=collectives, halves=self.halves and Checks())

    @property
    def checks(self) -> Checks | None:
        """The times when a loss is compared with that of halves, or None for one that is averaged
        over the ranks.
        """
        return None if self.collectives.is_used else self.halves

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the criterion."""
        return parameters_in(self.criterion)

    @property
    def entries(self) -> list[StateEntries]:
        """The state of the criterion as it is now, without the values of its tensors."""
        criterion = self.criterion
        modules = criterion.modules() if isinstance(criterion, nn.Module) else ()
        return [*map(StateEntries, modules)]

    def run_once(self, function: Callable[[Criterion], T], device: torch.device) -> T:
        """Returns the result of ``function`` for the copy on one device."""
        autocast = self.precision.autocast([device])
        with autocast, self.on([device]) as (criterion,), forward_of(ALL):
            return self.replicas.run(
                [functools.partial(function, criterion)], [device], together=False
            )[0]

    def on(
        self, devices: Sequence[torch.device]
    ) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
        """Yields a copy for each device.

        A module on another device is moved to that of the first output. It stays where it is if
        that device has a copy: an optimizer may have state of its parameters.
        """
        criterion = self.criterion
        if isinstance(criterion, nn.Module):
            home = devices[0]
            if home in self.replicas.copies.by_device:
                home = next(criterion.parameters()).device
            for tensor in (*criterion.parameters(), *criterion.buffers()):
                if tensor.device != home:
                    criterion.to(home)
            return self.replicas.of(criterion, devices, home)
        copies = [criterion] * len(devices)
        if isinstance(criterion, functools.partial):
            bound = criterion.args, criterion.keywords
            if any(device.type != "cpu" for device in devices):
                bound = containers.map_tensors(pin, bound)
            moved = [move_leaves(bound, device) for device in devices]
            copies = [
                functools.partial(criterion.func, *arguments, **settings)
                for arguments, settings in moved
            ]
        return contextlib.nullcontext(copies)


class Calls(NamedTuple):
    """The calls of a criterion in one forward: a copy, an output and a shard of the targets for
    each replica.
    """

    copies: CriterionCopies
    outputs: PerReplica
    shards: Sequence[Shard]

    @property
    def may_have_columns(self) -> bool:
        """False if reductions along the first dimension are none of all rows."""
        checks = self.copies.halves
        is_refuted = checks is not None and checks.has_columns is False
        return self.outputs.dim == self.copies.dim == 0 and not is_refuted

    def agree(self) -> None:
        """Tells the other ranks whether this one has rows in its only forward. All ranks call this."""
        self.copies.collectives.agree(int(any(shard.target_rows for shard in self.shards)))

    def run(self, function: Callable[..., T], *columns: Sequence[object]) -> list[T]:
        """Returns the result of ``function(shard, *others)`` for each replica, on the device of its
        output.

        Each of ``columns`` has another argument for each replica.
        """
        copies = self.copies
        devices = devices_of(self.outputs, self.copies.devices)
        notes = self.outputs.notes or [None] * len(devices)
        with copies.precision.autocast(devices), copies.on(devices) as criteria:
            columns = notes, *columns
            replicas = zip(devices, criteria, self.outputs, self.shards, *columns, strict=True)
            work = [functools.partial(_call, function, self, *replica) for replica in replicas]
            return copies.replicas.run(work, devices, together=copies.collectives.sums_rows)


def _call(
    function: Callable[..., T],
    calls: Calls,
    device: torch.device,
    criterion: Criterion,
    output: object,
    shard: Shard,
    notes: object,
    *others: object,
) -> T:
    targets, kwargs = move_arguments(shard.targets, device)
    with shard.context(), profiled("criterion") if is_profiled() else NO_BLOCK:
        try:
            return function(
                ShardLoss(
                    criterion,
                    shard.target_rows,
                    output,
                    targets,
                    kwargs,
                    calls.copies.collectives,
                    notes,
                    calls.may_have_columns,
                ),
                *others,
            )
        except (RuntimeError, IndexError) as error:
            if "require grad" in str(error) or "used in the graph" in str(error):
                error.add_note(
                    "the criterion may get outputs without their graph: return torch.autograd.grad of them from the forward, in "
                    "a block of torch.enable_grad()"
                )
            if names := [*tensors_outside(criterion)]:
                error.add_note(
                    f"the criterion reads {', '.join(names)} beside its arguments, which is neither split by rows nor moved to "
                    f"{device}: pass a tensor of all rows as a target, another as a buffer of a module or by functools.partial"
                )
            raise
        except TypeError as error:
            if "must be Tensor, not" in str(error):  # A loss of torch was given all outputs.
                kind = type(output).__name__
                error.add_note(f"the output of the model is a {kind}: {instead_of(output)}")
            raise


def tensors_outside(criterion: Criterion) -> dict[str, list[Tensor]]:
    """Returns the tensors that a function reads beside its arguments, or that a module has as plain
    attributes, also in lists and dictionaries, by the names of these.
    """
    try:
        outside = inspect.getclosurevars(
            criterion.forward if isinstance(criterion, nn.Module) else criterion
        )
        values = {**vars(criterion), **outside.globals, **outside.nonlocals}
    # it is not written in Python, or a functools.partial, whose tensors are moved
    except TypeError:
        return {}
    return {
        name: containers.tensors_in(value) for name, value in values.items() if _has_tensors(value)
    }


def _has_tensors(value: Any) -> bool:
    """Returns True for a tensor, or a list or a dictionary that begins with some.

    Others may be long, as a list of all losses, and calls of a criterion do not look through them.
    """
    if isinstance(value, Tensor):
        return True
    if not isinstance(value, (dict, list, tuple)):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return containers.first_tensor(next(iter(entries), None)) is not None


def devices_of(outputs: PerReplica, allowed: Sequence[torch.device] | None) -> list[torch.device]:
    """Returns the device of each output.

    One without tensors gets that of its number in ``allowed``, or the CPU.
    """
    devices: list[torch.device] = []
    for number, output in enumerate(outputs):
        tensor = output if type(output) is Tensor else containers.first_tensor(output)
        fallback = allowed or [torch.device("cpu")]
        devices.append(fallback[number % len(fallback)] if tensor is None else tensor.device)
        if allowed is not None and devices[-1] not in allowed:
            raise ValueError(
                f"an output is on {devices[-1]}, expected one of device_ids={[str(device) for device in allowed]}"
            )
    return devices


def shards_of_targets(
    outputs: PerReplica,
    targets: Arguments,
    rows: int | None,
    dim: int,
    allowed: Sequence[torch.device] | None,
) -> list[Shard]:
    """Cuts marked targets of ``rows`` rows as the outputs' shards.

    ``dim`` is the dimension of the rows in unmarked targets.
    """
    known_sizes = [size for size in outputs.sizes if size is not None]
    if len(known_sizes) == len(outputs):
        sizes = proportional_sizes(sum(known_sizes) if rows is None else rows, known_sizes)
    else:
        sizes = split_sizes(len(outputs) if rows is None else rows, len(outputs))
    parts = consecutive(sizes)
    pieces = [targets] * len(parts) if rows is None or len(parts) == 1 else cut(targets, parts, dim)
    cells = zip(pieces, parts, devices_of(outputs, allowed), strict=True)
    return [Shard(NOTHING, piece, part, len(part), device) for piece, part, device in cells]
