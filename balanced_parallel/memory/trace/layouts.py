"""The layouts that run a request on fake devices: one class each, with the facts that an estimate
needs.

::

    SingleDevice      the plain program, and what all layouts share
      DDP             one rank; its reducer is written in C++ and does not run on fake tensors, so this class imitates it
      FSDP            one rank of torch's FSDP2, on a process group that sends nothing
      ReplicaLayout   the model and the criterion of this package

The optimizer is made once there are parameters, or copied from an existing step. A loss whose rows
depend on each other runs in two passes, or in one, as in :class:`TrainStep`.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import BalancedOptimizer, DataParallelCriterion, PerReplica, Precision
from ...runtime.collectives import world_size
from ...strategies.tracing import (
    Shard,
    TracedCriterion,
    TracedModel,
    assign_owners,
    fill,
    is_elementwise,
    move_leaves,
    pieces_of,
    plain_loss,
    refuse_closures,
    shard,
    window,
)
from ..operators import UnknownMemory
from ..problem import LossFunction, Request
from .allocations import TracedSides
from .fakes import HOME, fake_devices
from .private import leaves_of_tree
from .tracer import groups_of


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of an update, to be made."""

    make: Callable[..., Optimizer]
    has_state: ClassVar[bool] = False

    @property
    def plain_make(self) -> Any:
        """The class or the function, without the settings of a ``functools.partial``."""
        return partial(self.make).func  # A partial of a partial is flat.

    @property
    def name(self) -> str:
        """The name of the class or the function."""
        return getattr(self.plain_make, "__name__", repr(self.plain_make))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a ``functools.partial``."""
        return partial(self.make).keywords

    @property
    def needs_whole_parameters(self) -> bool:
        """True for classes that are not elementwise, such as Muon and Adafactor: shards are not
        enough for them.
        """
        return isinstance(self.plain_make, type) and not is_elementwise(self.plain_make)

    def __deepcopy__(self, memo: dict[int, object]) -> "OptimizerChoice":
        return self  # The settings keep their values in a trace.

    def make_all(
        self, parameters: Iterable[Tensor], model: nn.Module | None = None
    ) -> list[Optimizer]:
        """Makes the optimizer, a :class:`BalancedOptimizer` if there is a model."""
        if model is None:
            optimizer = self.make(parameters)
            refuse_closures(type(optimizer), "an estimate")
            return [optimizer]
        if isinstance(self.plain_make, type):
            return [BalancedOptimizer(model, self.plain_make, parameters, **self.settings)]
        raise TypeError(
            f"optimizer={self.make!r}, expected a class, or a functools.partial of one, with BalancedOptimizer"
        )

    def state_bytes(self, size: int) -> int:
        """Returns about the bytes of state for parameters of ``size`` bytes, from an update of a
        small one; 0 if this update fails.
        """
        small = nn.Parameter(torch.zeros(64, 64))
        small.grad = torch.zeros_like(small)
        try:
            (optimizer,) = self.make_all([small])
            optimizer.step()
        except Exception:  # noqa: BLE001 - an optimizer may raise anything, and a trace tells it
            return 0
        states = optimizer.state[small].values()
        state = sum(each.nbytes for each in states if isinstance(each, Tensor))
        return size * state // small.nbytes


def inner_optimizers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers of torch, those inside of balanced ones."""
    return [
        each.shards.inner if isinstance(each, BalancedOptimizer) else each for each in optimizers
    ]


class ExistingOptimizers:
    """The optimizers of a step with their state, of which a trace has fake copies.

    Balanced ones are made anew there.
    """

    has_state = True

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.others = [
            optimizer for optimizer in optimizers if not isinstance(optimizer, BalancedOptimizer)
        ]
        self.recipes = [
            (each.recipe, each.shard) for each in optimizers if isinstance(each, BalancedOptimizer)
        ]

    def make_all(
        self, parameters: Iterable[Tensor], model: nn.Module | None = None
    ) -> list[Optimizer]:
        """Returns all optimizers.

        Those in the place of balanced ones have the pieces among ``parameters``.

        They are balanced again if there is a model. If there was none, the first becomes one.
        """
        others = [*self.others]
        recipes: list[Any] = self.recipes
        if model is not None and not recipes:
            first, *others = others
            recipes = [((type(first), first.param_groups, {}), None)]
        pieces = set(map(id, parameters))
        for (kind, groups, rest), sharding in recipes:
            if model is not None:
                others.append(BalancedOptimizer(model, kind, groups, sharding, **rest))
                continue
            owned = [
                {**group, "params": [each for each in group["params"] if id(each) in pieces]}
                for group in groups
            ]
            others.append(kind([group for group in owned if group["params"]], **rest))
        for group in groups_of(inner_optimizers(others)):
            if "capturable" in group:
                group["capturable"] = False  # Torch refuses it for the CPUs of a trace.
        return others


def wrap(criterion: LossFunction) -> DataParallelCriterion:
    """Returns a criterion that tells the kind of its loss."""
    if isinstance(criterion, DataParallelCriterion):
        return criterion
    return DataParallelCriterion(criterion)


P = TypeVar("P", bound=Tensor)


class SingleDevice:
    """The plain program on one device, and the base of the other layouts.

    An instance runs one update on fake tensors. The class has the facts about its kind that an
    estimate needs.
    """

    name = "single"
    is_distributed = False  # the trace is that of one rank, which stands for all
    batch_on_host = False  # each device receives its rows from there
    is_sharded = False  # the parameters are DTensors
    is_whole = False  # the criterion runs the update, with its backwards
    buckets: list[Tensor]  # flat tensors of the communication, allocated once
    replicas: Sequence[Any] = ()  # The model has some, and the criterion.
    _outputs: Sequence[object] = ()

    def __init__(self, request: Request, module: nn.Module, criterion: LossFunction) -> None:
        self.request = request
        self.module = module
        self.criterion = criterion
        parts = [part for part in (module, criterion) if isinstance(part, nn.Module)]
        self.parameters = list(nn.ModuleList(parts).parameters())
        self.buckets = []
        self.optimizers = [] if request.mode == "evaluate" else self.make_optimizers()
        self.inner_optimizers = inner_optimizers(self.optimizers)
        # Torch selects multi-tensor kernels on a GPU. Adafactor alone loops over tensors there.
        others = [
            each for each in self.inner_optimizers if not isinstance(each, torch.optim.Adafactor)
        ]
        for group in groups_of(others if request.kind.like_cuda else ()):
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        self.autocast = partial(Precision(request.precision).autocast, [HOME])

    @classmethod
    def pieces(cls, request: Request) -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
        """Returns a parameter for each of its pieces on devices that own it, with the facts that
        tell pieces apart.
        """
        return iter(())

    def accumulating(self) -> AbstractContextManager[None]:
        """Begins a micro-batch that is not the last of its update.

        Its gradients stay unreduced until the end of the block.
        """
        return nullcontext()

    def window(self) -> AbstractContextManager[None]:
        """Surrounds an update, in which parameters are written to by the optimizer alone."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Begins an update."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        """Ends the process group of the layout, if it has one."""
        return

    def make_optimizers(self) -> list[Optimizer]:
        """Makes the optimizers of the request."""
        model = self.module if self.request.balanced else None
        optimizers: list[Optimizer] = self.request.optimizer.make_all(self.parameters, model)
        return optimizers

    def loss(self, part: Shard) -> Tensor:
        """Runs the forward of one micro-batch."""
        with self.autocast():
            self._outputs = (output,) = self.outputs(part)
            return plain_loss(self.criterion, output, move_leaves(part.targets.inputs, None))

    def take_outputs(self) -> list[object]:
        """Returns the outputs of the last forward. They stay alive if the request says so."""
        outputs = [*self._outputs]
        if not self.request.keeps_outputs:
            self._outputs = ()
        return outputs

    def evaluate(self, part: Shard) -> Tensor:
        """Runs the forward of one micro-batch, with the loss of its own rows."""
        return self.loss_of_replicas(part) if self.request.couples_rows else self.loss(part)

    def loss_of_replicas(self, part: Shard) -> Tensor:
        """Runs the forward of one micro-batch, and the criterion of this package."""
        self._outputs = outputs = self.outputs(part)
        return self.coupled_criterion()(outputs, *part.targets.inputs)

    def losses(self, micro_batches: Sequence[Shard]) -> list[Callable[[], Tensor]]:
        """Begins an update. Returns a function for the loss of each micro-batch."""
        if not self.request.couples_rows:
            return [partial(self.loss, part) for part in micro_batches]
        if world_size() > 1:
            raise UnknownMemory(
                "the memory of a loss whose rows depend on each other is not known with shards: use layout='ddp'"
            )
        with self.autocast():
            criterion = self.coupled_criterion()
            loss = criterion.kind.loss(criterion.copies, HOME, is_split=True)
            if self.request.micro_batches > 1:  # This is the first of two passes.
                with torch.no_grad():
                    for part in micro_batches:
                        loss.collect(self._calls(criterion, part))
                    fill(loss, self.request.rows_of_update)
                loss.differentiate(None)
        return [partial(self._coupled_loss, criterion, loss, part) for part in micro_batches]

    def _calls(self, criterion: DataParallelCriterion, part: Shard) -> Any:
        """Runs the forward of one micro-batch. Returns the calls of the criterion."""
        outputs = self.outputs(part)
        if self.request.keeps_outputs:
            self._outputs = outputs
        return criterion.cut(outputs, part.targets.inputs, {})

    def _coupled_loss(self, criterion: DataParallelCriterion, loss: Any, part: Shard) -> Tensor:
        calls = self._calls(criterion, part)
        if self.request.micro_batches > 1:
            sums = loss.hand_back(calls)
        else:
            parts = loss.collect(calls)
            fill(loss, self.request.rows_of_update)
            loss.differentiate(None)
            sums = loss.hand_back_parts(parts)
        totals: list[Tensor] = [each.total.to(HOME) for each in sums]
        return functools.reduce(torch.add, totals)

    def coupled_criterion(self) -> DataParallelCriterion:
        """Returns the criterion on fake devices."""
        request = self.request
        return TracedCriterion(wrap(self.criterion), request.batch.dims[1], request.precision)

    def outputs(self, part: Shard) -> PerReplica:
        """Runs the forward of one micro-batch. Returns an output per replica."""
        with self.autocast():
            plain = move_leaves(part.inputs, None)
            output = self.module(*plain.inputs, **plain.kwargs)
        return PerReplica([output], [len(part.rows or ())], self.request.batch.dims[0])


class WholeStep(SingleDevice):
    """An update in the user's own words, on one device: the criterion is a function of the module,
    the optimizers, the inputs and the targets.
    """

    name = "step"
    is_whole = True

    def make_optimizers(self) -> list[Optimizer]:
        """Makes the optimizers of the module, in the structure that the update knows."""
        maker: Any = self.request.optimizer
        self.structure = maker.make(self.module)
        optimizers = leaves_of_tree(self.structure)
        for optimizer in optimizers:
            refuse_closures(type(optimizer), "an estimate")
        return optimizers

    def run(self, part: Shard) -> None:
        """Runs the update."""
        plain = move_leaves(part.inputs, None)
        targets = move_leaves(part.targets.inputs, None)
        with self.autocast():
            self.criterion(self.module, self.structure, *plain.inputs, *targets, **plain.kwargs)


class ReplicaLayout(SingleDevice):
    """:class:`DataParallelModel` and :class:`DataParallelCriterion` of this package."""

    name = "replicas"
    batch_on_host = True
    loss = SingleDevice.loss_of_replicas

    def __init__(self, request: Request, module: nn.Module, criterion: LossFunction) -> None:
        dim, dim_of_targets = request.batch.dims
        # Gradients on devices with streams live until another stream has read them.
        make_side = TracedSides if request.kind.like_cuda else lambda: None
        size = request.bucket_bytes
        model = TracedModel(
            module,
            fake_devices(request.devices),
            request.split,
            dim,
            request.precision,
            side=make_side(),
            bucket_bytes=size,
        )
        self.parallel_criterion = TracedCriterion(
            wrap(criterion), dim_of_targets, request.precision, side=make_side(), bucket_bytes=size
        )
        self.replicas = [model.replicas, self.parallel_criterion.replicas]
        super().__init__(request, model, criterion)

    @classmethod
    def pieces(cls, request: Request) -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
        """Yields the pieces of the parameters by bucket and owner."""
        if request.devices > 1:
            owners = fake_devices(request.devices if request.balanced else 1)
            parameters = trained(request.module.parameters())
            yield from pieces_of(parameters, owners, request.bucket_bytes)

    def coupled_criterion(self) -> DataParallelCriterion:
        """Returns the criterion on fake devices."""
        return self.parallel_criterion

    def outputs(self, part: Shard) -> Any:
        """Runs the forward of one micro-batch."""
        return self.module(*part.inputs.inputs, **part.inputs.kwargs)

    def accumulating(self) -> AbstractContextManager[None]:
        """Leaves gradients with the replicas."""
        return window(self.module, self.parallel_criterion, deferred=True)

    def window(self) -> AbstractContextManager[None]:
        """Refreshes the copies of the parameters once."""
        return window(self.module, self.parallel_criterion, in_step=True)


class DDP(SingleDevice):
    """One rank of ``DistributedDataParallel(gradient_as_bucket_view=True)``: that with the most
    state, if it is spread.

    The buckets are one flat tensor per dtype. Without accumulation, autograd makes a gradient, and
    the hook of the reducer copies it into the bucket. With accumulation, micro-batches add to the
    bucket itself, so they exist once (``strategies/ddp.py``).
    """

    name = "ddp"
    is_distributed = True

    def __init__(self, request: Request, module: nn.Module, criterion: LossFunction) -> None:
        super().__init__(request, module, criterion)
        self._views: dict[Tensor, Tensor] = {}
        is_reduced = request.devices > 1 and request.mode == "train"
        parameters = trained(self.parameters) if is_reduced else []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = [parameter for parameter in parameters if parameter.dtype == dtype]
            sizes = [parameter.numel() for parameter in group]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=group[0].device)
            self.buckets.append(flat)
            for parameter, piece in zip(group, flat.split(sizes), strict=True):
                self._views[parameter] = view = piece.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(copy_gradient, view))

    def make_optimizers(self) -> list[Optimizer]:
        """Makes the optimizers of the parameters that the rank owns."""
        owned = self.parameters
        if self.request.balanced:
            _, owned = busiest_owner(trained(owned), self.request.devices)
        optimizers: list[Optimizer] = self.request.optimizer.make_all(owned)
        return optimizers

    def accumulating(self) -> AbstractContextManager[None]:
        """Makes the gradients of a micro-batch accumulate in the buckets. Nothing is reduced."""
        for parameter, view in self._views.items():
            if parameter.grad is None:
                parameter.grad = view.zero_()
        return nullcontext()

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        super().zero_grad()
        # zero_grad() of a balanced optimizer covers the parameters of all ranks
        if self.request.balanced:
            self.module.zero_grad()


def copy_gradient(view: Tensor, parameter: Tensor) -> None:
    """Copies a new gradient into its view of a bucket, as the hook of the reducer."""
    if parameter.grad is not None and parameter.grad is not view:
        view.copy_(parameter.grad)
        parameter.grad = view


class FSDP(SingleDevice):
    """One rank of FSDP2, as :func:`parallelize` makes it: torch itself, on a process group that
    sends nothing.
    """

    name = "fsdp"
    is_distributed = True
    is_sharded = True

    def __init__(self, request: Request, module: nn.Module, criterion: LossFunction) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        # registers the fake backend, in private code only
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # no public context leaves all modes
        from torch.utils._python_dispatch import _disable_current_modes

        if dist.is_initialized():
            raise RuntimeError(
                "layout='fsdp' cannot be estimated while a process group is running: estimate it before, or elsewhere"
            )
        with _disable_current_modes():
            rank = 0
            if request.balanced:
                rank, _ = busiest_owner(trained(module.parameters()), request.devices)
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=request.devices
            )
            mesh = init_device_mesh("cpu", (request.devices,))
        self._units: list[Any] = shard(
            module, mesh, Precision(request.precision), lambda unit: None
        )
        super().__init__(request, module, criterion)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leaves gradients whole in the block if the request says so, as ``strategies/fsdp.py``
        does where they fit.
        """
        for unit in self._units:
            unit.set_requires_gradient_sync(not self.request.whole_gradients, recurse=False)
        yield
        for unit in self._units:
            unit.set_requires_gradient_sync(True, recurse=False)

    def close(self) -> None:
        """Ends the process group."""
        torch.distributed.destroy_process_group()


LAYOUTS: dict[str, type[SingleDevice]] = {
    layout.name: layout for layout in (SingleDevice, ReplicaLayout, DDP, FSDP, WholeStep)
}


def trained(parameters: Iterable[P]) -> list[P]:
    """Returns the parameters that get gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def busiest_owner(parameters: Sequence[P], ranks: int) -> tuple[int, list[P]]:
    """Returns the rank with the most state under :class:`BalancedOptimizer`, and the parameters
    that it owns.
    """
    owners = assign_owners(parameters, ranks)
    partitions = [
        [parameter for parameter in parameters if owners[parameter] == rank]
        for rank in range(ranks)
    ]
    return max(
        enumerate(partitions), key=lambda each: sum(parameter.nbytes for parameter in each[1])
    )
