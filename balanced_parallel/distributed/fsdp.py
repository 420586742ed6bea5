"""``ShardedModel``: torch's FSDP2, with the list of outputs that the replicas of one process return."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..batch.dims import Dims
from ..batch.nested import leaves, map_leaves
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows, move_leaves
from ..loss.weighting import zero_of
from ..replicas.model import mark_inputs
from ..replicas.module_checks import check_method
from ..replicas.sync_batchnorm import meets_other_ranks
from ..runtime.collectives import gather_objects, world_size
from ..runtime.precision import Precision
from ..runtime.random_numbers import cpu_numbers_of_rank, offset_seeds
from .absent_rows import first_row, undone
from .sharded_gradients import ShardedGradients
from .sharding import StateOfRank0, shard, without_compilation

__all__: list[str] = []


class ShardedModel(nn.Module):
    """FSDP2's ``fully_shard`` on each block of a module, with a list of this rank's output as :class:`DataParallelModel` returns.

    Parameters, gradients and optimizer state are sharded over the ranks. They are ``DTensor``s, which the optimizers of torch
    accept. Every rank runs the same blocks in the same order, equally often. A rank without rows runs one row of an earlier one:
    its output has no rows, its gradients are zeros, and random numbers and buffers stay as they were.

    Args:
        module: on any device. It is sharded in place.
        mesh: device mesh of the ranks.
        device: of this rank.
        dim, in_dims, out_dims: as in :class:`DataParallelModel`.
        precision: autocast around the forward, and the dtype in which parameters are all-gathered.

    Raises:
        ValueError: at the forward, a parameter was frozen or unfrozen since.
        RuntimeError: at the first forward, no rank has a row; at a backward or an evaluation, ranks have run other blocks.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Any,
        device: torch.device,
        dim: int = 0,
        precision: str | Precision | None = None,
        in_dims: Dims = None,
        out_dims: Dims = None,
    ) -> None:
        super().__init__()
        self.precision = Precision("fp32" if precision is None else precision)
        self.gradients = ShardedGradients()
        without_compilation(module).register_forward_hook(torch.compiler.disable(self.gradients.avoid_views))
        self.units = [cast(Any, unit) for unit in shard(module, mesh, self.precision, StateOfRank0(device).send)]
        names = {id(part): name for name, part in without_compilation(module).named_modules()}
        for unit in self.units:
            self.gradients.add(unit, names.get(id(unit)) or "root")
        self.module = module
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.in_dims = in_dims
        self.out_dims = dim if out_dims is None else out_dims
        self._meets_ranks = meets_other_ranks(module.modules())
        self._required = {name: (parameter, parameter.requires_grad) for name, parameter in module.named_parameters()}
        self._examples: dict[str, Arguments | None] = {}  # one row for each method
        self._methods = {"forward"}

    @property
    def root(self) -> Any:
        """The module that was sharded last, an ``FSDPModule``."""
        return self.units[-1]

    def forward(self, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Runs the module on this rank's rows. Returns a list with its output."""
        return self._run("forward", self.mark(Arguments(inputs, kwargs)))

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Calls another method of the module than ``forward``, with its parameters all-gathered."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        check_method(self.module, method)
        if method not in self._methods:
            register_fsdp_forward_method(self.module, method)
            self._methods.add(method)
        return self._run(method, self.mark(Arguments(inputs, kwargs), method))

    def mark(self, arguments: Arguments, method: str | None = None) -> Arguments:
        """Returns the arguments with the dimensions of their rows, as ``in_dims`` gives them."""
        return mark_inputs(arguments, self.in_dims, self.module, method)

    def forward_without_rows(self) -> Tensor:
        """Takes part in a forward of the other ranks. Returns a zero for the backward."""
        outputs = self._run("forward", None)
        return zero_of(*[leaf for _, leaf in leaves(list(outputs)) if isinstance(leaf, Tensor) and leaf.requires_grad])

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Sums gradients over the ranks in the block. Elsewhere they are averaged, as by ``DistributedDataParallel``."""
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
        try:
            yield
        finally:
            for unit in self.units:
                unit.set_gradient_divide_factor(float(world_size()))

    def _run(self, method: str, arguments: Arguments | None) -> PerReplica:
        rows = 0 if arguments is None else count_rows(arguments, self.dim)
        self._keep_example(method, arguments, rows)
        example = self._examples[method]
        if rows == 0 and example is not None and not (self._meets_ranks and arguments is not None):
            example = self._examples[method] = move_leaves(example, self.devices[0])  # once: the host would wait for each copy
            with self._as_dummy():
                outputs = PerReplica([self._call(method, map_leaves(_detached, example))], [1], self.out_dims).narrow(0, 0)
            return PerReplica.of_forward(outputs, outputs.sizes, self.out_dims)
        if arguments is None:
            raise RuntimeError("no rank has had a row yet, expected rows on one rank at least in the first forward")
        return PerReplica.of_forward([self._call(method, arguments)], [rows], self.out_dims)

    def _call(self, method: str, arguments: Arguments) -> Any:
        inputs, kwargs = move_leaves(arguments.inputs, self.devices[0]), move_leaves(arguments.kwargs, self.devices[0])
        offset_seeds(self.devices, dist.get_rank())
        draws_on_cpu = self.training and self.devices[0].type == "cpu"
        random_numbers = cpu_numbers_of_rank(dist.get_rank()) if draws_on_cpu else contextlib.nullcontext()
        function = self.module if method == "forward" else getattr(self.module, method)
        with self._as_sharded(), self.precision.autocast(self.devices), random_numbers:
            output = function(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self.root.reshard()  # after an evaluation, the module has its shards again
            self.gradients.order.compare()
        return self.gradients.watch_output(output)

    @contextlib.contextmanager
    def _as_dummy(self) -> Iterator[None]:
        """Undoes what a forward changes: random numbers, and buffers, which are replaced by copies in the block."""
        self.gradients.is_dummy = True
        try:
            with undone(self.module, self.devices):
                yield
        finally:
            self.gradients.is_dummy = False

    @contextlib.contextmanager
    def _as_sharded(self) -> Iterator[None]:
        """Checks that the same parameters require a gradient. FSDP2 gathers them into tensors that would not know.

        A forward without gradients may freeze layers for itself, as peft's ``disable_adapter()`` does: FSDP2 does not see it.
        """
        changed = [name for name, (parameter, before) in self._required.items() if parameter.requires_grad != before]
        for name in changed if torch.is_grad_enabled() else ():
            parameter, before = self._required[name]
            raise ValueError(
                f"{name} has requires_grad={parameter.requires_grad}, but {before} when parallelize sharded it: freeze and "
                "unfreeze layers before parallelize, with requires_grad_(False), also all of a teacher"
            )
        for name in changed:
            parameter, before = self._required[name]
            parameter.requires_grad_(before)
        try:
            yield
        finally:
            for name in changed:
                parameter, before = self._required[name]
                parameter.requires_grad_(not before)

    def _keep_example(self, method: str, arguments: Arguments | None, rows: int | None) -> None:
        """Keeps one row of the first forward. A rank without rows receives one from another rank."""
        if self._examples.get(method) is not None:
            return
        has_rows = [bool(rows) for rows in gather_objects(-1 if rows is None else rows)]
        mine = first_row(arguments, rows, self.dim) if rows and arguments is not None else None
        if True in has_rows and not all(has_rows):
            source = has_rows.index(True)
            shared = [_on_host(mine) if dist.get_rank() == source else None]
            dist.broadcast_object_list(shared, source)
            mine = mine or shared[0]
        self._examples[method] = mine


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _on_host(node: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, node)
