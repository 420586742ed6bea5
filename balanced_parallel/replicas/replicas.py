"""Replicas of a module that live between steps, and follow every change of the module.

torch's ``replicate`` refuses CPUs, copies everything at each forward, and its replicas have no parameters
(``next(self.parameters())`` raises, pytorch#40457, ``ParameterList`` is empty, #36035). Here the parameters of a replica are
aliases of persistent copies on its device, connected to the parameters of the module by one autograd function per bucket.
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.streams import SideStreams, current_streams
from ..runtime.tensors import mark_as_parameter
from .bucket import Owners
from .gradient_buckets import GradientBuckets
from .module_checks import check_device, refuse_rescaled
from .module_tree import ModuleTree, Skeletons
from .parameter_copies import ParameterCopies, copy_buffers
from .rnn_weights import RNNWeights
from .worker_pool import shared_pool
from .workers import Workers, run_replicas

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
