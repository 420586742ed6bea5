"""Buckets of gradients, each summed over the replicas as soon as every replica has it.

One autograd function per bucket connects the replicas to the parameters of the module. Its forward
returns aliases of the copies on each device. Its backward runs once, when every replica has its
gradients of the whole bucket. ::

    forward                                          backward

                 +--> aliases, replica 0 --> ...                    +-- gradients, replica 0 <-- ...
    parameters --+--> aliases, replica 1 --> ...     .grad <-- sum--+-- gradients, replica 1 <-- ...
                 +--> aliases, replica 2 --> ...                    +-- gradients, replica 2 <-- ...

A node of a device has one stream: autograd makes it wait for the streams on which its gradients
were computed. So on devices with streams another function stands between the broadcast and the
aliases of each replica.

Sums are taken in the order of the replicas, except by NCCL. Under ``no_sync()`` the gradient of the
first replica goes to ``parameter.grad``, as in DDP, and those of the others wait here for the next
backward that reduces. They are dropped if ``parameter.grad`` was cleared or set in between, as by
``optimizer.zero_grad()``.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import transport
from ..runtime.devices import move
from ..runtime.streams import SideStreams, Streams, on_streams
from ..runtime.torch_private import (
    Node,
    foreach_add,
    foreach_add_,
    hooks_of,
    run_first,
    will_run,
)
from ..runtime.transport import layout_of
from ..runtime.values import set_gradient
from .owners import BucketOwners, Gradients, Piece, all_buckets, is_dense


def accumulate(leaves: Sequence[Tensor], gradients: Gradients, *, is_copy: bool = False) -> None:
    """Adds gradients to ``grad`` as autograd does, in place if both are dense.

    With ``is_copy``, no memory is shared.
    """
    totals = []
    parts = []
    for place, gradient in gradients.items():
        leaf = leaves[place]
        before = leaf.grad
        if before is None:
            result = _with_strides_of(leaf, gradient)
            result = result.clone() if is_copy and result is gradient else result
        elif is_dense(before) and is_dense(gradient):
            totals.append(before)
            parts.append(gradient)
            continue
        else:
            result = before + gradient
        leaf.grad = result
    foreach_add_(totals, parts)


def _with_strides_of(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Returns ``gradient`` with the strides of its leaf, as autograd does, or contiguous if the
    memory of the leaf has gaps.
    """
    if not is_dense(gradient) or gradient.stride() == leaf.stride():
        return gradient
    if layout_of(gradient) == layout_of(leaf):
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


def prepare_sums(
    leaves: Sequence[Tensor], replicas: Sequence[Gradients], *, is_copy: bool = False
) -> Callable[[], Gradients]:
    """Returns a function that sums a bucket's gradients over the replicas, on the device and with
    the strides of ``leaves``.

    Memory is allocated here, on the current streams: blocks of the caching allocator belong to a
    stream. The function may run on side streams. Gradients that some replicas do not have, sparse
    ones, and those with a graph are added at once. With ``is_copy`` no memory is shared with the
    gradients: autograd may have given the same tensor to two parameters.
    """
    home = leaves[0].device
    is_together = len(replicas) > 1 and not torch.is_grad_enabled()
    candidates = replicas[0] if is_together else ()
    places = [
        place
        for place in candidates
        if all(place in each and is_dense(each[place]) for each in replicas)
    ]
    others = set[int]().union(*replicas).difference(places)
    sums = {place: _sum_of(replicas, place, home, is_copy=is_copy) for place in others}
    if not places:
        return lambda: sums
    layouts = [layout_of(leaves[place]) for place in places]
    flat = [
        transport.pack(layouts, [gradients[place] for place in places]) for gradients in replicas
    ]
    # Packed gradients of the first replica are new memory, which takes the sum.
    is_new = len(places) > 1 and flat[0].device == home
    result = flat[0] if is_new else torch.empty_like(flat[0], device=home)

    def compute() -> Gradients:
        transport.reduce(flat, result)
        return sums | dict(zip(places, transport.unpack(layouts, result), strict=True))

    return compute


def _sum_of(
    replicas: Sequence[Gradients], place: int, home: torch.device, *, is_copy: bool
) -> Tensor:
    """Returns the sum of a gradient over the replicas that have one."""
    present = [move(gradients[place], home) for gradients in replicas if place in gradients]
    total = functools.reduce(torch.add, present)
    return total.clone() if is_copy and total is present[0] else total


def _merged(fresh: Gradients, before: Gradients) -> Gradients:
    """Returns elementwise sums. No argument is changed."""
    both = [*(fresh.keys() & before.keys())]
    totals = foreach_add([before[place] for place in both], [fresh[place] for place in both])
    return before | fresh | dict(zip(both, totals, strict=True))


class Schedule(NamedTuple):
    """Settings of one forward for its own backward."""

    streams: Streams  # The replicas run on these.
    side: SideStreams | None  # Sums run there. None if devices have no streams.
    overlapping_side: SideStreams | None  # the same, if the backward of other layers follows
    deferred: bool  # gradients stay with the replicas


Kinds = dict[int, tuple[torch.Size, torch.dtype]]


def kinds_of(parameters: Iterable[nn.Parameter]) -> Kinds:
    """Returns the present shape and dtype of each parameter, by its id."""
    return {id(parameter): (parameter.shape, parameter.dtype) for parameter in parameters}


class Bucket:
    """Parameters whose gradients are summed together: of one dtype, on one device, all with
    ``requires_grad``.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.kinds = kinds_of(parameters)
        # receive the gradients in place of the parameters' ``grad``
        self.owners: BucketOwners | None = None
        # Gradients of the other replicas that are not reduced yet.
        self.held: dict[torch.device, Gradients] = {}
        # The ``grad`` that others wait for, by place of the parameter.
        self._local: dict[int, weakref.ref[Tensor]] = {}
        self._lock = threading.RLock()  # backwards may run in several threads
        all_buckets[id(self)] = self

    def own(self, owners: BucketOwners | None = None) -> None:
        """Gives the gradients to ``owners``, or to the parameters again."""
        self.owners = owners

    def broadcast(
        self, replicas: Sequence[Sequence[Tensor]], schedule: Schedule
    ) -> list[tuple[Tensor, ...]]:
        """Returns aliases of ``replicas[r][i]``, the values of parameter ``i`` for replica ``r``,
        connected to the parameters.
        """
        size = len(self.parameters)
        aliases = _Broadcast.apply(self, replicas, schedule, *self.parameters)
        run_first(aliases[0].grad_fn)  # reduces as soon as all replicas have their gradients
        parts = [aliases[start : start + size] for start in range(0, len(aliases), size)]
        for i in range(len(parts)) if schedule.side is not None else ():
            parts[i] = _Receive.apply(*parts[i])
            run_first(parts[i][0].grad_fn)
        return parts

    def collect(
        self, replicas: list[Gradients], wanted: Sequence[bool | None], schedule: Schedule
    ) -> Gradients:
        """Takes over the gradients of all replicas.

        Returns those that autograd passes on to the parameters.

        ``wanted`` is True for a parameter whose gradient is accumulated, None if autograd passes it
        on (``torch.autograd.grad``, or a hook of the parameter), and False for neither.
        """
        passed_on, accumulated = (
            [
                {place: gradient for place, gradient in gradients.items() if wanted[place] is want}
                for gradients in replicas
            ]
            for want in (None, True)
        )
        returned = prepare_sums(self.parameters, passed_on)()
        self._hold(dict(zip(schedule.streams, accumulated, strict=True)), schedule.deferred)
        if schedule.deferred:
            if schedule.side is not None:
                schedule.side.expect(schedule.streams, schedule.streams, [])
            return returned
        reduction = self._prepare(takes_local=False)
        if side := schedule.overlapping_side:
            with side.entered(schedule.streams, [reduction]):
                reduction()
        else:
            reduction()
        return returned

    def reduce(self) -> None:
        """Sums the gradients that the replicas hold into the parameters' ``grad``."""
        self._prepare(takes_local=True)()

    @torch.no_grad()
    def _prepare(self, *, takes_local: bool) -> Callable[[], None]:
        """Returns a function that reduces the gradients that the replicas hold now, into memory of
        the current streams.

        With ``takes_local``, the ``grad`` of a parameter is added as the first replica's part. This
        is not allowed in a backward: two buckets with one parameter would count it twice. Owners
        have nothing in it that is not reduced.
        """
        with self._lock:
            self._drop_discarded()
            local: Gradients = {}
            for place in self._local if takes_local and self.owners is None else ():
                if (gradient := self.parameters[place].grad) is not None:
                    local[place] = gradient
            held = self.held
            self.held = {}
            self._local = {}
        if local:
            first = _merged(local, held.pop(self._home, {}))
            held = {self._home: first, **held}
        if not held:
            return lambda: None
        if self.owners is not None:
            return self.owners.take(list(held.values()))
        compute = prepare_sums(self.parameters, list(held.values()), is_copy=True)

        @torch.no_grad()
        def add_sums() -> None:
            totals = compute()
            for place, before in local.items():
                before.copy_(totals.pop(place))
            accumulate(self.parameters, totals)

        return add_sums

    def take(self) -> list[Gradients]:
        """Returns the gradients that wait on other devices, and forgets them."""
        with self._lock:
            self._drop_discarded()
            held = [*self.held.values()]
            self.held = {}
            self._local = {}
        return held

    def drop(self) -> None:
        """Forgets the gradients that the replicas and the owners hold."""
        with self._lock:
            self.held = {}
            self._local = {}
            if self.owners is not None:
                self.owners.follow()

    @property
    def _home(self) -> torch.device:
        return self.parameters[0].device

    @torch.no_grad()
    def _hold(self, replicas: dict[torch.device, Gradients], deferred: bool) -> None:
        with self._lock:
            self._drop_discarded()
            if deferred and self.owners is None:
                accumulate(self.parameters, replicas.pop(self._home, {}), is_copy=True)
            for device, gradients in replicas.items():
                self.held[device] = _merged(gradients, self.held.get(device, {}))
            waiting = dict(
                itertools.chain(*(gradients.items() for gradients in self.held.values()))
            )
            for place, parameter in enumerate(self.parameters) if deferred else ():
                if parameter.grad is None and place in waiting:
                    if self.owners is not None:
                        self.owners.parameters[place].add([])
                    else:  # The first replica has none.
                        set_gradient(parameter, torch.zeros_like(waiting[place], device=self._home))
                if parameter.grad is not None:
                    self._local[place] = weakref.ref(parameter.grad)

    def _drop_discarded(self) -> None:
        """Forgets waiting gradients of parameters whose ``grad`` was cleared or set.

        Autograd sets one if it creates a graph.
        """
        for place, before in list(self._local.items()):
            gradient = self.parameters[place].grad
            if gradient is None or (gradient is not before() and gradient.grad_fn is None):
                del self._local[place]
                for gradients in self.held.values():
                    gradients.pop(place, None)


class _Broadcast(torch.autograd.Function):
    """Broadcasts a bucket in the forward, and reduces its gradients in the backward, as the
    schedule of the forward says.
    """

    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, replicas: Any, schedule: Schedule, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.schedule = schedule
        ctx.size = len(parameters)
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for replica in replicas for tensor in replica])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        schedule: Schedule = ctx.schedule
        starts = range(0, len(gradients), ctx.size)
        replicas = [
            {
                place: each
                for place in range(ctx.size)
                if (each := gradients[start + place]) is not None
            }
            for start in starts
        ]
        with on_streams(schedule.streams):
            if schedule.side is not None:
                schedule.side.begin()
            side = schedule.overlapping_side
            if (
                schedule.deferred
                or bucket.held
                or ((side or bucket.owners) and not torch.is_grad_enabled())
            ):
                nodes = [node for node, _ in ctx.next_functions]
                wanted = [*map(_is_wanted, bucket.parameters, nodes)]
                if side and bucket.owners is None:
                    for node in itertools.compress(nodes, wanted):
                        side.join_before(node)
                sums = bucket.collect(replicas, wanted, schedule)
            else:  # Autograd accumulates the sums.
                sums = prepare_sums(bucket.parameters, replicas)()
            return None, None, None, *map(sums.get, range(ctx.size))


def _is_wanted(parameter: Tensor, node: Node) -> bool | None:
    """Returns True if the running backward accumulates the gradient, and None if autograd passes it
    on.
    """
    if any(hooks_of(parameter)):
        return None
    return node is not None and will_run(node)  # A parameter without requires_grad has no node.


class _Receive(torch.autograd.Function):
    """Passes tensors of one device on.

    Its backward runs on the stream of its forward, behind the streams of the gradients.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


BUCKET_BYTES = 25 * 2**20  # torch's DistributedDataParallel has this size.


class GradientBuckets:
    """The gradient buckets of all parameters of one module."""

    def __init__(self, side: SideStreams | None = None, size: int | None = None) -> None:
        self.buckets: list[Bucket] = []
        self._size = size
        # Sums overlap with the backward there. They are made on first use if devices have streams.
        self.side = side

    @property
    def is_sharded(self) -> bool:
        """True if owners receive the gradients of at least one bucket."""
        return any(bucket.owners is not None for bucket in self.buckets)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all owners."""
        owners = [bucket.owners for bucket in self.buckets if bucket.owners is not None]
        return [piece for each in owners for piece in each.pieces]

    @property
    def kinds(self) -> Kinds:
        """Shape and dtype of each parameter when its bucket was made, by its id."""
        return {key: kind for bucket in self.buckets for key, kind in bucket.kinds.items()}

    def reduce(self) -> None:
        """Sums the gradients that the replicas hold."""
        for bucket in self.buckets:
            bucket.reduce()

    def drop(self) -> None:
        """Forgets the gradients that the replicas and the owners hold."""
        for bucket in self.buckets:
            bucket.drop()
        if self.side is not None:  # a backward that failed did not join
            self.side.join()

    def rebuild(self, *groups: Sequence[nn.Parameter]) -> list[list[Bucket]]:
        """Makes new buckets of those parameters in each of ``groups`` that require a gradient and
        have no owners.
        """
        self.reduce()
        self.buckets = [bucket for bucket in self.buckets if bucket.owners is not None]
        owned = self.kinds
        learning = [
            [each for each in group if each.requires_grad and id(each) not in owned]
            for group in groups
        ]
        buckets = [make_buckets(group, self._size) for group in learning]
        self.buckets += itertools.chain(*buckets)
        return buckets

    def schedule(self, bucket: Bucket, streams: Streams, *, deferred: bool) -> Schedule:
        """Returns the schedule of a bucket's backward, for a forward on ``streams``."""
        if self.side is None and any(streams.values()):
            self.side = SideStreams()
        overlapping = None if bucket is self.buckets[-1] else self.side
        return Schedule(streams, self.side, overlapping, deferred)


def make_buckets(parameters: Sequence[nn.Parameter], size: int | None = None) -> list[Bucket]:
    """Returns buckets of at most ``size`` bytes, by default 25 MiB, or of one parameter, and of one
    dtype.

    The last parameters come first, as in the backward.
    """
    last_first = parameters[::-1]
    size = BUCKET_BYTES if size is None else size
    return [
        Bucket([last_first[i] for i in chunk])
        for chunk in sorted(transport.chunks(last_first, size))
    ]
