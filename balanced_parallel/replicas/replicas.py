"""Replicas of a module that live between steps, and follow every change of the module.

torch's ``replicate`` refuses CPUs, builds every replica again at each forward, and its replicas
have no parameters (pytorch#40457, #36035). Here they are aliases of persistent copies on the
device, connected to the parameters of the module by one autograd function per bucket.

torch's version counters do not see every write: ``.data`` has a counter of its own, and fused
optimizers move none. So every forward compares the sums of the bits of parameters that keep their
values, and copies the others again. Only in a *window*, a block that promises to write no
parameters, the first one does so for all::

    forward         compares    with window(model):               compares
    write by .data                  forward of micro-batch 0
    forward         compares        forward of micro-batch 1      -
                                    optimizer.step()              -
"""

import contextvars
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import transport
from ..runtime.devices import NO_BLOCK, Devices, on_device
from ..runtime.streams import SideStreams, current_streams
from ..runtime.torch_private import (
    ParameterState,
    graphs_for,
    mark_as_parameters,
    parameter_states,
    versions,
)
from .buckets import Bucket, GradientBuckets, kinds_of
from .module_tree import ModuleTree, Skeletons, check_device, refuse_rescaled
from .recorded import NotedSums, Refresh, check_refresh
from .workers import T, Workers, run_in_turn, run_replicas

# Replicas whose forward has called the code that runs here. Workers carry it.
_running: contextvars.ContextVar[tuple["Replicas", ...]] = contextvars.ContextVar(
    "running", default=()
)


class Replicas:
    """The replicas of one module: its tree of submodules, copies of its parameters, and its
    gradient buckets.

    The first replica is the module itself, so writes to its buffers and attributes stay. The other
    replicas have copies of the buffers: writes to them are lost, and an error if they differ.
    Replicas on one device share the values of the parameters, and must not write to them.

    ``workers`` runs the replicas of a forward. ``None`` is :func:`run_replicas`. ``bucket_bytes``
    is the size of a bucket of gradients.
    """

    def __init__(
        self,
        refresh: Refresh = "always",
        *,
        side: SideStreams | None = None,
        workers: Workers | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        check_refresh(refresh)
        self._refresh = refresh
        self.has_sums = refresh == "recorded"  # They show the writes that torch does not record.
        self._sums = NotedSums()
        self._workers = workers or run_replicas
        self.tree: ModuleTree | None = None
        self.copies = ParameterCopies()
        self.gradients = GradientBuckets(side, bucket_bytes)
        self._skeletons: list[Skeletons] = []
        # The state of each compiled replica in this forward. The module itself has an empty one.
        self._turns: list[Skeletons] = []
        self._lock = threading.Lock()
        self.windows: list[Window] = []  # These are open. The outermost is the first.
        self._fresh_in: Window | None = None  # The window that has copied all values.
        self._forwards = 0  # Forwards with several replicas of this tree

    def __reduce__(self) -> Any:  # a copy of the model makes replicas of its own
        return Replicas, (self._refresh,)

    def run(self, work: Sequence[Callable[[], T]], devices: Devices, *, together: bool) -> list[T]:
        """Calls ``work[i]()`` for replica ``i`` on ``devices[i]``, as :func:`run_replicas`.

        One replica runs in this thread.
        """
        if self.tree is not None and self.tree.is_compiled:
            return self._run_in_turn(self.tree, work, devices, together)
        if len(work) > 1:
            return self._workers(work, devices, together=together)
        try:
            with on_device(devices[0], None):  # The stream is that of the thread.
                return [work[0]()]
        except BaseException as error:
            error.add_note(f"in replica 0 on device {devices[0]}")
            raise

    @contextmanager
    def of(
        self, module: nn.Module, devices: Devices, home: torch.device
    ) -> Iterator[list[nn.Module]]:
        """Yields one replica of ``module``, which is on ``home``, for each of ``devices``.

        The first may be the module itself.
        """
        modules = [module] if devices[0] == home else []
        others = devices[len(modules) :]
        with self.in_turn() if others or self.tree is not None else NO_BLOCK:
            try:
                if not others:
                    yield modules
                    return
                tree = self._follow(module, [home, *others])
                tensors = self._connected_parameters(tree, list(dict.fromkeys(devices)))
                # buffers every time: batch norm writes to its statistics without torch's version
                # counter
                buffers = copy_buffers(tree.buffers(home), others)
                modules += map(tree.fill, self._skeletons, map(tensors.get, others), buffers)
                self._copy_changed(tree)
                self._fresh_in = next(iter(self.windows), None)
                if tree.is_compiled:
                    self._turns = [
                        *[[]] * (len(modules) - len(others)),
                        *self._skeletons[: len(others)],
                    ]
                    modules[:] = [tree.modules[0]] * len(modules)
                shared = [
                    self.copies.by_device.get(device, tree.parameters)
                    for device in {*devices}
                    if devices.count(device) > 1
                ]
                before = [*map(versions, shared)]
                with self._comparing(len(others)):
                    is_replaced = home in tensors
                    with tree.parameters_replaced(tensors[home]) if is_replaced else NO_BLOCK:
                        yield modules
                    # rows that are rescaled twice stay the same
                    if before != [*map(versions, shared)] and not tree.rescaled:
                        raise RuntimeError(
                            "the forward wrote to a parameter that several replicas on one device share, so each of them wrote "
                            "to it: expected one replica per device, or a write outside of forward, after the update"
                        )
            except RuntimeError:
                check_device(module, home)  # raises an error that names the cause
                raise
            finally:
                self._turns = []

    def _comparing(self, others: int) -> AbstractContextManager[object]:
        """Returns a block for the 1st, 2nd, 4th, 8th, ... forward, which must leave the same state in
        all replicas.
        """
        self._forwards += 1
        is_due = not self._forwards & (self._forwards - 1)
        if not is_due or True in [entry.states_differ for entry in self.windows]:
            return NO_BLOCK
        assert self.tree is not None
        return self.tree.same_state(self._skeletons[:others], is_first=self._forwards == 1)

    def forget_values(self) -> None:
        """Marks every copy as outdated."""
        self._fresh_in = None
        self.copies.forget_values()

    def prepare(
        self, module: nn.Module, devices: Devices, wanted: Collection[Tensor] | None = None
    ) -> ModuleTree:
        """Returns the tree, with skeletons, and with copies that have all recorded writes, and all
        values of ``wanted``. None are all parameters.
        """
        with self.in_turn():
            tree = self._follow(module, devices, wanted)
            self._copy_changed(tree)
            return tree

    def _copy_changed(self, tree: ModuleTree) -> None:
        """Copies the parameters whose sums have changed. The host waits for the sums."""
        if self._sums.read_changed is not None:
            self.copies.refresh(tree.parameters, (), self._sums.read_changed())

    def shard(
        self, module: nn.Module, devices: Devices, parameters: Sequence[Tensor]
    ) -> list[tuple[Bucket, list[dict[torch.device, Tensor]]]]:
        """Makes buckets for ``parameters`` that need owners.

        Returns them, with the copies by device of their parameters.
        """
        tree = self.prepare(module, devices)
        owned = set(map(id, parameters))
        chosen = [parameter for parameter in tree.parameters if id(parameter) in owned]
        others = [parameter for parameter in tree.parameters if id(parameter) not in owned]
        buckets, _ = self.gradients.rebuild(chosen, others)
        return [
            (bucket, [self._everywhere(tree, each) for each in bucket.parameters])
            for bucket in buckets
        ]

    @contextmanager
    def publishing(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Surrounds a block that writes new values to ``parameters`` and to all their copies."""
        with self.in_turn():
            tree = self.tree
            if tree is None or not (self.has_sums and parameters):
                yield
                return
            places = {tree.place[id(parameter)] for parameter in parameters}
            self._sums.forget(places)
            with self.copies.rewritten(tree.parameters, places):
                yield
            self._sums.note(tree.parameters, places)

    def _everywhere(self, tree: ModuleTree, parameter: nn.Parameter) -> dict[torch.device, Tensor]:
        """Returns a parameter and its copies, by device."""
        place = tree.place[id(parameter)]
        copies = {device: tensors[place] for device, tensors in self.copies.by_device.items()}
        return {parameter.device: parameter, **copies}

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Makes other threads wait: skeletons, and parameters that are replaced, belong to one
        forward.
        """
        running = _running.get()
        if self in running:
            raise RuntimeError(
                "a model was called inside of its own forward, expected one at a time: call the module itself"
            )
        with self._lock:
            token = _running.set((*running, self))
            try:
                yield
            finally:
                _running.reset(token)

    def _follow(
        self, module: nn.Module, devices: Devices, wanted: Collection[Tensor] | None = None
    ) -> ModuleTree:
        """Returns the tree. The copies of ``wanted``, or of all parameters, have their values after
        :meth:`_copy_changed`.
        """
        tree = self.tree
        if tree is None or not tree.still_is(module):
            tree = ModuleTree(module)
            before = self.tree
            if before is None or before.place != tree.place:
                self._refuse_sharded()
                self.gradients.rebuild()
                self.copies = ParameterCopies()
                self._sums = NotedSums()
                self._fresh_in = None
            self.tree = tree
            self._skeletons = []
            self._forwards = 0
        if tree.parameters and len(set(devices)) > 1:
            self._follow_parameters(tree, devices, tree.parameters if wanted is None else wanted)
        while len(self._skeletons) < len(devices) - 1:
            self._skeletons.append(tree.make_skeletons())
        return tree

    def _follow_parameters(
        self, tree: ModuleTree, devices: Devices, wanted: Collection[Tensor]
    ) -> None:
        copies = self.copies
        parameters = tree.parameters
        try:
            written, toggled, is_moved = copies.find_changes(parameters)
            if is_moved or toggled:
                check_device(tree.modules[0], devices[0])
                self._follow_buckets(tree)
            places = self._places_to_copy(tree, {*written, *toggled}, wanted)
            copies.refresh(parameters, written, places)
            is_moved |= copies.extend_to(devices[1:], parameters)
        except BaseException:  # Some devices have the new values if, for example, memory runs out.
            self.forget_values()
            raise
        if not (is_moved or toggled):
            return
        for each in copies.by_device.values():
            if is_moved:
                tree.flatten_weights(each)
            for copied, parameter in zip(each, parameters, strict=True):
                # a forward under no_grad may ask for gradients
                copied.requires_grad_(parameter.requires_grad)
        for piece in self.gradients.pieces:
            piece.repoint(self._everywhere(tree, piece.parameter()))

    def _places_to_copy(
        self, tree: ModuleTree, changed: set[int], wanted: Collection[Tensor]
    ) -> list[int]:
        """Returns the places of the parameters that are copied now. ``changed`` are recorded.

        Those of ``wanted`` that have sums may be copied by :meth:`_copy_changed`.
        """
        places = changed.copy()
        if self._fresh_in not in self.windows:
            places |= {tree.place[id(parameter)] for parameter in wanted}
        if self.has_sums and places:
            kinds = self._kinds_with_sums(tree)
            if self._sums.groups:
                places = self._sums.compare(tree.parameters, changed, places, kinds)
            if any(kinds):
                self._sums.note(tree.parameters, *[kind & places for kind in kinds])
        return sorted(places)

    def _kinds_with_sums(self, tree: ModuleTree) -> list[set[int]]:
        """Returns the places of the parameters that keep their values until a write: those with
        owners, and those that are not trained.
        """
        owned = {
            tree.place[key]
            for bucket in self.gradients.buckets
            if bucket.owners is not None
            for key in bucket.kinds
        }
        is_training = torch.is_grad_enabled()
        others = {
            place
            for place, parameter in enumerate(tree.parameters)
            if not (is_training and parameter.requires_grad)
        }
        return [owned, others - owned]

    def _follow_buckets(self, tree: ModuleTree) -> None:
        """Makes new buckets where parameters were frozen, unfrozen, resized or converted."""
        before = self.gradients.kinds
        present = kinds_of(tree.parameters)
        trained = kinds_of(parameter for parameter in tree.parameters if parameter.requires_grad)
        if not self.gradients.is_sharded:
            if before != trained:
                self.gradients.rebuild(tree.parameters)
                self._skeletons = []  # They have graphs of the parameters before.
        elif not trained.keys() <= before.keys() or any(
            present[key] != kind for key, kind in before.items()
        ):
            self.forget_values()  # the next forward is refused too
            self._refuse_sharded()

    def _run_in_turn(
        self, tree: ModuleTree, work: Sequence[Callable[[], T]], devices: Devices, together: bool
    ) -> list[T]:
        """Runs compiled replicas one after the other in the calling thread, as the compiler needs
        it (pytorch#118260).
        """
        if together and len(work) > 1:
            raise TypeError(
                "the module is compiled, and its batch norm over all rows or SumOverRows needs all replicas at the same time, "
                "expected one of the two: leave out torch.compile, or convert_sync_batchnorm and SumOverRows"
            )
        if (
            len(set(devices)) > 1
            and torch.is_grad_enabled()
            and True not in [entry.in_step for entry in self.windows]
        ):
            raise RuntimeError(
                f"the module is compiled, and was called by hand on {len(set(devices))} devices, where compiled backwards fail "
                "in autograd's threads, expected TrainStep(model, criterion, optimizer), which runs them in one thread, or "
                "a process for each device, as torchrun starts it, or torch.no_grad() around the call"
            )

        def call(run: Callable[[], T], skeletons: Skeletons) -> T:
            with tree.state_of(skeletons):
                return run()

        turns = zip(work, self._turns or [[]] * len(work), strict=True)
        with graphs_for(1 + len(self.copies.by_device)):
            return run_in_turn([functools.partial(call, *turn) for turn in turns], devices, None)

    def _refuse_sharded(self) -> None:
        if self.gradients.is_sharded:
            raise RuntimeError(
                "the module has other parameters than when its BalancedOptimizer was made (added, removed, replaced, resized, "
                "converted or unfrozen): make a new one, after the old one was deleted"
            )

    def _connected_parameters(
        self, tree: ModuleTree, places: list[torch.device]
    ) -> dict[torch.device, list[Tensor]]:
        """Returns the tensors of each device, in the order of the tree's parameters, connected to
        them by the buckets.

        Empty if all devices are the module's own: the engine has one thread per device, which adds
        up gradients in order.
        """
        if not tree.parameters or (len(places) == 1 and places[0] not in self.copies.by_device):
            return {}
        tensors = {place: [*self.copies.by_device.get(place, tree.parameters)] for place in places}
        if not torch.is_grad_enabled():
            return tensors
        refuse_rescaled(tree.embeddings)
        streams = current_streams(places)
        deferred = True in [entry.deferred for entry in self.windows]
        for bucket in self.gradients.buckets:
            at = [tree.place[id(parameter)] for parameter in bucket.parameters]
            replicas = [[tensors[place][i] for i in at] for place in places]
            schedule = self.gradients.schedule(bucket, streams, deferred=deferred)
            for place, aliases in zip(places, bucket.broadcast(replicas, schedule), strict=True):
                mark_as_parameters(aliases)
                for i, alias in zip(at, aliases, strict=True):
                    tensors[place][i] = alias
        return tensors


@dataclass(eq=False)
class Window:
    """A block in which replicas stay as they are.

    ``deferred`` keeps gradients there; ``in_step``, a step runs all backwards; ``states_differ``,
    the caller compares the state that forwards write.
    """

    deferred: bool
    in_step: bool
    states_differ: bool


@contextmanager
def window(
    *modules: object, deferred: bool = False, in_step: bool = False, states_differ: bool = False
) -> Iterator[None]:
    """Promises that the parameters are written to in ways that torch's version counters record, or
    not at all.

    In this block replicas of ``modules`` are refreshed by the first forward, and after writes that
    the counters record. With ``deferred``, gradients stay with the replicas. ``in_step`` promises
    that backwards of compiled replicas run in this thread. With ``states_differ``, replicas may
    leave other values in buffers.
    """
    replicas = [
        each
        for module in modules
        if isinstance(each := getattr(module, "replicas", None), Replicas)
    ]
    entry = Window(deferred, in_step, states_differ)
    for each in replicas:
        each.windows.append(entry)
    try:
        yield
    finally:
        for each in replicas:
            each.windows.remove(entry)


_UNKNOWN = (0, 0, torch.Size([-1]), torch.float32, False)  # state of a parameter


class ParameterCopies:
    """Copies of parameters, one list per device, in the order of the parameters."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, list[Tensor]] = {}
        self.forget_values()

    def forget_values(self) -> None:
        """Marks every copy as outdated."""
        self._states: list[ParameterState] = []

    def find_changes(self, parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[int], bool]:
        """Returns the places of the parameters that torch saw written, and of those that were
        frozen or unfrozen.

        It also returns if any was moved, resized or converted.
        """
        before = self._states
        self._states = parameter_states(parameters)
        if before == self._states:
            return [], [], False
        pairs = list(itertools.zip_longest(self._states, before, fillvalue=_UNKNOWN))
        written = [place for place, (now, then) in enumerate(pairs) if now[:4] != then[:4]]
        toggled = [place for place, (now, then) in enumerate(pairs) if now[4] != then[4]]
        is_moved = any(now[1:4] != then[1:4] for now, then in pairs)
        return written, toggled, is_moved

    @contextmanager
    def rewritten(self, parameters: Sequence[nn.Parameter], places: set[int]) -> Iterator[None]:
        """Surrounds a block that writes to the parameters at ``places`` and to their copies."""
        before = self._states
        self.forget_values()  # The block may fail.
        yield
        after = parameter_states(parameters)
        self._states = [after[i] if i in places else state for i, state in enumerate(before)]

    @torch.no_grad()
    def refresh(
        self,
        parameters: Sequence[nn.Parameter],
        written: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """Copies the parameters at ``places`` to all devices.

        Only the version counters of the copies at ``written`` move: a graph of an earlier forward
        may still run backward.
        """
        self.by_device.pop(parameters[0].device, None)
        if not (self.by_device and places):
            return
        recorded = set(written)
        targets = []
        for device, copies in self.by_device.items():
            for i in written:
                if copies[i].shape != parameters[i].shape or copies[i].dtype != parameters[i].dtype:
                    copies[i] = torch.empty_like(parameters[i], device=device)
            targets.append([copies[i] if i in recorded else copies[i].data for i in places])
        transport.copy_coalesced(targets, [parameters[i].detach() for i in places])

    def extend_to(self, devices: Devices, parameters: Sequence[nn.Parameter]) -> bool:
        """Makes copies on those of ``devices`` that have none.

        Returns True if there are such devices.
        """
        missing = {*devices} - {parameters[0].device, *self.by_device}
        if not missing:
            return False
        with torch.inference_mode(False), torch.no_grad():
            copies = {
                device: [torch.empty_like(each, device=device) for each in parameters]
                for device in dict.fromkeys(devices)
                if device in missing
            }
            # each by itself: buffers would need more memory than the copies
            transport.copy_coalesced(
                list(copies.values()),
                [parameter.detach() for parameter in parameters],
                buffer_bytes=0,
            )
        self.by_device |= copies
        return True


def copy_buffers(buffers: Sequence[Tensor], devices: Devices) -> list[dict[int, Tensor]]:
    """Returns copies of all buffers for each of ``devices``, by the id of the buffer."""
    if not buffers:
        return [{}] * len(devices)
    # A trained buffer is copied with a graph, which brings it the gradients of all replicas.
    plain = {
        id(each): each.detach()
        for each in buffers
        if each.layout == torch.strided and not (each.requires_grad or each.is_quantized)
    }
    others = [each for each in buffers if id(each) not in plain]
    copied = transport.copies([*plain.values()], devices, transport.BUFFER_BYTES)
    return [
        dict(zip(plain, tensors, strict=True))
        | {id(each): each.to(device, copy=True) for each in others}
        for device, tensors in zip(devices, copied, strict=True)
    ]
