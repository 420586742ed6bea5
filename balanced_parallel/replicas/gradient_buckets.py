"""Sums the gradients of the replicas, bucket by bucket, as soon as a bucket is complete, and always in the same order."""

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..runtime.streams import SideStreams, Streams, on_streams
from . import deferred_gradients
from .gradient_sums import Gradients, accumulate, add, add_up

__all__: list[str] = []

BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel

FIRST = 2**63  # before anything else that a device's thread of the engine could do: backward runs the highest number first


class Owners(Protocol):
    """Where the gradients of a bucket go instead of to the ``grad`` of its parameters."""

    def take(self, replicas: Sequence[Gradients]) -> None:
        """Sums gradients of the replicas to their owners."""

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes memory from ``copies`` of some parameters, which have moved."""


class Bucket:
    """Parameters whose gradients are summed together.

    Args:
        parameters: of one dtype, on one device, all with ``requires_grad``.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.owners: Owners | None = None
        self.deferred = False  # gradients stay with the replicas until reduce()
        self.held: list[Gradients] = []  # not reduced yet
        self.side: SideStreams | None = None  # where devices have streams
        self._lock = threading.RLock()  # backwards may run in several threads
        self.is_last = False  # nothing is left that its sums could overlap with

    def hand_out(self, replicas: Sequence[Sequence[Tensor]], computing: Streams) -> list[tuple[Tensor, ...]]:
        """An alias of each tensor, connected to the parameters: ``replicas[r][i]`` has the values of parameter ``i``.

        Args:
            computing: the streams that the replicas run on.
        """
        size = len(self.parameters)
        aliases = _HandOut.apply(self, replicas, computing, *self.parameters)
        aliases[0].grad_fn._set_sequence_nr(FIRST)
        return [aliases[start : start + size] for start in range(0, len(aliases), size)]

    @property
    def passes_on(self) -> bool:
        """Whether gradients simply go on to the parameters, as autograd would bring them there."""
        by_itself = self._overlapping is not None and not torch.is_grad_enabled()  # nobody asks for a graph of the gradients
        return not (self.deferred or self.owners or self.held or by_itself)

    @property
    def _overlapping(self) -> SideStreams | None:
        return None if self.is_last else self.side

    def collect(self, replicas: list[Gradients], wanted: Sequence[bool | None], computing: Streams) -> Gradients:
        """The gradients that autograd passes on to the parameters, now that all replicas have theirs.

        Args:
            replicas: those of each replica; this takes them over.
            wanted: per parameter whether its gradient is to be accumulated (True), returned (None, as
                ``torch.autograd.grad`` asks), or neither.
            computing: the streams that the replicas have run on.
        """
        device = self.parameters[0].device
        returned = add_up([_only(gradients, [want is None for want in wanted]) for gradients in replicas], device)
        fresh = [_only(gradients, [want is True for want in wanted]) for gradients in replicas]
        if self.deferred:
            with self._lock:
                self._hold(fresh)
                deferred_gradients.hold(self)
            if self.side is not None:
                self.side.expect(computing, computing, [])
            return returned
        with self._beside(computing, fresh):
            self._hold(fresh)
            self.reduce()
        return returned

    def _beside(self, computing: Streams, fresh: list[Gradients]) -> contextlib.AbstractContextManager[None]:
        if self._overlapping is None:
            return contextlib.nullcontext()
        return self._overlapping.entered(computing, [list(gradients) for gradients in (*self.held, *fresh)])

    def reduce(self) -> None:
        """Brings what the replicas hold to the parameters' ``grad``, or to the owners."""
        held = self._release()
        if not held:
            return
        with torch.no_grad():
            if self.owners is not None:
                self.owners.take(held)
                return
            totals = add_up(held, self.parameters[0].device, own=True)
            for parameter, total in zip(self.parameters, totals, strict=True):
                if total is not None:
                    accumulate(parameter, total)

    def scale(self, factor: float) -> None:
        """Multiplies what the replicas hold."""
        with self._lock:
            self.held = [[None if gradient is None else gradient * factor for gradient in held] for held in self.held]

    def drop(self) -> None:
        """Forgets what the replicas hold."""
        self._release()

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether the replicas may hold gradients of a parameter."""
        return bool(self.held) and self.has(parameter)

    def has(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is in this bucket."""
        return id(parameter) in self._places

    def discard(self, parameter: Tensor) -> None:
        """Forgets what the replicas hold of one parameter."""
        with self._lock:
            for gradients in self.held:
                gradients[self._places[id(parameter)]] = None

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
    def _hold(self, replicas: list[Gradients]) -> None:
        with self._lock:
            for held, fresh in zip(self.held, replicas, strict=False):
                both = [i for i, gradient in enumerate(fresh) if gradient is not None and held[i] is not None]
                for i, total in zip(both, add([held[i] for i in both], [fresh[i] for i in both]), strict=True):
                    held[i] = total
                for i, gradient in enumerate(fresh):
                    held[i] = gradient if held[i] is None else held[i]
            self.held += replicas[len(self.held) :]


class _HandOut(torch.autograd.Function):
    """Its backward runs when every replica has the gradients of the whole bucket."""

    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, replicas: Sequence[Sequence[Tensor]], computing: Streams, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.size, ctx.computing = bucket, len(parameters), computing
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for replica in replicas for tensor in replica)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        replicas = [list(gradients[start : start + ctx.size]) for start in range(0, len(gradients), ctx.size)]
        with on_streams(ctx.computing):
            if bucket.side is not None:
                bucket.side.join()
            if bucket.passes_on:
                return (None, None, None, *add_up(replicas, bucket.parameters[0].device))
            nodes = [node for node, _ in ctx.next_functions]
            wanted = [None if _is_watched(p) else _is_wanted(node) for p, node in zip(bucket.parameters, nodes, strict=True)]
            return (None, None, None, *bucket.collect(replicas, wanted, ctx.computing))


def _is_watched(parameter: Any) -> bool:
    """Whether somebody has put a hook on the parameter: its gradients go there at once, past hooks, as they always do."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_wanted(accumulates: Any) -> bool | None:
    """Whether the running backward accumulates into a leaf; None where ``torch.autograd.grad`` asks for its gradient, which is
    when torch refuses to say."""
    if accumulates is None:  # a parameter that does not learn
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulates))
    except RuntimeError:
        return None


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Buckets of at most 25 MiB (or one parameter) and one dtype, the last parameters first: backward reaches them first."""
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, tuple[Bucket, int]] = {}
    for parameter in reversed(parameters):
        bucket, size = open_buckets.get(parameter.dtype, (None, 0))
        if bucket is None or size + parameter.nbytes > BUCKET_BYTES:
            bucket, size = Bucket([]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_buckets[parameter.dtype] = bucket, size + parameter.nbytes
    return buckets


def _only(gradients: Gradients, chosen: list[bool]) -> Gradients:
    return [gradient if choose else None for gradient, choose in zip(gradients, chosen, strict=True)]
