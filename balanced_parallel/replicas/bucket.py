"""A bucket: parameters whose gradients are summed together, as soon as every replica has them.

One autograd function per bucket connects the replicas to the parameters of the module. Its forward returns aliases of the
copies on each device. Its backward runs once, when every replica has its gradients of the whole bucket:

    forward                                          backward

                 +--> aliases, replica 0 --> ...                    +-- gradients, replica 0 <-- ...
    parameters --+--> aliases, replica 1 --> ...     .grad <-- sum--+-- gradients, replica 1 <-- ...
                 +--> aliases, replica 2 --> ...                    +-- gradients, replica 2 <-- ...

A node of a device has one stream: autograd makes it wait for the streams on which its gradients were computed. So on devices
with streams another function stands between the broadcast and the aliases of each replica. A module may use streams of its own.

The sum is taken in the order of the replicas, except by NCCL. Under ``no_sync()`` the gradients stay with the replicas instead,
and are added there until the next backward that reduces.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..runtime.autograd import run_first, will_run
from ..runtime.devices import move
from ..runtime.streams import SideStreams, Streams, on_streams
from ..runtime.tensors import has_gradient_hooks
from . import deferred_gradients
from .gradient_sums import Gradients, GradientSum, accumulate, add, add_up

__all__: list[str] = []


class Owners(Protocol):
    """Devices that own elements of a bucket's parameters, and receive the gradients of these elements."""

    def take(self, replicas: Sequence[Gradients]) -> Callable[[], None]:
        """Allocates sums of the replicas' gradients on the current streams. Returns a function that computes them."""

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes memory from ``copies`` of some parameters, which have moved."""


class Schedule(NamedTuple):
    """Settings of one forward for its own backward."""

    streams: Streams  # that the replicas run on
    side: SideStreams | None  # where sums overlap with the backward; None where devices have no streams
    overlaps: bool  # the backward of other layers follows
    deferred: bool  # gradients stay with the replicas


class Bucket:
    """Parameters whose gradients are summed together.

    Args:
        parameters: of one dtype, on one device, all with ``requires_grad``.
        owners: receive the gradients in place of the parameters' ``grad``.
    """

    def __init__(self, parameters: list[nn.Parameter], owners: Owners | None = None) -> None:
        self.parameters = parameters
        self.owners = owners
        self.held: list[Gradients] = []  # not reduced yet, one entry per replica
        self._lock = threading.RLock()  # backwards may run in several threads

    def broadcast(self, replicas: Sequence[Sequence[Tensor]], schedule: Schedule) -> list[tuple[Tensor, ...]]:
        """Returns aliases of the tensors, connected to the parameters.

        Args:
            replicas: ``replicas[r][i]`` has the values of parameter ``i`` for replica ``r``.
            schedule: for the backward through these aliases.
        """
        size = len(self.parameters)
        aliases = _Broadcast.apply(self, replicas, schedule, *self.parameters)
        run_first(aliases[0].grad_fn)  # reduces as soon as all replicas have their gradients
        parts = [aliases[start : start + size] for start in range(0, len(aliases), size)]
        return parts if schedule.side is None else [_received(part) for part in parts]

    def goes_to_autograd(self, schedule: Schedule) -> bool:
        """Returns True if autograd accumulates the sums into the parameters, as it would without replicas."""
        on_side_stream = schedule.side is not None and schedule.overlaps and not torch.is_grad_enabled()
        return not (schedule.deferred or self.owners or self.held or on_side_stream)

    def collect(self, replicas: list[Gradients], wanted: Sequence[bool | None], schedule: Schedule) -> Gradients:
        """Takes over the gradients of all replicas. Returns those that autograd passes on to the parameters.

        Args:
            replicas: gradients of each replica.
            wanted: per parameter, True if its gradient is accumulated, None if autograd passes it on (``torch.autograd.grad``, or
                a hook of the parameter), and False for neither.
            schedule: of the forward that this backward belongs to.
        """
        returned: Gradients = [None] * len(wanted)
        if None in wanted:
            passed_on = [_only(gradients, [want is None for want in wanted]) for gradients in replicas]
            returned = add_up(self.parameters, passed_on, self._home)
        self._hold([_only(gradients, [want is True for want in wanted]) for gradients in replicas], schedule.deferred)
        if schedule.deferred:
            if schedule.side is not None:
                schedule.side.expect(schedule.streams, schedule.streams, [])
            return returned
        reduction = self._prepare()
        if schedule.side is not None and schedule.overlaps:
            with schedule.side.entered(schedule.streams, [reduction]):
                reduction()
        else:
            reduction()
        return returned

    def reduce(self) -> None:
        """Sums the gradients that the replicas hold into the parameters' ``grad``, or to the owners."""
        self._prepare()()

    @torch.no_grad()
    def _prepare(self) -> Callable[[], None]:
        """Returns a function that reduces the gradients that the replicas hold now.

        Memory that stays is allocated here, on the current streams: blocks of the caching allocator belong to a stream.
        """
        held = self._release()
        if not held:
            return lambda: None
        if self.owners is not None:
            return self.owners.take(held)
        return functools.partial(self._accumulate, GradientSum(self.parameters, held, self._home, own=True))

    @torch.no_grad()
    def _accumulate(self, sums: GradientSum) -> None:
        for parameter, total in zip(self.parameters, sums.compute(), strict=True):
            if total is not None:
                accumulate(parameter, total)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the gradients that the replicas hold."""

        def scaled(gradient: Tensor) -> Tensor:
            return gradient * (move(factor, gradient.device) if isinstance(factor, Tensor) else factor)

        with self._lock:
            self.held = [[None if gradient is None else scaled(gradient) for gradient in held] for held in self.held]

    def drop(self) -> None:
        """Forgets the gradients that the replicas hold."""
        self._release()

    def holds(self, parameter: Tensor) -> bool:
        """Returns True if the replicas may have unreduced gradients of a parameter."""
        return bool(self.held) and parameter in self

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._places

    def discard(self, parameter: Tensor) -> None:
        """Forgets the gradients that the replicas hold of one parameter."""
        with self._lock:
            for gradients in self.held:
                gradients[self._places[id(parameter)]] = None

    @property
    def _home(self) -> torch.device:
        return self.parameters[0].device

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {id(parameter): place for place, parameter in enumerate(self.parameters)}

    def _release(self) -> list[Gradients]:
        with self._lock:
            held, self.held = self.held, []
            if held:
                deferred_gradients.release(self)
        return held

    @torch.no_grad()
    def _hold(self, replicas: list[Gradients], deferred: bool) -> None:
        with self._lock:
            if deferred:
                deferred_gradients.hold(self)
            for held, fresh in zip(self.held, replicas, strict=False):
                both = [i for i, gradient in enumerate(fresh) if gradient is not None and held[i] is not None]
                for i, total in zip(both, add([held[i] for i in both], [fresh[i] for i in both]), strict=True):
                    held[i] = total
                for i, gradient in enumerate(fresh):
                    held[i] = gradient if held[i] is None else held[i]
            self.held += replicas[len(self.held) :]


class _Broadcast(torch.autograd.Function):
    """Broadcasts a bucket in the forward, and reduces its gradients in the backward.

    The schedule is on ``ctx``: each backward follows the forward that it belongs to, in whatever order they run.
    """

    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, replicas: Sequence[Sequence[Tensor]], schedule: Schedule, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.schedule, ctx.size = bucket, schedule, len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for replica in replicas for tensor in replica)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        schedule: Schedule = ctx.schedule
        replicas = [list(gradients[start : start + ctx.size]) for start in range(0, len(gradients), ctx.size)]
        with on_streams(schedule.streams):
            if schedule.side is not None:
                schedule.side.join()
            if bucket.goes_to_autograd(schedule):
                return (None, None, None, *add_up(bucket.parameters, replicas, bucket.parameters[0].device))
            nodes = [node for node, _ in ctx.next_functions]
            wanted = [
                None if has_gradient_hooks(p) else _is_accumulated(node) for p, node in zip(bucket.parameters, nodes, strict=True)
            ]
            return (None, None, None, *bucket.collect(replicas, wanted, schedule))


class _Receive(torch.autograd.Function):
    """Passes tensors of one device on. Its backward runs on the stream of its forward, behind the streams of the gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _received(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    aliases: tuple[Tensor, ...] = _Receive.apply(*tensors)
    run_first(aliases[0].grad_fn)
    return aliases


def _is_accumulated(node: Any) -> bool | None:
    """Returns True if the running backward accumulates into a leaf, and None if ``torch.autograd.grad`` returns its gradient."""
    return False if node is None else will_run(node)  # a parameter without requires_grad has no node


def _only(gradients: Gradients, chosen: list[bool]) -> Gradients:
    return [gradient if choose else None for gradient, choose in zip(gradients, chosen, strict=True)]
