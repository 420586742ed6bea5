"""Buckets of gradients, each summed over the replicas as soon as every replica has it.

One autograd function per bucket connects the replicas to the parameters of the module. Its forward returns aliases of the
copies on each device. Its backward runs once, when every replica has its gradients of the whole bucket. ::

    forward                                          backward

                 +--> aliases, replica 0 --> ...                    +-- gradients, replica 0 <-- ...
    parameters --+--> aliases, replica 1 --> ...     .grad <-- sum--+-- gradients, replica 1 <-- ...
                 +--> aliases, replica 2 --> ...                    +-- gradients, replica 2 <-- ...

A node of a device has one stream: autograd makes it wait for the streams on which its gradients were computed. So on devices
with streams another function stands between the broadcast and the aliases of each replica.

Sums are taken in the order of the replicas, except by NCCL. Under ``no_sync()`` the gradient of the first replica goes to
``parameter.grad``, as in DDP, and those of the others wait here for the next backward that reduces. They are dropped if
``parameter.grad`` was cleared or set in between, as by ``optimizer.zero_grad()``.

For a :class:`BalancedOptimizer`, each device owns an equal part of a bucket's elements, or whole parameters, and receives the
sums of these. ::

    parameters   | weight            | bias | weight       |        pieces share the memory of the replicas
    owners       | device 0    | device 1    | device 2    |        reduce-scatter -> update of a piece -> all-gather
"""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import torch_private, transport
from ..runtime.devices import move
from ..runtime.streams import SideStreams, Streams, on_streams
from ..runtime.torch_private import foreach_add, foreach_add_, hooks_of, run_after_backward, run_first, will_run

Gradients = dict[int, Tensor]  # one replica's, by the place of the parameter in its bucket; none for an unused parameter


def accumulate(leaves: Sequence[Tensor], gradients: Gradients, *, is_copy: bool = False) -> None:
    """Adds gradients to ``grad`` as autograd does, in place if both are dense. With ``is_copy``, no memory is shared."""
    totals, parts = [], []
    for place, gradient in gradients.items():
        leaf = leaves[place]
        before = leaf.grad
        if before is None:
            result = _with_strides_of(leaf, gradient)
            leaf.grad = result.clone() if is_copy and result is gradient else result
        elif _is_dense(before) and _is_dense(gradient):
            totals.append(before)
            parts.append(gradient)
        else:
            leaf.grad = before + gradient
    foreach_add_(totals, parts)


def _with_strides_of(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Returns ``gradient`` with the strides of its leaf, as autograd does, or contiguous if the memory of the leaf has gaps."""
    if not _is_dense(gradient) or _have_same_strides(gradient, leaf):
        return gradient
    copy = torch.empty_like(leaf, dtype=gradient.dtype)
    return gradient if _have_same_strides(gradient, copy) else copy.copy_(gradient)


def _have_same_strides(left: Tensor, right: Tensor) -> bool:
    return left.stride() == right.stride() or all(
        size <= 1 or step == other for size, step, other in zip(left.shape, left.stride(), right.stride(), strict=True)
    )


def prepare_sums(leaves: Sequence[Tensor], replicas: Sequence[Gradients], *, is_copy: bool = False) -> Callable[[], Gradients]:
    """Returns a function that sums a bucket's gradients over the replicas, on the device and with the strides of ``leaves``.

    Memory is allocated here, on the current streams: blocks of the caching allocator belong to a stream. The function may run on
    side streams. Gradients that some replicas do not have, sparse ones, and those with a graph are added at once. With
    ``is_copy`` no memory is shared with the gradients: autograd may have given the same tensor to two parameters.
    """
    home, together = leaves[0].device, len(replicas) > 1 and not torch.is_grad_enabled()
    places: list[int] = []
    sums: Gradients = {}
    for place in range(len(leaves)):
        present = [gradients[place] for gradients in replicas if place in gradients]
        if together and len(present) == len(replicas) and all(map(_is_dense, present)):
            places.append(place)
        elif present:
            total = functools.reduce(torch.add, [move(gradient, home) for gradient in present])
            sums[place] = total.clone() if is_copy and total is present[0] else total
    if not places:
        return lambda: sums
    layouts = [transport.layout_of(leaves[place]) for place in places]
    flat = [transport.pack(layouts, [gradients[place] for place in places]) for gradients in replicas]
    result = torch.empty_like(flat[0], device=home)

    def compute() -> Gradients:
        transport.reduce(flat, result)
        return sums | dict(zip(places, transport.unpack(layouts, result), strict=True))

    return compute


def _merged(fresh: Gradients, before: Gradients) -> Gradients:
    """Returns elementwise sums. No argument is changed."""
    both = [*(fresh.keys() & before.keys())]
    totals = foreach_add([before[place] for place in both], [fresh[place] for place in both])
    return before | fresh | dict(zip(both, totals, strict=True))


def _is_dense(tensor: Tensor) -> bool:
    return bool(tensor.layout == torch.strided)


class Schedule(NamedTuple):
    """Settings of one forward for its own backward."""

    streams: Streams  # The replicas run on these.
    side: SideStreams | None  # Sums overlap with the backward there. None if devices have no streams.
    overlaps: bool  # the backward of other layers follows
    deferred: bool  # gradients stay with the replicas


# The buckets of all modules of the process. Two modules may share a parameter, and neither knows the other.
_buckets: "weakref.WeakValueDictionary[int, Bucket]" = weakref.WeakValueDictionary()


class Bucket:
    """Parameters whose gradients are summed together: of one dtype, on one device, all with ``requires_grad``."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.owners: BucketOwners | None = None  # receive the gradients in place of the parameters' ``grad``
        self.held: dict[torch.device, Gradients] = {}  # Gradients of the other replicas that are not reduced yet.
        self._local: dict[int, weakref.ref[Tensor]] = {}  # The ``grad`` that others wait for, by place of the parameter.
        self._lock = threading.RLock()  # backwards may run in several threads
        _buckets[id(self)] = self

    def own(self, owners: "BucketOwners | None" = None) -> None:
        """Gives the gradients to ``owners``, or to the parameters again."""
        self.owners = owners

    def broadcast(self, replicas: Sequence[Sequence[Tensor]], schedule: Schedule) -> list[tuple[Tensor, ...]]:
        """Returns aliases of ``replicas[r][i]``, the values of parameter ``i`` for replica ``r``, connected to the parameters."""
        size = len(self.parameters)
        aliases = _Broadcast.apply(self, replicas, schedule, *self.parameters)
        run_first(aliases[0].grad_fn)  # reduces as soon as all replicas have their gradients
        parts = [aliases[start : start + size] for start in range(0, len(aliases), size)]
        for i in range(len(parts)) if schedule.side is not None else ():
            parts[i] = _Receive.apply(*parts[i])
            run_first(parts[i][0].grad_fn)
        return parts

    def collect(self, replicas: list[Gradients], wanted: Sequence[bool | None], schedule: Schedule) -> Gradients:
        """Takes over the gradients of all replicas. Returns those that autograd passes on to the parameters.

        ``wanted`` is True for a parameter whose gradient is accumulated, None if autograd passes it on (``torch.autograd.grad``,
        or a hook of the parameter), and False for neither.
        """
        passed_on, accumulated = (
            [{place: gradient for place, gradient in gradients.items() if wanted[place] is want} for gradients in replicas]
            for want in (None, True)
        )
        returned = prepare_sums(self.parameters, passed_on)()
        self._hold(dict(zip(schedule.streams, accumulated, strict=True)), schedule.deferred)
        if schedule.deferred:
            if schedule.side is not None:
                schedule.side.expect(schedule.streams, schedule.streams, [])
            return returned
        reduction = self._prepare(takes_local=False)
        if schedule.side is not None and schedule.overlaps:
            with schedule.side.entered(schedule.streams, [reduction]):
                reduction()
        else:
            reduction()
        if self._local and self.owners is not None:
            # grad has the part of the first replica, and in a backward may have another bucket's
            run_after_backward(functools.partial(self._reduce_behind, schedule.side))
        return returned

    def _reduce_behind(self, side: SideStreams | None) -> None:
        """Reduces behind the sums of other modules, which may share a parameter and end on their side streams."""
        if side is not None:
            side.begin()
        self.reduce()

    def reduce(self) -> None:
        """Sums the gradients that the replicas hold into the parameters' ``grad``, or to the owners, which take ``grad`` away.

        Buckets of other modules that wait for a ``grad`` that the owners take come first.
        """
        if self._local and self.owners is not None:
            owned = set(map(id, self.parameters))
            for bucket in filter(None, (reference() for reference in _buckets.valuerefs())):
                if bucket.held and bucket.owners is None and not owned.isdisjoint(map(id, bucket.parameters)):
                    bucket.reduce()
        self._prepare(takes_local=True)()

    @torch.no_grad()
    def _prepare(self, *, takes_local: bool) -> Callable[[], None]:
        """Returns a function that reduces the gradients that the replicas hold now, into memory of the current streams.

        With ``takes_local``, ``grad`` counts as one of the first replica: not in a backward, where buckets may share a parameter.
        """
        with self._lock:
            self._drop_discarded()
            grads = {place: self.parameters[place].grad for place in self._local} if takes_local else {}
            local = {place: gradient for place, gradient in grads.items() if gradient is not None}
            held, self.held = self.held, {}
            if takes_local or self.owners is None:
                self._local = {}
        if local:
            held = {self._home: {}, **held}  # the first replica comes first
            held[self._home] = _merged(local, held[self._home])
        if not held:
            return lambda: None
        if self.owners is not None:
            for place in local:
                self.parameters[place].grad = None
            return self.owners.take(list(held.values()))
        compute = prepare_sums(self.parameters, list(held.values()), is_copy=True)

        @torch.no_grad()
        def add_sums() -> None:
            totals = compute()
            for place, before in local.items():
                before.copy_(totals.pop(place))
            accumulate(self.parameters, totals)

        return add_sums

    def drop(self) -> None:
        """Forgets the gradients that the replicas and the owners hold."""
        with self._lock:
            self.held, self._local = {}, {}
            for piece in () if self.owners is None else self.owners.pieces:
                piece.values.grad = None

    @property
    def _home(self) -> torch.device:
        return self.parameters[0].device

    @torch.no_grad()
    def _hold(self, replicas: dict[torch.device, Gradients], deferred: bool) -> None:
        with self._lock:
            self._drop_discarded()
            if deferred:
                accumulate(self.parameters, replicas.pop(self._home, {}), is_copy=True)
            for device, gradients in replicas.items():
                self.held[device] = _merged(gradients, self.held.get(device, {}))
            for place, parameter in enumerate(self.parameters) if deferred else ():
                local = parameter.grad
                waiting = next((gradients[place] for gradients in self.held.values() if place in gradients), None)
                if local is None and waiting is not None:  # the first replica has none
                    local = torch.zeros_like(waiting, device=self._home)
                    parameter.grad = local
                if local is not None:
                    self._local[place] = weakref.ref(local)

    def _drop_discarded(self) -> None:
        """Forgets waiting gradients of parameters whose ``grad`` was cleared or set. Autograd sets one if it creates a graph."""
        for place, before in list(self._local.items()):
            gradient = self.parameters[place].grad
            if gradient is None or (gradient is not before() and gradient.grad_fn is None):
                del self._local[place]
                for gradients in self.held.values():
                    gradients.pop(place, None)


class _Broadcast(torch.autograd.Function):
    """Broadcasts a bucket in the forward, and reduces its gradients in the backward, as the schedule of the forward says."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, replicas: Any, schedule: Schedule, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.schedule, ctx.size = bucket, schedule, len(parameters)
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for replica in replicas for tensor in replica])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        schedule: Schedule = ctx.schedule
        runs = [gradients[start : start + ctx.size] for start in range(0, len(gradients), ctx.size)]
        replicas = [{place: gradient for place, gradient in enumerate(run) if gradient is not None} for run in runs]
        with on_streams(schedule.streams):
            if schedule.side is not None:
                schedule.side.begin()
            on_side_stream = schedule.side is not None and schedule.overlaps and not torch.is_grad_enabled()
            if not (schedule.deferred or bucket.owners or bucket.held or on_side_stream):  # autograd accumulates the sums
                return None, None, None, *map(prepare_sums(bucket.parameters, replicas)().get, range(ctx.size))
            nodes = [node for node, _ in ctx.next_functions]
            wanted = [  # a parameter without requires_grad has no node
                None if any(hooks_of(parameter)) else node is not None and will_run(node)
                for parameter, node in zip(bucket.parameters, nodes, strict=True)
            ]
            if schedule.side is not None and schedule.overlaps and bucket.owners is None:
                for node, want in zip(nodes, wanted, strict=True):
                    if want:
                        schedule.side.join_before(node)
            return None, None, None, *map(bucket.collect(replicas, wanted, schedule).get, range(ctx.size))


class _Receive(torch.autograd.Function):
    """Passes tensors of one device on. Its backward runs on the stream of its forward, behind the streams of the gradients."""

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

    def __init__(self, side: SideStreams | None = None) -> None:
        self.buckets: list[Bucket] = []
        self.side = side  # Sums overlap with the backward there. They are made on first use if devices have streams.

    @property
    def is_sharded(self) -> bool:
        """True if owners receive the gradients of at least one bucket."""
        return any(bucket.owners is not None for bucket in self.buckets)

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

    def rebuild(self, *groups: Sequence[nn.Parameter]) -> None:
        """Makes new buckets of those parameters in each of ``groups`` that require a gradient and have no owners."""
        self.reduce()
        sharded = [bucket for bucket in self.buckets if bucket.owners is not None]
        owned = {id(parameter) for bucket in sharded for parameter in bucket.parameters}
        learning = [[each for each in group if each.requires_grad and id(each) not in owned] for group in groups]
        self.buckets = [*sharded, *(bucket for group in learning for bucket in make_buckets(group))]

    def schedule(self, bucket: Bucket, streams: Streams, *, deferred: bool) -> Schedule:
        """Returns the schedule of a bucket's backward, for a forward on ``streams``."""
        if self.side is None and any(streams.values()):
            self.side = SideStreams()
        return Schedule(streams, self.side, bucket is not self.buckets[-1], deferred)


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Returns buckets of at most 25 MiB (or one parameter) and one dtype. The last parameters come first, as in the backward."""
    last_first = parameters[::-1]
    return [Bucket([last_first[i] for i in chunk]) for chunk in sorted(transport.chunks(last_first, BUCKET_BYTES))]


class Piece:
    """A run of one parameter's elements, the ``index``-th of a bucket, in the memory of the device that owns it.

    ``values`` is a leaf for the optimizer to update, flat if it is not the whole parameter. ``places`` are the same elements on
    all devices.
    """

    def __init__(
        self, parameter: nn.Parameter, index: int, run: slice, owner: torch.device, copies: Mapping[torch.device, Tensor]
    ) -> None:
        self.parameter, self.index, self.owner, self._run = parameter, index, owner, run
        self.is_whole = run.stop - run.start == parameter.numel()
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values = self.places[owner].detach().requires_grad_()

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this piece of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor.reshape(-1)[self._run]

    def add_gradient(self, gradient: Tensor) -> None:
        """Adds to the gradient of the values."""
        accumulate([self.values], {0: gradient.reshape(self.values.shape)})

    def repoint(self, copies: Mapping[torch.device, Tensor]) -> None:
        """Takes the memory of other copies of the parameter, which has moved."""
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values.data = self.places[self.owner]


class BucketOwners:
    """The pieces of one bucket, in the order of their owners, which are the devices in ``copies``, the copies of each parameter.

    ``owners`` are the devices of whole parameters, by number. Without them, each device owns as many bytes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[dict[torch.device, Tensor]],
        owners: Mapping[Tensor, int] | None = None,
    ) -> None:
        self._parameters = parameters
        self._devices = devices = list(copies[0])
        self.pieces: list[Piece] = []
        self._order = sorted(range(len(parameters)), key=lambda index: owners[parameters[index]] if owners else 0)
        share = -(-sum(parameter.numel() for parameter in parameters) // len(devices))  # collectives need equal sizes
        position = 0
        for index in self._order:
            parameter, copied = parameters[index], copies[index]
            splits = owners is None and all(copy.is_contiguous() for copy in copied.values())
            start, size = 0, parameter.numel()
            while True:
                owner = min(position // max(share, 1), len(devices) - 1) if owners is None else owners[parameter]
                stop = min(size, start + share * (owner + 1) - position) if splits else size
                self.pieces.append(Piece(parameter, index, slice(start, stop), devices[owner], copied))
                start, position = stop, position + stop - start
                if start == size:
                    break
        self._owned = [[piece for piece in self.pieces if piece.owner == device] for device in devices]
        self._is_cut = {piece.index for piece in self.pieces if not piece.is_whole}  # parameters of which no piece is the whole

    def take(self, replicas: Sequence[Gradients]) -> Callable[[], None]:
        """Allocates sums of the replicas' gradients on the owners. Returns a function that computes them."""
        chosen = [i for i in self._order if any(i in gradients for gradients in replicas)]
        if not chosen:
            return lambda: None
        learned = set(chosen)
        pieces = [[piece for piece in owned if piece.index in learned] for owned in self._owned]
        sizes = _sizes(pieces, len(chosen))
        layouts = [self._layout(i) for i in chosen]
        flat = []
        for gradients in filter(None, replicas):
            dense = {i: check_dense(gradient) for i, gradient in gradients.items()}
            like = next(iter(dense.values()))
            missing = {i: like.new_zeros(layout.shape) for i, layout in zip(chosen, layouts, strict=True) if i not in dense}
            flat.append(transport.pack(layouts, [*map((dense | missing).__getitem__, chosen)], sum(sizes)))
        sums = [flat[0].new_empty(size, device=device) for device, size in zip(self._devices, sizes, strict=True)]

        def compute() -> None:
            transport.reduce_scatter(flat, sums)
            for owned, total in zip(pieces, sums, strict=True):
                for piece, gradient in zip(owned, transport.unpack(self._layouts(owned), total), strict=True):
                    piece.add_gradient(gradient)

        return compute

    @torch.no_grad()
    def fetch(self) -> None:
        """Copies the values of the module's own parameters to the owners, each the pieces that it owns."""
        for owned, device in zip(self._owned[1:], self._devices[1:], strict=True):
            transport.copy_coalesced([[piece.places[device] for piece in owned]], [p.places[self._devices[0]] for p in owned])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        sizes = _sizes(self._owned, len(self._parameters))
        places = [[piece.places[device] for piece in self.pieces] for device in self._devices]
        if len(self._parameters) == 1 and all(place.is_contiguous() for row in places for place in row):
            whole = [row[0].as_strided((sum(sizes),), (1,)) for row in places]
            transport.all_gather(whole, sizes)
            torch.autograd.graph.increment_version([place for row in places for place in row])
            return
        gathered = [row[0].new_empty(sum(sizes)) for row in places]
        for number, owned in enumerate(self._owned):
            targets = transport.unpack(self._layouts(owned), gathered[number].split(sizes)[number])
            torch_private.foreach_copy_(targets, [piece.values for piece in owned])
        transport.all_gather(gathered, sizes)
        for device, row, flat in zip(self._devices, places, gathered, strict=True):
            unpacked = transport.unpack(self._layouts(self.pieces), flat)
            others = [i for i, piece in enumerate(self.pieces) if piece.owner != device]
            torch_private.foreach_copy_([row[i] for i in others], [unpacked[i] for i in others])

    def _layout(self, index: int) -> transport.MemoryLayout:
        parameter = self._parameters[index]
        return transport.MemoryLayout(parameter.shape) if index in self._is_cut else transport.layout_of(parameter)

    def _layouts(self, pieces: Sequence[Piece]) -> list[transport.MemoryLayout]:
        return [self._layout(p.index) if p.is_whole else transport.MemoryLayout(p.values.shape) for p in pieces]


def _sizes(pieces: Sequence[Sequence[Piece]], parameters: int) -> list[int]:
    """Returns the number of elements on each owner: equal numbers if padding suffices. A single parameter is not padded."""
    owned = [sum(piece.values.numel() for piece in run) for run in pieces]
    total, count = sum(owned), len(owned)
    share = -(-total // count)
    even = [max(0, min(share, total - share * number)) for number in range(count)]
    return [share] * count if owned == even and (parameters > 1 or total == share * count) else owned


def check_dense(gradient: Tensor) -> Tensor:
    """Returns the gradient. Raises ``TypeError`` if it is sparse."""
    if not _is_dense(gradient):
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer sends gradients to their owners; set sparse=False in "
            "the embedding, or use a plain optimizer"
        )
    return gradient
