"""Collectives of all ranks: sums, rows and objects of all, facts that must agree, and a clean end.

Without a process group there is one rank, and no function communicates. Functions take the process
group of the ranks; ``None`` is the group of those that share a batch: all ranks, or the mesh that
``parallelize`` was given.
"""

import contextlib
import ctypes
import hashlib
import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch_private
from .devices import is_accelerator

Number = TypeVar("Number", int, float)
Fields = TypeVar("Fields", bound=NamedTuple)  # each field is a number
T = TypeVar("T")
Group: TypeAlias = "dist.ProcessGroup | None"  # None: of the ranks that share a batch
# The groups that belong to a process group. torch has no place in a group for others, and all ranks
# make each of them once.
_second_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)
# The ranks that share a batch, as torch has one default group for the process: gather() and
# criteria are given no model.
_batch_group: Group = None  # None: all ranks
_has_batch_group = False


def share_batches(group: Group) -> None:
    """Makes ``group`` the ranks that share a batch; ``None`` keeps those of a call before, or takes
    all ranks.
    """
    global _batch_group, _has_batch_group
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        before = dist.get_process_group_ranks(_batch_group)
        if _has_batch_group and ranks != before:
            raise ValueError(
                f"mesh= has the ranks {ranks}, and a model before has {before}, expected the same ranks for all models"
            )
        _batch_group = None if len(ranks) == dist.get_world_size() else group
    _has_batch_group = True


def batch_group() -> Group:
    """Returns the process group of the ranks that share a batch. None is torch's default group."""
    return _batch_group


def world_size(group: Group = None) -> int:
    """Returns the number of ranks, which is 1 without a process group."""
    return dist.get_world_size(group or _batch_group) if dist.is_initialized() else 1


def rank(group: Group = None) -> int:
    """Returns the number of this rank, which is 0 without a process group."""
    return dist.get_rank(group or _batch_group) if dist.is_initialized() else 0


def second_group(purpose: str, backend: str | None = None) -> Group:
    """Returns a process group of the ranks that share a batch, whose collectives may come before or
    after those of the gradients.

    All ranks make it together in the first call for a ``purpose``, such as the statistics of
    layers.
    """
    first = _batch_group or dist.group.WORLD
    if first is None or world_size() == 1:
        return None
    groups = _second_groups.setdefault(first, {})
    if purpose not in groups:
        ranks = None if _batch_group is None else dist.get_process_group_ranks(first)
        timeout = torch_private.timeout_of(first)
        groups[purpose] = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=ranks is not None
        )
    return groups[purpose]


def sum_over_ranks(tensor: Tensor, group: Group = None) -> Tensor:
    """Returns the sum of ``tensor`` over all ranks, on the device of ``tensor``.

    The sum has no gradient.
    """
    total = tensor.detach().clone()
    if world_size(group) > 1:
        total = _to_backend_device(total, group)
        dist.all_reduce(total, group=group or _batch_group)
    return total.to(tensor.device)


def gather_numbers(numbers: Fields, group: Group = None) -> list[Fields]:
    """Returns a named tuple of numbers of each rank, in the order of the ranks.

    Nothing is pickled: one exchange in place of the two of :func:`gather_objects`.
    """
    if (ranks := world_size(group)) == 1:
        return [numbers]
    sent = _to_backend_device(torch.tensor(numbers, dtype=torch.float64), group)
    gathered = sent.new_empty(ranks, len(numbers))
    dist.all_gather([*gathered], sent, group=group or _batch_group)
    return [*map(numbers._make, gathered.tolist())]


def max_over_ranks(number: Number, group: Group = None) -> Number:
    """Returns the largest ``number`` of all ranks."""
    return max(gather_objects(number, group))


def gather_objects(value: T, group: Group = None) -> list[T]:
    """Returns the ``value`` of each rank, in the order of the ranks. Values must be picklable.

    Raises the failure of a rank that :func:`tell_failure` has sent.
    """
    values = [value] * world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group or _batch_group)
    failures = [each for each in values if isinstance(each, _Failure)]
    if failures:
        raise_failure(len(failures), len(values), *failures[0])
    return values


class ElsewhereFailure(RuntimeError):
    """Ranks have failed, which all of them know."""


class ElsewhereOutOfMemory(ElsewhereFailure, torch.OutOfMemoryError):
    """Ranks are out of memory, which all of them know."""


class _Failure(NamedTuple):
    """The failure of a rank, which it sends in place of a value."""

    is_memory: bool
    text: str


def tell_failure(error: BaseException, group: Group = None) -> None:
    """Sends an error to ranks that wait in :func:`gather_objects`, and raise it there.

    It is not one that all of them know.
    """
    if isinstance(error, ElsewhereFailure):
        return
    is_memory = isinstance(error, torch.OutOfMemoryError)
    with contextlib.suppress(ElsewhereFailure):
        gather_objects(_Failure(is_memory, f" ({type(error).__name__}: {error})"), group)


@contextlib.contextmanager
def telling(error: BaseException) -> Iterator[None]:
    """Surrounds what tells other ranks of an error. The error gets a note if that fails, too."""
    try:
        yield
    except Exception as another:  # noqa: BLE001 - of any kind
        error.add_note(
            f"after this error, {type(another).__name__} was raised: {another}; other ranks may not know of it, and wait until "
            "the timeout"
        )


def raise_failure(count: float, ranks: int, is_memory: bool, text: str = "") -> None:
    """Raises an error on all ranks, of which ``count`` have failed."""
    kind = ElsewhereOutOfMemory if is_memory else ElsewhereFailure
    event = "ran out of memory" if is_memory else "failed"
    raise kind(
        f"{count:.0f} of {ranks} ranks {event}{text}, expected none: look for their errors in the log, or repeat the step, since "
        "nothing was updated"
    )


def gather_rows(tensor: Tensor, sizes: list[int], dim: int, group: Group = None) -> Tensor:
    """Concatenates the rows of all ranks along ``dim``, of these ``sizes``.

    The result is differentiable.
    """
    gathered: Tensor = _GatherRows.apply(tensor, sizes, dim, group)
    return gathered


def _to_backend_device(tensor: Tensor, group: Group) -> Tensor:
    """Moves a CPU tensor to the accelerator if the process group has no backend for the CPU."""
    backends = dist.get_backend_config(group or _batch_group)
    if is_accelerator(tensor.device) or re.search("gloo|mpi|ucc|fake", backends):
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


class _GatherRows(torch.autograd.Function):
    """All-gather of rows.

    Backward sums the gradients over the ranks, which DDP averages, and keeps the rows of this rank.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], dim: int, group: Group) -> Tensor:
        ctx.sizes = sizes
        ctx.dim = dim
        ctx.group = group
        shape = list(tensor.shape)
        shape[dim] = max(sizes)  # all_gather needs equal sizes: pad, then drop the padding
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        padded = _to_backend_device(padded, group)
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded, group=group or _batch_group)
        rows = [part.narrow(dim, 0, size) for part, size in zip(received, sizes, strict=True)]
        return torch.cat(rows, dim).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        total = SumOverRanks.apply(gradients[0], ctx.group)
        place = rank(ctx.group)
        return total.narrow(ctx.dim, sum(ctx.sizes[:place]), ctx.sizes[place]), None, None, None


class SumOverRanks(torch.autograd.Function):
    """All-reduce. Backward sums the gradients over the ranks, which DDP averages."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        """Returns the sum of ``tensor`` over all ranks."""
        ctx.group = group
        return sum_over_ranks(tensor.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients of all ranks."""
        return SumOverRanks.apply(gradient, ctx.group), None


_MOST = 3  # An error has so many differences.
# Ranks compare it beside the settings of a step, which is given batches and not their sampler.
facts_of_process: dict[str, Hashable] = {"the sampler's batches": "no RankBatchSampler"}


_RENORM = "embedding_renorm_"  # F.embedding(max_norm=) writes to rows of the weight.


class OnCollective(torch_private.OnOperator):
    """Calls a function with the name of each collective in its block, before it runs.

    Calls another one with the tensors that an operator writes to. A forward that would rescale rows
    of a weight raises ``ValueError``.
    """

    def __init__(
        self, act: Callable[[str], object], write: Callable[[list[Tensor]], None] | None = None
    ) -> None:
        super().__init__(self._see)
        self._on_collective = act
        self._write = write

    def _see(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuses shards in a criterion: they may wait for other ranks."""
        for value in args if self._write is None else ():
            if isinstance(value, torch.nn.Parameter):
                refuse_shards(value)
        name = function.__name__.partition(".")[0]
        if name == _RENORM:
            raise ValueError(
                "F.embedding was given max_norm=, and each device or rank would rescale the rows that it sees, expected None: "
                "write weight.copy_(weight.renorm(2, 0, max_norm)) under torch.no_grad() after each update"
            )
        if getattr(function, "namespace", None) in ("c10d", "_c10d_functional"):
            self._on_collective(name)
        elif self._write and (tensors := torch_private.written_by(function, args, kwargs)):
            self._write(tensors)


def compare_ranks(facts: Mapping[str, Hashable], expected: str) -> None:
    """Compares a digest of the facts of all ranks in one small all-gather.

    If it differs, all ranks gather the facts, and raise ``ValueError`` with the first ones that
    differ.
    """
    if len({*gather_objects(digest(repr(facts).encode()))}) == 1:
        return
    ranks = gather_objects(facts)
    messages = []
    for name in dict.fromkeys(itertools.chain(*ranks)):
        values = [rank.get(name, "nothing") for rank in ranks]
        if len({*values}) > 1:
            messages.append(f"{name}: {by_value([*map(str, values)])}")
    if messages:
        raise ValueError(f"the ranks differ, expected {expected}: {'; '.join(messages[:_MOST])}")


def digest(content: bytes) -> str:
    """Returns the first digits of the SHA-256 of bytes. For a file they are those of ``sha256sum``."""
    return hashlib.sha256(content).hexdigest()[:12]


def by_value(values: Sequence[str]) -> str:
    """Describes the value of each rank: ``"2.13.0 on ranks 0, 1 and 2.11.0 on rank 2"``."""
    groups: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(str(rank))
    names = {
        value: f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for value, ranks in groups.items()
    }
    return " and ".join(f"{value} on {name}" for value, name in names.items())


# Marks in the metadata of nodes.
_SHARED = "the ranks share this gradient"
WATCHED = "behind these outputs, the ranks share all gradients of a model"


def mark_shared(parameters: Iterable[Tensor]) -> None:
    """Marks parameters whose gradients the ranks share.

    The nodes that accumulate them must live, as in a reducer.
    """
    for parameter in parameters:
        torch_private.accumulator_of(parameter).metadata[_SHARED] = True


def refuse_unshared(parameters: Iterable[Tensor]) -> None:
    """Raises ``ValueError`` for a parameter of a criterion whose gradient the ranks would not
    share.
    """
    for parameter in parameters:
        is_shared = not parameter.requires_grad or torch_private.is_sharded(parameter)
        if not is_shared and _SHARED not in torch_private.accumulator_of(parameter).metadata:
            raise ValueError(
                f"the criterion has a parameter of shape {tuple(parameter.shape)} to train, whose gradient the ranks would not "
                "share: pass the criterion to parallelize, beside the module; with strategy='fsdp' make it part of the module, "
                "or call requires_grad_(False) on it, as a teacher is frozen"
            )


def refuse_shards(tensor: Tensor) -> None:
    """Raises ``RuntimeError`` for a shard in a loss, or for its gradient."""
    if torch_private.is_sharded(tensor):
        raise RuntimeError(
            "a loss uses sharded parameters, as a penalty does, expected a backward of its own for them, with each strategy: "
            "loss.backward(), then penalty(model.module).backward(); in TrainStep, parameter.register_hook adds a derivative"
        )


def explain_unwatched(tensors: Iterable[object]) -> str | None:
    """Describes outputs that lead to parameters past all models of the ranks, which would not share
    the gradients; else None.
    """
    has_parameters = False
    for node in torch_private.nodes_behind(tensors):
        if WATCHED in node.metadata:
            return None
        leaf = getattr(node, "variable", None)
        has_parameters = has_parameters or isinstance(leaf, torch.nn.Parameter)
    if not has_parameters:
        return None
    return (
        "outputs were computed past the model that parallelize returned, so the ranks would not share their gradients, expected "
        "those of model(inputs), or of model.call('method', inputs) for another method; detach outputs that train nothing"
    )


# The last backward from a loss of all ranks. Reducers average, so its gradients have a factor of
# world_size().
_backward_of_all: list[int | None] = [-1]


def mark_loss(loss: Tensor) -> Tensor:
    """Marks a loss of all ranks: its backward has world_size() times the gradient of this rank."""
    # Derivatives of its gradient do not pass the new node.
    return _hooked(loss, _note_backward) if loss.requires_grad else loss


def _note_backward(gradient: Tensor) -> None:
    refuse_shards(gradient)
    _backward_of_all[0] = torch_private.current_backward_id()


def enter(tensor: Tensor) -> Tensor:
    """Returns an input of a model, or a target, whose gradient no reducer averages: it is divided.

    Outputs of another model lead to parameters, so they stay.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()) or any(
        {WATCHED, _SHARED} & {*node.metadata} for node in torch_private.nodes_behind([tensor])
    ):
        return tensor
    return _hooked(tensor, _divide)


def _hooked(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    view = tensor.view_as(tensor)
    view.register_hook(hook)
    return view


def _divide(gradient: Tensor) -> Tensor:
    is_of_all = _backward_of_all[0] == torch_private.current_backward_id()
    return gradient / world_size() if is_of_all else gradient


def explain_timeout(error: BaseException) -> None:
    """Adds a note to the error of a collective whose timeout is over."""
    if isinstance(error, RuntimeError) and re.search("(?i)timed out|timeout", str(error)):
        error.add_note(
            f"rank {dist.get_rank()} waits in a collective that another rank has not come to: look for its error in the log, "
            "give all ranks equally many batches, or set TORCH_FR_BUFFER_SIZE=2000 for torch's flight recorder and compare "
            "the ranks with torchfrtrace"
        )


def keep_backends() -> None:
    """Keeps gloo's backends of all running process groups until the process has ended.

    Their destructor would wait for threads, whose collective never comes to its end if another rank
    has failed.
    """
    for backend in torch_private.all_backends():
        if backend.name() == "gloo":
            # a reference that the interpreter does not know, and so cannot give up
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
