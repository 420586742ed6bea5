"""Replicas of a module that live between steps, and follow every change of the module.

torch's ``replicate`` refuses CPUs, builds every replica again at each forward, and its replicas have no parameters
(``next(self.parameters())`` raises, pytorch#40457, ``ParameterList`` is empty, #36035). Here the parameters of a replica are
aliases of persistent copies on its device, connected to the parameters of the module by one autograd function per bucket.

torch's version counters do not see every write: ``.data`` has a counter of its own, and fused optimizers move none. So every
forward copies the values again, in one broadcast. Only in a *window*, a block that promises to write no parameters, the first
forward does so for all::

    forward         copies    with window(model):               copies
    write by .data                forward of micro-batch 0
    forward         copies        forward of micro-batch 1      -
                                  optimizer.step()              -
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import transport
from ..runtime.streams import SideStreams, current_streams
from ..runtime.torch_private import mark_as_parameter, versions
from .buckets import GradientBuckets, Owners
from .module_tree import ModuleTree, RNNWeights, Skeletons, check_device, refuse_rescaled
from .workers import Workers, run_replicas, shared_pool

__all__: list[str] = []


# Replicas whose forward has called the code that runs here. Workers carry it.
_running: contextvars.ContextVar[tuple["Replicas", ...]] = contextvars.ContextVar("running", default=())
MakeOwners = Callable[[Sequence[nn.Parameter], Sequence[dict[torch.device, Tensor]]], Owners]


class Replicas:
    """The replicas of one module: its tree of submodules, copies of its parameters, and its gradient buckets.

    The first replica is the module itself, so writes to its buffers and attributes stay. If the module's device gets no rows, the
    buffers of the first replica are copied back. The other replicas have copies of the buffers: writes to them are lost, as in
    ``nn.DataParallel``. Replicas on one device share the values of the parameters.

    Args:
        side: streams for sums that overlap with the backward; made on first use where devices have streams.
        workers: runs the replicas of a forward; ``None`` runs them in the threads of :func:`shared_pool`.
    """

    def __init__(self, *, side: SideStreams | None = None, workers: Workers | None = None) -> None:
        self.workers = workers or functools.partial(run_replicas, pool=functools.cache(shared_pool))  # kept from its first use on
        self.tree: ModuleTree | None = None
        self.copies = ParameterCopies()
        self.gradients = GradientBuckets(side)
        self._skeletons: list[Skeletons] = []
        self._rnns = RNNWeights((), {})
        self._lock = threading.Lock()
        self._windows = 0  # that are open

    def __reduce__(self) -> Any:  # a copy of the model makes replicas of its own
        return Replicas, ()

    @contextmanager
    def of(self, module: nn.Module, devices: Sequence[torch.device], home: torch.device) -> Iterator[list[nn.Module]]:
        """Yields one replica of ``module`` for each of ``devices``, for one forward.

        Args:
            module: all on ``home``; the first replica is the module itself if this is the first of the devices.

        Raises:
            ValueError: a parameter or buffer is not on ``home``, or is not initialised (lazy modules); or a trained embedding has
                ``max_norm``, on several devices.
            TypeError: the module is a ``ScriptModule``, which cannot be copied part by part; or it was compiled.
            RuntimeError: the module is running already, further up among the callers.
        """
        modules = [module] if devices[0] == home else []
        others = devices[len(modules) :]
        if not others:
            with nullcontext() if self.tree is None else self.in_turn():
                try:
                    yield modules
                except RuntimeError:
                    check_device(module, home)  # raises an error that names the cause
                    raise
            return
        with self.in_turn():
            tree = self._follow(module, [home, *others])
            if tree.rescaled and torch.is_grad_enabled() and any(device != home for device in others):
                refuse_rescaled(tree.rescaled)
            tensors = self._connected_parameters(tree, [*([home] if modules else []), *others])
            # buffers every time: batch norm writes to its statistics without torch's version counter
            buffers = copy_buffers(tree.buffers(), others)
            for skeletons, device, copied in zip(self._skeletons, others, buffers, strict=False):
                modules.append(tree.fill(skeletons, tensors.get(device), copied))
            with tree.parameters_replaced(tensors[home]) if home in tensors else nullcontext():
                yield modules
            if devices[0] != home:
                tree.take_buffers(self._skeletons[0])

    @contextmanager
    def window(self) -> Iterator[None]:
        """Promises that the parameters are written to in ways that torch's version counters record, or not at all.

        In this block the copies are refreshed by the first forward, and after writes that the counters record.
        """
        self._windows += 1
        try:
            yield
        finally:
            self._windows -= 1
            self.copies.are_fresh = self.copies.are_fresh and self._windows > 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Opens a window, in which gradients stay with the replicas."""
        with self.window(), self.gradients.no_sync():
            yield

    def prepare(self, module: nn.Module, devices: Sequence[torch.device]) -> ModuleTree:
        """Brings skeletons and copies up to date with the module, and returns its tree."""
        with self.in_turn():
            return self._follow(module, devices)

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules under ``module``, each once, without another walk if they are known."""
        return list(module.modules()) if self.tree is None or self.tree.modules[0] is not module else self.tree.modules

    def shard(
        self, module: nn.Module, devices: Sequence[torch.device], parameters: Sequence[Tensor], make_owners: MakeOwners
    ) -> "Sharding":
        """Gives the gradients of some parameters owners, until the returned handle is closed.

        Args:
            module: the module, with its parameters on the first of ``devices``.
            devices: devices of the replicas.
            parameters: parameters to shard. Other parameters of the module keep their gradients.
            make_owners: called for each bucket with its parameters, and for each of them the copies by device.

        Raises:
            ValueError: the gradients have owners already.
        """
        if self.gradients.is_sharded:
            raise ValueError("the model has a BalancedOptimizer already, expected one: give it all param groups, or delete it")
        tree = self.prepare(module, devices)
        chosen = set(map(id, parameters))
        sharded = [parameter for parameter in tree.parameters if id(parameter) in chosen]
        self.gradients.rebuild(sharded, [parameter for parameter in tree.parameters if id(parameter) not in chosen])
        for bucket in self.gradients.buckets:
            if id(bucket.parameters[0]) in chosen:
                places = [tree.place[id(parameter)] for parameter in bucket.parameters]
                bucket.owners = make_owners(bucket.parameters, [self.copies.everywhere(tree.parameters, at) for at in places])
        self.gradients.is_sharded = True
        return Sharding(self.gradients)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Makes other threads wait: skeletons, and parameters that are replaced, belong to one forward."""
        running = _running.get()
        if any(replicas is self for replicas in running):
            raise RuntimeError(
                "a model was called inside of its own forward, expected one forward at a time: call the module itself there"
            )
        with self._lock:
            token = _running.set((*running, self))
            try:
                yield
            finally:
                _running.reset(token)

    def _follow(self, module: nn.Module, devices: Sequence[torch.device]) -> ModuleTree:
        tree = self.tree
        if tree is None or not tree.still_is(module) or not tree.has_the_same_shapes():
            tree = self._rebuild(module)
        while len(self._skeletons) < len(devices) - 1:
            self._skeletons.append(tree.make_skeletons())
        changes = self.copies.find_changes(tree.parameters)
        if changes.any:
            tree.check_device(devices[0])
            self._follow_buckets(tree, changes)
        self.copies.refresh(tree.parameters, changes.written)
        self.copies.extend_to([device for device in devices if device != devices[0]], tree.parameters)
        self.copies.are_fresh = self._windows > 0
        self._rnns.flatten(self.copies.by_device)
        if changes.moved and self.gradients.is_sharded:
            self.gradients.repoint({tree.parameters[i]: self.copies.everywhere(tree.parameters, i) for i in changes.moved})
        return tree

    def _rebuild(self, module: nn.Module) -> ModuleTree:
        before, tree = self.tree, ModuleTree(module)
        if before is None or not before.has_parameters_of(tree):
            self._refuse_sharded()
            self.gradients.rebuild()
            self.copies.forget()
        self.tree, self._skeletons, self._rnns = tree, [], RNNWeights(tree.modules, tree.place)
        return tree

    def _follow_buckets(self, tree: ModuleTree, changes: "Changes") -> None:
        """Makes new buckets where parameters were frozen, unfrozen or converted."""
        is_converted = any(tree.parameters[i].dtype != tree.dtypes[i] for i in changes.moved)
        if self.gradients.is_sharded:
            bucketed = {id(parameter) for bucket in self.gradients.buckets for parameter in bucket.parameters}
            if is_converted or any(parameter.requires_grad and id(parameter) not in bucketed for parameter in tree.parameters):
                self.copies.forget_values()  # the next forward is refused too
                self._refuse_sharded()
        elif is_converted or changes.learns or not self.gradients.buckets:
            tree.dtypes = [parameter.dtype for parameter in tree.parameters]
            self.gradients.rebuild(tree.parameters)

    def _refuse_sharded(self) -> None:
        if self.gradients.is_sharded:
            raise RuntimeError(
                "the module has other parameters than when its BalancedOptimizer was made (added, removed, replaced, resized, "
                "converted or unfrozen): make a new one, after the old one was deleted"
            )

    def _connected_parameters(self, tree: ModuleTree, devices: Sequence[torch.device]) -> dict[torch.device, list[Tensor]]:
        """Returns the tensors of each device, in the order of the tree's parameters, connected to them by the buckets.

        Empty if all devices are the module's own: the engine has one thread per device, which adds up gradients in order."""
        places = list(dict.fromkeys(devices))
        if not self.gradients.is_sharded and all(place not in self.copies.by_device for place in places):
            return {}
        tensors: dict[torch.device, list[Tensor]] = {
            place: [*self.copies.by_device.get(place, tree.parameters)] for place in places
        }
        for bucket, schedule in self.gradients.schedules(current_streams(places)) if torch.is_grad_enabled() else ():
            at = [tree.place[id(parameter)] for parameter in bucket.parameters]
            aliases = bucket.broadcast([[tensors[place][i] for i in at] for place in places], schedule)
            for place, of_place in zip(places, aliases, strict=True):
                for i, alias in zip(at, of_place, strict=True):
                    mark_as_parameter(alias)
                    tensors[place][i] = alias
        return tensors


class Sharding:
    """A handle on the owners that :meth:`Replicas.shard` gave to gradients."""

    def __init__(self, gradients: GradientBuckets) -> None:
        self._gradients = gradients

    def close(self) -> None:
        """Takes the owners away. Gradients go to the parameters again."""
        self._gradients.is_sharded = False
        for bucket in self._gradients.buckets:
            bucket.owners = None


@contextmanager
def parameter_window(*modules: Any) -> Iterator[None]:
    """Opens a :meth:`Replicas.window` of each of those modules that have replicas."""
    with ExitStack() as stack:
        for module in modules:
            replicas = getattr(module, "replicas", None)
            if isinstance(replicas, Replicas):
                stack.enter_context(replicas.window())
        yield


State = tuple[int, int, bool]  # address, version counter and requires_grad of a parameter when it was copied


class Changes(NamedTuple):
    """Places of the parameters that changed since the last look, as far as torch records it."""

    any: bool
    written: Sequence[int] = ()  # with the version counter, or moved
    moved: Sequence[int] = ()
    learns: bool = False  # True if requires_grad of any changed


class ParameterCopies:
    """Copies of parameters, one list per device, in the order of the parameters."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, list[Tensor]] = {}
        self.forget_values()

    def forget(self) -> None:
        """Drops all copies."""
        self.by_device.clear()
        self.forget_values()

    def forget_values(self) -> None:
        """Marks every copy as outdated."""
        self._states: list[State] = []
        self.are_fresh = False  # in the window that is open

    def find_changes(self, parameters: Sequence[nn.Parameter]) -> Changes:
        """Returns the changes since the last call."""
        learns = [parameter.requires_grad for parameter in parameters]
        addresses = [parameter.data_ptr() for parameter in parameters]
        states, before = list(zip(addresses, versions(parameters), learns, strict=True)), self._states
        if states and states == before:
            return Changes(False)
        self._states = states
        pairs = list(enumerate(zip(states, before or [(0, 0, False)] * len(states), strict=True)))
        written = [i for i, (now, then) in pairs if now[:2] != then[:2]]
        moved = [i for i, (now, then) in pairs if now[0] != then[0]]
        return Changes(True, written, moved, any(now[2] != then[2] for _, (now, then) in pairs))

    @torch.no_grad()
    def refresh(self, parameters: Sequence[nn.Parameter], written: Sequence[int]) -> None:
        """Copies the parameters to all devices: only those at ``written`` if the others are fresh in this window.

        The version counters of their copies move, as those of the parameters did. Other counters stand still, since a graph of an
        earlier forward may still run backward, with the values that there are by then.
        """
        for parameter in parameters[:1]:
            self.by_device.pop(parameter.device, None)
        places = written if self.are_fresh else range(len(parameters))
        if not (self.by_device and places):
            return
        recorded, targets = set(written), []
        try:
            for device, copies in self.by_device.items():
                for i in written:
                    if copies[i].shape != parameters[i].shape or copies[i].dtype != parameters[i].dtype:
                        copies[i] = _empty_copy(parameters[i], device)
                targets.append([copies[i] if i in recorded else copies[i].data for i in places])
            transport.copy_coalesced(targets, [parameters[i].detach() for i in places])
        except BaseException:  # for example, memory runs out: some devices have the new values
            self.forget_values()
            raise

    def extend_to(self, devices: Iterable[torch.device], parameters: Sequence[nn.Parameter]) -> None:
        """Makes copies on those of ``devices`` that have none."""
        missing = [device for device in dict.fromkeys(devices) if device not in self.by_device]
        if missing:
            with torch.inference_mode(False), torch.no_grad():
                copies = {device: [_empty_copy(parameter, device) for parameter in parameters] for device in missing}
                # each by itself: buffers would need more memory than the copies
                transport.copy_coalesced(list(copies.values()), [parameter.detach() for parameter in parameters], buffer_bytes=0)
            self.by_device |= copies

    def everywhere(self, parameters: Sequence[nn.Parameter], place: int) -> dict[torch.device, Tensor]:
        """Returns one parameter and its copies, by device."""
        parameter = parameters[place]
        return {parameter.device: parameter, **{device: copies[place] for device, copies in self.by_device.items()}}


def copy_buffers(buffers: Sequence[Tensor], devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """Returns copies of all buffers for each of ``devices``, by the id of the buffer."""
    together: list[Tensor] = []
    alone: list[Tensor] = []
    for buffer in buffers:
        # A trained buffer is copied with a graph, which brings it the gradients of all replicas.
        is_plain = buffer.layout == torch.strided and not (buffer.requires_grad or buffer.is_quantized)
        (together if is_plain else alone).append(buffer)
    copied = transport.copies([buffer.detach() for buffer in together], devices)
    copies = [dict(zip(map(id, together), tensors, strict=True)) for tensors in copied]
    for device, by_buffer in zip(devices, copies, strict=True):
        by_buffer.update((id(buffer), buffer.to(device, copy=True)) for buffer in alone)
    return copies


def _empty_copy(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(parameter.detach(), device=device)
