"""Replicas of a module that live between steps, with the graph connected to the parameters of the module itself.

torch's ``replicate`` refuses CPUs, makes everything anew at each forward, and its replicas have no parameters
(``next(self.parameters())`` raises, pytorch#40457, ``ParameterList`` is empty, #36035). Here a replica's parameters are aliases
of copies that live on its device and are refreshed where the module has changed.
"""

import contextvars
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.devices import move
from ..runtime.streams import SideStreams, current_streams
from .checksums import Watch
from .gradient_buckets import Bucket, make_buckets
from .module_tree import Shells, Tree
from .untracked_writes import Writes

__all__: list[str] = []

# Replicas that are handed out by whoever has called what runs here. Workers carry it.
_handed_out: contextvars.ContextVar[tuple["Replicas", ...]] = contextvars.ContextVar("handed_out", default=())

State = tuple[int, int, bool]  # where a parameter's values are, how often they were written to, whether it learns


class Replicas:
    """What several replicas of a module need between its forwards. Everything about the module may change between two of them.

    The first replica is the module itself, so what it writes to its buffers and attributes stays. Buffers of the others are
    copies: what these write is lost, as in ``nn.DataParallel``. Replicas on one device share the values of the parameters.
    """

    def __init__(self) -> None:
        self.spread = False  # whether gradients go to owners of their own, and never to the parameters
        self.deferred = False  # gradients stay with the replicas until reduce()
        self.copies: dict[torch.device, list[Tensor]] = {}  # of the parameters, on the devices that are not the module's
        self.buckets: list[Bucket] = []
        self.tree: Tree | None = None
        self._shells: list[Shells] = []
        self._states: list[State] = []  # of the parameters when they were copied
        self._changed: list[int] = []  # of the parameters, those that the last refresh found changed
        self._writes: Writes | None = None  # that the states do not show
        self.watch: Watch | None = Watch()
        self.side: SideStreams | None = None  # where gradients are summed while backward goes on
        self._alone = threading.Lock()

    def __reduce__(self) -> Any:  # a copy of the wrapper makes replicas of its own
        return Replicas, ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in this block stay with the replicas until :meth:`reduce`, or a backward of a later forward."""
        before, self.deferred = self.deferred, True
        try:
            yield
        finally:
            self.deferred = before

    @contextmanager
    def handed_out(self, module: nn.Module, devices: Sequence[torch.device], home: torch.device) -> Iterator[list[nn.Module]]:
        """One replica of ``module`` for each of ``devices``, for the length of a forward.

        Args:
            module: all on ``home``; where this is the first of the devices, the module itself is the first replica.

        Raises:
            ValueError: a parameter or buffer is not on ``home``, or is not initialised (lazy modules).
            TypeError: the module is a ``ScriptModule``, which cannot be copied part by part; or it was compiled.
            RuntimeError: the module runs already, further up among the callers.
        """
        modules = [module] if devices[0] == home else []
        if len(modules) == len(devices) and self.tree is None:
            yield modules
            return
        with self._in_turn():
            if len(modules) == len(devices):
                yield modules
                return
            tree = self._prepare(module, [home, *devices[len(modules) :]])
            self._follow_unrecorded_writes(tree)
            handed = self._hand_out_parameters(tree, [*([home] if modules else []), *devices[len(modules) :]])
            for shells, device in zip(self._shells, devices[len(modules) :], strict=False):
                # buffers every time: batch norm writes to its statistics without torch's version counter
                copy_buffer = functools.partial(torch.Tensor.to, device=device, copy=True)
                modules.append(tree.fill(shells, handed.get(device), copy_buffer))
            with tree.lent(handed[home]) if home in handed else nullcontext():
                yield modules

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Keeps other threads waiting: shells, and the parameters that the module is lent, are those of one forward."""
        running = _handed_out.get()
        if any(replicas is self for replicas in running):
            raise RuntimeError(
                "a model was called inside of its own forward, expected one forward at a time: call the module itself there"
            )
        with self._alone:
            token = _handed_out.set((*running, self))
            try:
                yield
            finally:
                _handed_out.reset(token)

    def prepare(self, module: nn.Module, devices: Sequence[torch.device]) -> Tree:
        """Brings shells and copies up to date with the module."""
        with self._in_turn():
            return self._prepare(module, devices)

    def _prepare(self, module: nn.Module, devices: Sequence[torch.device]) -> Tree:
        if self.tree is None or not self.tree.still_is(module) or self._has_new_sizes():
            self._rebuild(module)
        assert self.tree is not None
        while len(self._shells) < len(devices) - 1:
            self._shells.append(self.tree.make_shells())
        self._refresh(self.tree, devices)
        return self.tree

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """The modules under ``module``, each once, without another walk where it is known."""
        return list(module.modules()) if self.tree is None or self.tree.modules[0] is not module else self.tree.modules

    def reduce(self) -> None:
        """Sums what the replicas hold since the last reduction."""
        for bucket in self.buckets:
            bucket.reduce()

    def scale(self, factor: float) -> None:
        """Multiplies what the replicas hold since the last reduction."""
        for bucket in self.buckets:
            bucket.scale(factor)

    def drop(self) -> None:
        """Forgets what the replicas hold since the last reduction."""
        for bucket in self.buckets:
            bucket.drop()
        if self.side is not None:  # a backward that failed did not come to it
            self.side.join()

    def forget_values(self) -> None:
        """Has every value copied again before the next forward or update."""
        self._states = []

    def mark_fresh(self) -> None:
        """Says that every copy has been given the values that the parameters have now."""
        assert self.tree is not None
        self._states = _states(self.tree.parameters)
        if self._writes is not None:
            self._writes.take()

    def make_buckets(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Gradients of each group are reduced on their own."""
        self.reduce()
        self.buckets = [bucket for group in groups for bucket in make_buckets(group)]

    def _rebuild(self, module: nn.Module) -> None:
        _refuse_lazy(module)
        known, tree = self.tree, Tree(module)
        same = known is not None and [*map(id, known.parameters)] == [*map(id, tree.parameters)] and known.shapes == tree.shapes
        if not same:
            self._refuse_spread()
            self.reduce()
            self.copies, self._states, self._writes, self.buckets = {}, [], None, []
            self.watch = self.watch and Watch()
        self.tree, self._shells = tree, []

    def _refuse_spread(self) -> None:
        if self.spread:
            raise RuntimeError(
                "the module has other parameters than when its BalancedOptimizer was made (added, removed, replaced, resized or "
                "unfrozen): make a new one, after the old one was deleted"
            )

    def _has_new_sizes(self) -> bool:
        """The old shells hold a graph in which the parameters have their old sizes, and with it what torch expects of them."""
        assert self.tree is not None
        return [parameter.shape for parameter in self.tree.parameters] != self.tree.shapes

    def _follow_unrecorded_writes(self, tree: Tree) -> None:
        """Copies what was written through ``.data``."""
        if self.copies and self.watch is not None:
            copies = next(iter(self.copies.values()))
            found = self.watch.look(tree.parameters, copies, self._changed, goes_on=self.deferred)
            for device, tensors in self.copies.items() if found else ():
                _copy_into(tensors, tree.parameters, found, device, recorded=False)

    def _refresh(self, tree: Tree, devices: Sequence[torch.device]) -> None:
        states = _states(tree.parameters)
        written = [] if self._writes is None else self._writes.take()
        self._changed = []
        if states != self._states or written or not states:
            _check_places(tree, devices[0])
            before = self._states or [(0, 0, False)] * len(states)
            if self.spread:
                bucketed = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
                if any(parameter.requires_grad and id(parameter) not in bucketed for parameter in tree.parameters):
                    self._refuse_spread()
            elif any(now[2] != then[2] for now, then in zip(states, before, strict=True)) or not self.buckets:
                self.make_buckets([[parameter for parameter in tree.parameters if parameter.requires_grad]])
            changed = [i for i, (now, then) in enumerate(zip(states, before, strict=True)) if now[:2] != then[:2]]
            unrecorded = sorted({*written}.difference(changed))
            self._changed = [*changed, *unrecorded]
            self.copies.pop(devices[0], None)
            for device, tensors in self.copies.items():
                _copy_into(tensors, tree.parameters, changed, device)
                _copy_into(tensors, tree.parameters, unrecorded, device, recorded=False)
            moved = [tree.parameters[i] for i in changed if states[i][0] != before[i][0]]
            for bucket in self.buckets if moved else ():
                if bucket.owners is not None:
                    bucket.owners.repoint(self._copies_of([one for one in moved if bucket.has(one)]))
            self._states = states
        for device in devices[1:]:
            if device != devices[0] and device not in self.copies:
                with torch.inference_mode(False), torch.no_grad():
                    self.copies[device] = [move(parameter.detach(), device) for parameter in tree.parameters]
                self._writes = self._writes or Writes(tree.parameters)

    def _copies_of(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, dict[torch.device, Tensor]]:
        """Returns the memory of each parameter on each device."""
        assert self.tree is not None
        places = {parameter: self.tree.place[id(parameter)] for parameter in parameters}
        return {
            parameter: {parameter.device: parameter, **{device: copies[at] for device, copies in self.copies.items()}}
            for parameter, at in places.items()
        }

    def _hand_out_parameters(self, tree: Tree, devices: Sequence[torch.device]) -> dict[torch.device, list[Tensor]]:
        """For each device its tensors, in the order of the tree's parameters. None where all are the module's own: the
        engine has one thread for a device, which adds up their gradients in a fixed order."""
        places = list(dict.fromkeys(devices))
        if not self.spread and all(place not in self.copies for place in places):
            return {}
        handed: dict[torch.device, list[Tensor]] = {place: [*self.copies.get(place, tree.parameters)] for place in places}
        if torch.is_grad_enabled():
            computing = current_streams(places)
            if self.side is None and any(computing.values()):
                self.side = SideStreams()
            for bucket in self.buckets:
                bucket.deferred = self.deferred
                bucket.side, bucket.is_last = self.side, bucket is self.buckets[-1]
                at = [tree.place[id(parameter)] for parameter in bucket.parameters]
                aliases = bucket.hand_out([[handed[place][i] for i in at] for place in places], computing)
                for place, some in zip(places, aliases, strict=True):
                    for i, alias in zip(at, some, strict=True):
                        alias._is_param = True  # a parameter to isinstance
                        handed[place][i] = alias
        return handed


def _refuse_lazy(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run the module once on a few rows before it is wrapped")


def _check_places(tree: Tree, device: torch.device) -> None:
    held = [*tree.parameters, *(buffer for module in tree.modules for buffer in module._buffers.values() if buffer is not None)]
    if all(tensor.device == device for tensor in held):
        return
    module = tree.modules[0]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected every parameter and buffer on the first device, {device}: "
                f"move the module there with .to({str(device)!r})"
            )


def _states(parameters: Sequence[Tensor]) -> list[State]:
    try:
        versions = [parameter._version for parameter in parameters]
    except RuntimeError:  # an inference tensor has none
        versions = [0 if parameter.is_inference() else parameter._version for parameter in parameters]
    learns = [parameter.requires_grad for parameter in parameters]
    return list(zip([parameter.data_ptr() for parameter in parameters], versions, learns, strict=True))


@torch.no_grad()
def _copy_into(
    copies: list[Tensor], parameters: Sequence[Tensor], changed: list[int], device: torch.device, *, recorded: bool = True
) -> None:
    """Copies the values of some parameters.

    Args:
        recorded: whether the copies' version counters move, as the parameters' have. Where they have not, a graph of an earlier
            forward may still be run backward, of the new values.
    """
    alike = [i for i in changed if copies[i].shape == parameters[i].shape and copies[i].dtype == parameters[i].dtype]
    for i in set(changed).difference(alike):
        copies[i] = move(parameters[i].detach(), device)
    if alike:
        targets = [copies[i] if recorded else copies[i].data for i in alike]
        torch._foreach_copy_(targets, [parameters[i].detach() for i in alike], non_blocking=device.type != "cpu")
