"""Replicas of a module that live between steps, and follow every change of the module.

torch's ``replicate`` refuses CPUs, copies everything at each forward, and its replicas have no parameters
(``next(self.parameters())`` raises, pytorch#40457, ``ParameterList`` is empty, #36035). Here the parameters of a replica are
aliases of persistent copies on its device, connected to the parameters of the module by one autograd function per bucket.

Copies of a module's parameters on other devices, refreshed where the parameters have changed.

Finds writes to parameters that Python does not see, such as those of a kernel that was given an address.

A record of writes to parameters that do not increment torch's version counter: through ``.data``, or by fused optimizers.

``parameter.data`` is a tensor with its own version counter, and fused optimizers increment none. torch has no hook on ``.data``.
A subclass of ``nn.Parameter`` could have one, but optimizers use their foreach implementation for exactly ``nn.Parameter`` and
``torch.Tensor`` (``torch.optim.optimizer._default_to_fused_or_foreach``). So ``nn.Parameter.data`` is a property that records
its uses. Forward, backward, clipping, optimizers and ``state_dict()`` do not use it.
"""

import contextlib
import contextvars
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..runtime import transport
from ..runtime.devices import start_copy
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
        checksums: finds writes that Python does not see, by checksums.
        side: streams for sums that overlap with the backward; made on first use where devices have streams.
        workers: runs the replicas of a forward; ``None`` runs them in the threads of :func:`shared_pool`.
    """

    def __init__(self, *, checksums: bool = True, side: SideStreams | None = None, workers: Workers | None = None) -> None:
        self.workers = workers or functools.partial(run_replicas, pool=functools.cache(shared_pool))  # kept from its first use on
        self.tree: ModuleTree | None = None
        self.copies = ParameterCopies(checksums)
        self.gradients = GradientBuckets(side)
        self._skeletons: list[Skeletons] = []
        self._rnns = RNNWeights((), {})
        self._lock = threading.Lock()

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
            self.copies.compare_checksums(tree.parameters, goes_on=self.gradients.deferred)
            tensors = self._connected_parameters(tree, [*([home] if modules else []), *others])
            # buffers every time: batch norm writes to its statistics without torch's version counter
            buffers = copy_buffers(tree.buffers(), others)
            for skeletons, device, copied in zip(self._skeletons, others, buffers, strict=False):
                modules.append(tree.fill(skeletons, tensors.get(device), copied))
            with tree.parameters_replaced(tensors[home]) if home in tensors else nullcontext():
                yield modules
            if devices[0] != home:
                tree.take_buffers(self._skeletons[0])

    def prepare(self, module: nn.Module, devices: Sequence[torch.device]) -> ModuleTree:
        """Brings skeletons and copies up to date with the module, and returns its tree."""
        with self.in_turn():
            return self._follow(module, devices)

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules under ``module``, each once, without another walk if they are known."""
        return list(module.modules()) if self.tree is None or self.tree.modules[0] is not module else self.tree.modules

    def mark_fresh(self) -> None:
        """Marks every copy as equal to its parameter."""
        assert self.tree is not None
        self.copies.mark_fresh(self.tree.parameters)

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
        return Sharding(self)

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
        if changes is not None:
            tree.check_device(devices[0])
            if any(tree.parameters[i].dtype != tree.dtypes[i] for i in changes.moved):
                self.copies.forget_values()
                self._refuse_sharded()
            self._follow_learning(tree, changes.learns)
            self.copies.update(tree.parameters, changes)
        self.copies.extend_to([device for device in devices if device != devices[0]], tree.parameters)
        self._rnns.flatten(self.copies.by_device)
        if changes is not None and self.gradients.is_sharded:
            self.gradients.repoint({tree.parameters[i]: self.copies.everywhere(tree.parameters, i) for i in changes.moved})
        return tree

    def _rebuild(self, module: nn.Module) -> ModuleTree:
        known, tree = self.tree, ModuleTree(module)
        if known is None or not known.has_parameters_of(tree):
            self._refuse_sharded()
            self.gradients.rebuild()
            self.copies.forget()
        self.tree, self._skeletons, self._rnns = tree, [], RNNWeights(tree.modules, tree.place)
        return tree

    def _follow_learning(self, tree: ModuleTree, has_changed: bool) -> None:
        """Makes new buckets where parameters were frozen or unfrozen."""
        if self.gradients.is_sharded:
            bucketed = {id(parameter) for bucket in self.gradients.buckets for parameter in bucket.parameters}
            if any(parameter.requires_grad and id(parameter) not in bucketed for parameter in tree.parameters):
                self._refuse_sharded()
        elif has_changed or not self.gradients.buckets:
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
            for place, some in zip(places, aliases, strict=True):
                for i, alias in zip(at, some, strict=True):
                    mark_as_parameter(alias)
                    tensors[place][i] = alias
        return tensors


class Sharding:
    """A handle on the owners that :meth:`Replicas.shard` gave to gradients."""

    def __init__(self, replicas: Replicas) -> None:
        self._gradients = replicas.gradients

    def close(self) -> None:
        """Takes the owners away. Gradients go to the parameters again."""
        self._gradients.is_sharded = False
        for bucket in self._gradients.buckets:
            bucket.owners = None


State = tuple[int, int, bool]  # address, version counter and requires_grad of a parameter when it was copied


class Changes(NamedTuple):
    """Places of the parameters that changed since the last look."""

    written: list[int]  # with torch's version counter, or moved
    untracked: list[int]  # through ``.data`` or by a fused optimizer
    moved: list[int]
    learns: bool  # True if requires_grad of any changed


class ParameterCopies:
    """Copies of parameters, one list per device, in the order of the parameters.

    Writes are found by address and version counter (torch's own record), by a record of ``.data`` (:class:`Writes`), and by
    checksums for writes that Python does not see (:class:`Watch`).

    Args:
        checksums: compares checksums of parameters and copies now and then. Tensors without values have none.
    """

    def __init__(self, checksums: bool = True) -> None:
        self.by_device: dict[torch.device, list[Tensor]] = {}
        self._checksums = checksums
        self.forget()

    def forget(self) -> None:
        """Drops all copies."""
        self.by_device.clear()
        self._writes: Writes | None = None
        self._watch = Watch() if self._checksums else None
        self._fresh: list[int] = []  # copied by the last refresh
        self.forget_values()

    def forget_values(self) -> None:
        """Marks every copy as outdated."""
        self._states: list[State] = []

    def mark_fresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Marks every copy as equal to its parameter."""
        self._states = _states_of(parameters)
        if self._writes is not None:
            self._writes.take()

    def find_changes(self, parameters: Sequence[nn.Parameter]) -> Changes | None:
        """Returns what changed since the last call; None if nothing did."""
        states, before = _states_of(parameters), self._states
        untracked = [] if self._writes is None else self._writes.take()
        self._fresh = []
        if states and states == before and not untracked:
            return None
        self._states = states
        pairs = list(enumerate(zip(states, before or [(0, 0, False)] * len(states), strict=True)))
        written = [i for i, (now, then) in pairs if now[:2] != then[:2]]
        moved = [i for i, (now, then) in pairs if now[0] != then[0]]
        self._fresh = [*written, *sorted({*untracked}.difference(written))]
        return Changes(written, self._fresh[len(written) :], moved, any(now[2] != then[2] for _, (now, then) in pairs))

    def update(self, parameters: Sequence[nn.Parameter], changes: Changes) -> None:
        """Copies the parameters that changed."""
        for parameter in parameters[:1]:
            self.by_device.pop(parameter.device, None)
        with self._all_or_outdated():
            _refresh(self.by_device, parameters, changes.written)
            _refresh(self.by_device, parameters, changes.untracked, tracked=False)

    def extend_to(self, devices: Iterable[torch.device], parameters: Sequence[nn.Parameter]) -> None:
        """Makes copies on those of ``devices`` that have none."""
        missing = [device for device in dict.fromkeys(devices) if device not in self.by_device]
        if missing:
            with torch.inference_mode(False), torch.no_grad():
                copies = {device: [_empty_copy(parameter, device) for parameter in parameters] for device in missing}
                # each by itself: buffers would need more memory than the copies
                transport.copy_coalesced(list(copies.values()), [parameter.detach() for parameter in parameters], buffer_bytes=0)
            self.by_device |= copies
            self._writes = self._writes or Writes(parameters)

    def compare_checksums(self, parameters: Sequence[nn.Parameter], *, goes_on: bool) -> None:
        """Copies the parameters that were written to without any record.

        Args:
            goes_on: the next forward is in the same window of micro-batches. Parameters do not change within a window.
        """
        if self._watch is not None and self.by_device:
            copies = next(iter(self.by_device.values()))
            with self._all_or_outdated():
                found = self._watch.look(parameters, copies, self._fresh, goes_on=goes_on)
                _refresh(self.by_device, parameters, found, tracked=False)

    @contextlib.contextmanager
    def _all_or_outdated(self) -> Iterator[None]:
        """Marks every copy as outdated if the block fails, for example because memory runs out."""
        try:
            yield
        except BaseException:
            self.forget_values()
            raise

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
    copies = [dict(zip(map(id, together), found, strict=True)) for found in copied]
    for device, found in zip(devices, copies, strict=True):
        found.update((id(buffer), buffer.to(device, copy=True)) for buffer in alone)
    return copies


def _states_of(parameters: Sequence[Tensor]) -> list[State]:
    learns = [parameter.requires_grad for parameter in parameters]
    return list(zip([parameter.data_ptr() for parameter in parameters], versions(parameters), learns, strict=True))


def _empty_copy(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(parameter.detach(), device=device)


@torch.no_grad()
def _refresh(
    by_device: Mapping[torch.device, list[Tensor]], parameters: Sequence[Tensor], places: Sequence[int], *, tracked: bool = True
) -> None:
    """Copies the values of some parameters to all devices.

    Args:
        by_device: copies of all parameters, for each device.
        places: of these parameters.
        tracked: moves the version counters of the copies, as those of the parameters moved. If they did not, a graph of an
            earlier forward may still run backward, with the new values.
    """
    if not (by_device and places):
        return
    targets = []
    for device, copies in by_device.items():
        for i in places:
            if copies[i].shape != parameters[i].shape or copies[i].dtype != parameters[i].dtype:
                copies[i] = _empty_copy(parameters[i], device)
        targets.append([copies[i] if tracked else copies[i].data for i in places])
    transport.copy_coalesced(targets, [parameters[i].detach() for i in places])


CHUNK = 2**18  # elements per step of a checksum, which bounds its temporary memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Compares a module's parameters with their copies, in the windows 2, 4, 8, ...

    The checksums of windows 4, 8, ... are computed one window before, so that the host does not wait for them. A parameter with
    an unrecorded write is copied at every forward from then on. Writes that begin in window ``n`` are found in window ``2 n`` at
    the latest. :class:`~.untracked_writes.Writes` records all writes that Python sees.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._compared: tuple[list[int], Callable[[], list[int]]] = [], list  # parameters, and those of them that differ
        self._inside = False  # the last forward announced another one in its window
        self._unrecorded: list[int] = []

    def look(self, parameters: Sequence[Tensor], copies: Sequence[Tensor], changed: Sequence[int], *, goes_on: bool) -> list[int]:
        """Returns the indices of the parameters to copy, in addition to those that are known to have changed.

        Args:
            parameters: the parameters of a module.
            copies: their copies on one other device, up to date with all recorded writes.
            changed: indices of the parameters that have just been copied.
            goes_on: the next forward is in the same window of micro-batches. Parameters do not change within a window.
        """
        begins, self._inside = not self._inside, goes_on
        self.windows += begins
        if begins and self.windows > 1 and (self.windows == 2 or _is_power_of_two(self.windows + 1)):
            still = sorted({*range(len(parameters))}.difference(changed))
            self._compared = still, _start_comparison([parameters[i] for i in still], [copies[i] for i in still])
        if begins and self.windows > 1 and _is_power_of_two(self.windows):
            still, differing = self._compared
            found = [still[i] for i in differing()]
            if set(found).difference(self._unrecorded):
                warnings.warn(
                    f"{len(found)} parameters were written to without torch's version counter, and neither through .data nor by "
                    "an optimizer of torch. They are copied to the other devices at every forward from now on. To avoid these "
                    "copies, call model.refresh_replicas() after such a write",
                    stacklevel=2,
                )
            self._unrecorded = sorted({*found, *self._unrecorded})
        return self._unrecorded


def _differing(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> list[int]:
    """Returns the indices of parameters that differ from their copies in any bit."""
    return _start_comparison(parameters, copies)()


@torch.no_grad()
def _start_comparison(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Starts a comparison. Returns a function for its result. Only checksums are copied to the host."""
    reads = [start_copy(torch.stack([_checksum(tensor) for tensor in tensors])) for tensors in (parameters, copies) if tensors]

    def differing() -> list[int]:
        sums = [read().tolist() for read in reads]
        return [i for i, (parameter, copy) in enumerate(zip(*sums, strict=True)) if parameter != copy]

    return differing


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _checksum(tensor: Tensor) -> Tensor:
    """Returns a position-weighted checksum of the raw bits.

    Integer arithmetic wraps, so the order in which a device sums does not matter.
    """
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = values.reshape(-1).view(_INTEGERS[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = torch.arange(min(CHUNK, bits.numel()), device=bits.device) * 2 + 1
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        total += (chunk * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total


_listening: "list[weakref.ref[Writes]]" = []


class Writes:
    """A record of the parameters that may have been written to since the last :meth:`take`.

    A tensor that ``.data`` has returned, or was set to, may be written to for as long as it lives. During that time its parameter
    is in every record.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        _listen()
        self._parameters = parameters  # keeps them alive, so their ids stay unique
        self._indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}  # by index of the parameter, tensors that share its memory
        _listening.append(weakref.ref(self, _listening.remove))

    def take(self) -> list[int]:
        """Returns the indices of the recorded parameters, and starts a new record."""
        if not self._aliases:
            return []
        recorded, self._aliases = self._aliases, {}
        for index, aliases in recorded.items():
            if alive := [alias for alias in aliases if alias() is not None]:
                self._aliases.setdefault(index, []).extend(alive)
        return list(recorded)

    def note(self, parameter: Tensor, alias: Tensor) -> None:
        """Records a parameter, and a tensor that shares its memory."""
        index = self._indices.get(id(parameter))
        if index is not None:
            alive = [known for known in self._aliases.get(index, ()) if known() is not None]
            self._aliases[index] = [*alive, weakref.ref(alias)]

    def note_all(self, parameters: Iterable[Tensor], *, with_gradients: bool) -> None:
        """Records several parameters.

        Args:
            parameters: these parameters. Others than those of this record are ignored.
            with_gradients: only those that have a gradient. An optimizer updates no others.
        """
        for identity in self._indices.keys() & map(id, parameters):
            index = self._indices[identity]
            if not with_gradients or self._parameters[index].grad is not None:
                self._aliases.setdefault(index, [])


_own_data: Any = torch.Tensor.data


def _read(parameter: nn.Parameter) -> Tensor:
    data: Tensor = _own_data.__get__(parameter)
    _note(parameter, data)
    return data


def _write(parameter: nn.Parameter, data: Tensor) -> None:
    _own_data.__set__(parameter, data)
    if data is not parameter:  # Module.to() sets the parameter itself if nothing moved
        _note(parameter, data)


def _note(parameter: Tensor, alias: Tensor) -> None:
    for listener in tuple(_listening):
        if (writes := listener()) is not None:
            writes.note(parameter, alias)


def note_written(parameters: Iterable[Tensor], *, with_gradients: bool = False) -> None:
    """Marks all replicas of the parameters as outdated."""
    for listener in tuple(_listening):
        if (writes := listener()) is not None:
            writes.note_all(parameters, with_gradients=with_gradients)


def _note_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.__dict__.get("param_groups", ()):  # a BalancedOptimizer has those of its inner optimizer
        note_written(group["params"], with_gradients=True)


@functools.cache
def _listen() -> None:
    """Starts recording, once, when a parameter first gets a copy on another device."""
    nn.Parameter.data = property(_read, _write)  # type: ignore[assignment]
    register_optimizer_step_post_hook(_note_step)
