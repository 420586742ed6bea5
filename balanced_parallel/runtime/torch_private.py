"""Private names of torch: the one file to read when torch changes.

The tracer and the simulator have their own.

Each name is behind a function or an alias, because torch has no public one. Numbers are those of
its issues about that.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides

# torch has no public module of fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

# the common base class of batch norms
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout  # the common base class of dropouts
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import StateDict
from torch.utils import _python_dispatch  # the stack of TorchDispatchModes has no public functions
from torch.utils._device import DeviceContext  # the type of `with torch.device(...)`
from torch.utils._python_dispatch import TorchDispatchMode  # documented, but in a private module

# pytorch#65761, #175082
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .devices import move

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor  # This import takes seconds.

Tree = TypeVar("Tree")  # nested lists, tuples and dictionaries, or a value of them

__all__ = [
    "BatchNorm",
    "DeviceContext",
    "Dropout",
    "FakeTensorMode",
    "TorchDispatchMode",
]

# A block that torch's profiler shows as a range of this name, where one records: a profiler may not
# be started inside of it. torch.profiler.record_function calls operators without a profiler too.
profiled = torch._C._profiler._RecordFunctionFast
is_profiled = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
PACK_NAME = "_pack_padded_sequence"  # The operator of pack_padded_sequence.


# Autograd: control over a running backward. DistributedDataParallel and FSDP2 use the same private
# functions.

Node = Any  # torch.autograd.graph.Node; its stub lacks attributes of custom functions
_HIGHEST_PRIORITY = 2**63


def run_first(node: Node) -> None:
    """Makes backward run ``node`` before all other nodes that are ready in the same thread of the
    engine, one per device. None is the node of a tensor without a gradient.

    The ready node with the highest number is first (pytorch#114120 added this function).
    """
    if node is not None:
        node._set_sequence_nr(_HIGHEST_PRIORITY)


# Returns the number of nodes that autograd has recorded in this thread. No public function tells
# whether a forward has run.
count_graph_nodes = torch._C._autograd._get_sequence_nr


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the running backward.

    Call this from a node or a hook of that backward.

    It may run on a thread of the engine, but with the current streams of the thread that called
    backward. The public ``torch.autograd.graph.queue_callback`` (pytorch#66199, #193958) is newer
    than torch 2.13.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Lets the reducer of ``model`` make its buckets anew in the order of its first gradients,
    once.
    """
    model.reducer._rebuild_buckets()


def prepare_reduction(model: DistributedDataParallel) -> None:
    """Prepares the reducer of ``model`` for one backward, which the forward of
    ``DistributedDataParallel`` does otherwise.
    """
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])


def forward_of_ddp(model: DistributedDataParallel) -> contextlib.AbstractContextManager[None]:
    """Surrounds a forward of the module in ``model``. The compiler splits its graphs where the
    reducer has buckets.
    """
    return model._inside_ddp_forward()


def forget_order(model: DistributedDataParallel) -> None:
    """Makes the reducer of ``model`` forget the order of its first gradients.

    It makes its buckets anew in this order, once.

    A backward that fails is completed by another one, which reaches some parameters again. They are
    in the order twice, and the next backward fails.
    """
    model.reducer._reset_state()


def will_run(node: Node) -> bool | None:
    """Returns True if the running backward will run ``node``; for the node of a leaf, if it will
    fill the ``grad`` of the leaf.

    None for a leaf whose gradient ``torch.autograd.grad`` returns (pytorch#83617, #84773).
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def accumulator_of(leaf: Tensor) -> Node:
    """Returns the node that accumulates the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def current_backward_id() -> int | None:
    """Returns the number of the backward that the calling thread runs, or None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def keeps_graph() -> bool:
    """Returns True if the running backward may run again: ``retain_graph=True``, or it is compiled."""
    return torch.compiler.is_compiling() or bool(
        torch._C._autograd._get_current_graph_task_keep_graph()
    )


Hooks = tuple[Callable[[Tensor], object], Callable[[Any], Tensor]]


def saved_tensor_hooks() -> Hooks | None:
    """Returns the last pair of ``saved_tensors_hooks``, which torch applies.

    Hooks of activation checkpointing are left out: the backwards of several devices would recompute
    at the same time, and fail.
    """
    return None if in_checkpoint() else torch._C._autograd._top_saved_tensors_default_hooks(False)


def in_checkpoint() -> bool:
    """Returns True in activation checkpointing that is not reentrant, in its forward or
    recomputation.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


# Properties of tensors.


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the version counter of each tensor, which every write in place increments; 0 for
    inference tensors.
    """
    try:
        return [*map(version_of, tensors)]
    except RuntimeError:  # Inference tensors have none.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def count_at_root(tensor: Tensor) -> Tensor | None:
    """Returns the count of a tensor that is a mean of torch's cross-entropy, by its graph.

    None is another tensor, or a mean with class weights or in half precision.
    """
    node = tensor.grad_fn
    is_plain = getattr(node, "_saved_weight", None) is None and tensor.itemsize > 2
    is_mean = is_plain and getattr(node, "_saved_reduction", None) == 1
    return getattr(node, "_saved_total_weight", None) if is_mean else None


# Returns the version counter of a tensor.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def written_by(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Returns the tensors that an operator of torch writes to: its first argument, or ``out=``."""
    schema = getattr(function, "_schema", None)  # A higher-order operator has none.
    if schema is None or schema.name[:6] != "aten::" or not schema.is_mutable:
        return []
    return leaves_of_tree(keywords.get("out", arguments[:1]))


def memory_of(tensor: Tensor) -> int:
    """Returns a number that tensors in the same memory share."""
    is_dense = tensor.layout == torch.strided
    return storage_id(tensor.untyped_storage()) if is_dense else id(tensor)


def memory_of_plain(value: object) -> int | None:
    """Returns a number of the memory of a plain tensor, None for another value."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return None
    with contextlib.suppress(NotImplementedError):  # A tensor inside of vmap has none.
        return storage_id(value.untyped_storage()) if value.layout == torch.strided else None
    return None


# Version counter, address, shape, dtype, and requires_grad.
ParameterState = tuple[int, int, torch.Size, torch.dtype, bool]


def parameter_states(parameters: Sequence[Tensor]) -> list[ParameterState]:
    """Returns all that torch records of a write to each of ``parameters``. See :func:`versions`."""
    counters = versions(parameters)
    return [
        (version, parameter.data_ptr(), parameter.shape, parameter.dtype, parameter.requires_grad)
        for version, parameter in zip(counters, parameters, strict=True)
    ]


def is_differentiable(tensor: Tensor) -> bool:
    """Returns True for floating point and complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def nodes_behind(tensors: Iterable[object]) -> Iterator["Node"]:
    """Yields each node of the graph that leads to some tensors, from them on."""
    nodes: list[Node | None] = [getattr(tensor, "grad_fn", None) for tensor in tensors]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            nodes += [behind for behind, _ in node.next_functions]


def divides_by_counts(node: "Node") -> bool:
    """Returns True for an embedding with ``scale_grad_by_freq=True``."""
    return getattr(node, "_saved_scale_grad_by_freq", False)


def is_same(tensor: Tensor) -> bool:
    """Returns True for a copy of an output that a strategy has made: its derivative is one."""
    return type(tensor.grad_fn).__name__ == "_WatchBackward"


def broadcast(tensors: Iterable[Tensor], source: int, group: Any) -> None:
    """Broadcasts tensors from a rank of a group. No version counter tells of it."""
    places = [tensor.data for tensor in tensors]
    torch._C._distributed_c10d._broadcast_coalesced(group, places, 2**28, source)


def is_sharded(tensor: object) -> "TypeGuard[DTensor]":
    """Returns True for a ``DTensor``."""
    return hasattr(tensor, "to_local")


def has_shards(module: nn.Module) -> bool:
    """Returns True for a module with parts of FSDP2, whose parameters may be whole for a while."""
    return any(hasattr(part, "_get_fsdp_state") for part in module.modules())


def local_tensors(tensors: Iterable[Tree]) -> list[Tree | Tensor]:
    """Returns the shard on this rank in place of each ``DTensor``.

    Changes in place change the whole.
    """
    with torch.no_grad():
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def has_elements(tensor: Tensor) -> bool:
    """Returns True if a sparse tensor has elements. The public functions need it coalesced."""
    return tensor._nnz() > 0


# Makes the functions of torch treat a subclass as a plain tensor.
no_torch_function = torch._C._disabled_torch_function_impl


def new_wrapper(kind: type[Tree], like: Tensor, owned: Any, *arguments: object) -> Tree:
    """Returns a tensor of a subclass that is shaped like another, on the device of a parameter. It
    has no memory.
    """
    wrapper: Tree = Tensor._make_wrapper_subclass(  # type: ignore[type-var]
        kind,
        like.shape,
        strides=like.stride(),
        storage_size=0,
        dtype=like.dtype,
        device=owned.parameter().device,
    )
    return wrapper


# Returns True if an operator writes to an argument.
writes: Callable[[Any], bool] = attrgetter("_schema.is_mutable")


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor that ``tensor`` is a view of, or ``tensor`` itself."""
    base = tensor._base
    return tensor if base is None else base


def mark_as_parameters(tensors: Iterable[Tensor]) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` True.

    Unlike a parameter, a tensor may be the result of an operator.
    """
    for tensor in tensors:
        tensor._is_param = True


# The tables of the hooks of a gradient, and of those behind its accumulation. None if there never
# was a hook.
HookTable = dict[int, Callable[..., object]] | None
hooks_of: Callable[[Tensor], tuple[HookTable, HookTable]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


def without_hooks(tensors: Iterable[Tensor]) -> contextlib.ExitStack:
    """Takes the hooks of ``tensors`` off, until the end of a block or until it is closed.

    Autograd and the handles of the hooks have references to the tables, so these are emptied, and
    filled again.
    """
    stack = contextlib.ExitStack()
    for table in (table for tensor in tensors for table in hooks_of(tensor) if table):
        stack.callback(table.update, table.copy())
        table.clear()
    return stack


def skip_missing_gradients(tensors: Iterable[Tensor]) -> None:
    """Keeps hooks of ``tensors`` from missing gradients. A reducer reaches unused parameters too."""
    for tensor in tensors:
        for table in filter(None, hooks_of(tensor)):
            for number, hook in table.items():
                if not isinstance(hook, _HookOfGradient):
                    table[number] = _HookOfGradient(hook)


class _HookOfGradient:
    """A hook that is called with gradients alone, or with parameters that have one, as in a program
    without a reducer.
    """

    def __init__(self, hook: Callable[..., object]) -> None:
        self.hook = hook

    def __call__(self, tensor: Tensor | None) -> object:
        if tensor is None or (isinstance(tensor, nn.Parameter) and tensor.grad is None):
            return None
        return self.hook(tensor)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns a number that all Python objects of a living storage share.

    ``data_ptr()`` is 0 for empty, fake or meta ones.
    """
    return int(storage._cdata)


# a key that does not keep the memory; while it exists, no other storage gets its number
StorageReference = StorageWeakRef


# Modules: no public function returns entries that are None, the second name of a child, or a
# dictionary to change.

# Keys of ``module.__dict__``, for code that copies modules in every forward, without a call for
# each entry.
CHILDREN = "_modules"
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# Keys of an RNN: its weights in cuDNN's order, and weak references that it compares with its
# parameters.
FLAT_WEIGHTS = "_flat_weights"
FLAT_REFERENCES = "_flat_weight_refs"
_COMPILED = "_orig_mod"  # the child of the module that torch.compile returns

# A module's own entries, without those of its submodules. Changes to the dictionary change the
# module.
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(CHILDREN)
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)


# The tables of the hooks of a module's backward, and of those before it.
backward_hooks_of: Callable[[nn.Module], tuple[HookTable, HookTable]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)


def is_compiled(module: nn.Module) -> bool:
    """Returns True for the result of ``torch.compile(module)``, after ``module.compile()``, and for
    compiled methods.
    """
    if _COMPILED in module._modules or module._compiled_call_impl is not None:
        return True
    return any(
        map(
            is_compiled_function,
            (module.forward, *vars(type(module)).values(), *vars(module).values()),
        )
    )


def is_compiled_function(function: object) -> bool:
    """Returns True for the result of ``torch.compile(function)``, and not for that of
    ``torch.compiler.disable(function)``.
    """
    names = function.__dict__ if isinstance(function, (FunctionType, MethodType)) else {}
    return "_torchdynamo_orig_callable" in names and "_torchdynamo_disable" not in names


def graphs_for(devices: int) -> contextlib.AbstractContextManager[object]:
    """Allows the compiler as many graphs on each of several devices as it makes on one, before it
    gives a function up.

    A graph is for one device, and the limit for all graphs of a function.
    """
    from torch._dynamo import config  # imported already by the compiled code

    limits: contextlib.AbstractContextManager[object] = config.patch(
        recompile_limit=config.recompile_limit * devices
    )
    return limits


def draws_in_compiled_code(module: nn.Module) -> bool:
    """Returns True if a module is compiled so that its random numbers are not drawn by torch's
    kernels.
    """
    if not any(is_compiled(part) for part in module.modules()):
        return False
    from torch._inductor import config  # imports for seconds

    return not config.fallback_random


def without_compilation(module: nn.Module) -> nn.Module:
    """Returns the module inside of ``torch.compile(module)``, or ``module`` itself."""
    inner = getattr(module, _COMPILED, module)
    return inner if isinstance(inner, nn.Module) else module


def uncompiled_name(name: str) -> str:
    """Returns the name that a parameter of ``torch.compile(module)`` has in ``module``."""
    return name.replace(f"{_COMPILED}.", "")


# Nested containers as torch flattens them, such as the state of an optimizer. Batches have
# ``batch.containers``.

# all values of nested lists, tuples and dictionaries that are not containers
leaves_of_tree = tree_leaves


def map_tensors(function: Callable[[Tensor], object], tree: Tree) -> Tree:
    """Returns ``tree`` with each tensor replaced by ``function(tensor)``.

    Other values stay as they are.
    """
    mapped: Tree = tree_map_only(Tensor, function, tree)
    return mapped


def flatten(tree: Tree) -> tuple[list[Any], Callable[[list[object]], Tree]]:
    """Returns the values, as :func:`leaves_of_tree`, and a function that makes such a tree from as
    many values.
    """
    values, structure = tree_flatten(tree)
    return values, lambda others: tree_unflatten(others, structure)


# Optimizers: torch has no public list of the hooks of their state.


def load_with_hooks(
    optimizer: torch.optim.Optimizer, state: StateDict, load: Callable[[StateDict], None]
) -> None:
    """Calls ``load`` with a state, between the hooks of ``optimizer.load_state_dict(state)``."""
    for change in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = change(optimizer, state)
        state = state if changed is None else changed
    load(state)
    for finish in optimizer._optimizer_load_state_dict_post_hooks.values():
        finish(optimizer)


# Elementwise operations on lists of tensors, in one kernel for a list. torch 2.11 to 2.13 keep
# ``torch._foreach_*`` private; pytorch#193607 adds ``torch.foreach``. Unlike them (pytorch#162911),
# these functions accept empty lists.

Tensors = list[Tensor] | tuple[Tensor, ...]


def foreach_add(tensors: Tensors, others: Tensors) -> list[Tensor]:
    """Returns the sums of ``tensors[i]`` and ``others[i]``. No argument is changed."""
    return list(torch._foreach_add(tensors, others)) if tensors else []


def foreach_add_(tensors: Tensors, others: Tensors) -> None:
    """Adds ``others[i]`` to ``tensors[i]`` in place."""
    if tensors:
        torch._foreach_add_(tensors, others)


def foreach_multiply_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiplies all tensors by one factor in place.

    A factor with one element moves to each of their devices.
    """
    for device in {tensor.device for tensor in tensors}:
        local = move(factor, device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], local)


def foreach_copy_(targets: Tensors, sources: Tensors) -> None:
    """Copies ``sources[i]`` into ``targets[i]``, which may be on another device."""
    if targets:
        torch._foreach_copy_(targets, sources)


# Modes that see every operator.


def function_modes() -> tuple[overrides.TorchFunctionMode, ...]:
    """Returns the ``TorchFunctionMode``s of this thread, the last one called first."""
    return tuple(overrides._get_current_function_mode_stack())


def dispatch_modes() -> tuple[TorchDispatchMode, ...]:
    """Returns the ``TorchDispatchMode``s of this thread, the last one called first."""
    return tuple(_python_dispatch._get_current_dispatch_mode_stack())


class OnOperator(TorchDispatchMode):
    """Calls ``act(function, args, kwargs)`` for each operator in its block, before it runs."""

    supports_higher_order_operators = True

    def __init__(self, act: Callable[[Any, Sequence[Any], dict[str, Any]], object]) -> None:
        super().__init__()
        self._act = act

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Runs an operator."""
        self._act(function, args, kwargs or {})
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def pushed(
    functions: Iterable[overrides.TorchFunctionMode], dispatches: Iterable[TorchDispatchMode]
) -> Iterator[None]:
    """Pushes modes of another thread for the duration of the block.

    Their ``__enter__`` might begin a new measurement.
    """
    with contextlib.ExitStack() as stack:
        for function_mode in functions:
            overrides._push_mode(function_mode)
            stack.callback(overrides._pop_mode)
        for dispatch_mode in dispatches:
            _python_dispatch._push_mode(dispatch_mode)
            stack.callback(_python_dispatch._pop_mode)
        yield


# Kernels of ``scaled_dot_product_attention``, with the position of the probability of dropout. They
# have no public names.
ATTENTION_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
}
CUDNN_LAYERS = "_cudnn_rnn"  # An LSTM has layers with dropout between them.
REFUSED_DRAWS = (
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "geometric_",
    "cauchy_",
    "log_normal_",
)


def has_kernel(name: str, key: str) -> bool:
    """Returns True if an operator of ``aten`` has a kernel for a dispatch key.

    There is no public name.
    """
    is_known = hasattr(torch.ops.aten, name.partition(".")[0])
    return is_known and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def attention_in_parts(
    seeds: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    p: float = 0.0,
    causal: bool = False,
    **others: object,
) -> object:
    """Computes scaled dot product attention with dropout in operators of its own.

    The public function chooses a fused kernel.
    """
    if not p:
        return NotImplemented
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, p, causal, None, **others
    )[0]
    return result


# Process groups.


def forget_whole_gradients(units: "Iterable[FSDPModule]") -> None:
    """Forgets the gradients of FSDP2's modules that are not reduced yet, which its
    ``reset_iter_state()`` does not.
    """
    for parameter in _parameters_of_units(units):
        # The whole gradient is in the first place since torch 2.15, and in the second before.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def is_gathered(parameter: Tensor, units: "Iterable[FSDPModule]") -> bool:
    """Returns True for a parameter that FSDP2 has put in the place of its shard."""
    return any(parameter is getattr(p, "_unsharded_param", 0) for p in _parameters_of_units(units))


def _parameters_of_units(units: "Iterable[FSDPModule]") -> "Iterator[FSDPParam]":
    for unit in units:
        state = unit._get_fsdp_state()
        # torch 2.11 has at most one group.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            yield from group.fsdp_params


def all_backends() -> list[Any]:
    """Returns the backends of all running process groups."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    return [group._get_backend(device) for group in groups for device in group._device_types]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout that a group was made with. ``new_group`` would take torch's default."""
    return getattr(
        getattr(group._get_backend(group._device_types[0]), "options", None), "_timeout", None
    )


def has_nccl() -> bool:
    """Returns True if torch was built with NCCL.

    ``torch.cuda.nccl.is_available`` warns where it was not.
    """
    return hasattr(torch._C, "_nccl_reduce")


def checkpoint_threads() -> list[threading.Thread]:
    """Returns the threads in which ``async_save`` writes now.

    An interrupted call has not returned its future.
    """
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("AsyncCheckpointExecutor")
    ]
