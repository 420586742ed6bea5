"""``checkpoint_activations``: blocks of a network save their inputs only, and the backward runs them again.

A checkpointed module has another class, so that its copies and replicas are checkpointed too. The second run of a forward draws
the same random numbers and reads the same buffers, which ``torch.utils.checkpoint`` alone would update twice.
"""

import functools
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ..runtime import torch_private
from ..runtime.random_numbers import RandomState
from ..runtime.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    children_of,
    parameters_of,
    storage_id,
    versions,
)
from ..runtime.values import check_number, check_type, format_bytes, parse_bytes
from .saving import Saving, sorted_names


class LayerSegment(NamedTuple):
    """A run of the modules of an ``nn.Sequential``, from ``start`` to before ``end``, or all of a module."""

    start: int = 0
    end: int | None = None
    recomputed: bool = True
    selective: bool = False


# Runs a segment instead of checkpointing it: ``run(module, segment, function, args, kwargs)``.
Runner = Callable[[nn.Module, LayerSegment, Callable[..., Any], Any, Any], Any]
runner: ContextVar[Runner | None] = ContextVar("runner", default=None)


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the repeated blocks of a network.

    Blocks are two or more modules of one class in an ``nn.ModuleList`` or an ``nn.Sequential``, with parameters and children.
    The outermost such modules count. If there are none, any two or more children of one class count.
    """
    for containers in ((nn.ModuleList, nn.Sequential), (nn.Module,)):
        if names := _blocks_under(module, "", containers):
            return tuple(names)
    return ()


def _blocks_under(parent: nn.Module, prefix: str, containers: tuple[type[nn.Module], ...]) -> list[str]:
    children = {name: child for name, child in parent.named_children() if next(child.parameters(), None) is not None}
    kinds = [_kind(child) for child in children.values()]
    names = []
    for name, child in children.items():
        repeats = isinstance(parent, containers) and kinds.count(_kind(child)) > 1 and next(child.children(), None) is not None
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        within = [] if repeats and not isinstance(child, nn.Sequential) else _blocks_under(child, f"{prefix}{name}.", containers)
        names += within or ([f"{prefix}{name}"] if repeats and not is_list else [])
    return names


def checkpoint_blocks(module: nn.Module, names: Iterable[str]) -> None:
    """Checkpoints each named module in place: it saves its inputs only, and recomputes the rest in the backward."""
    for name in names:
        block = find_module(module, name)
        if not isinstance(block, Checkpointed):
            checkpoint_module(block, (LayerSegment(),))


def find_module(module: nn.Module, name: str) -> nn.Module:
    """Returns the submodule of that name."""
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"there is no module {name!r} to checkpoint, expected names of named_modules()") from error


def checkpoint_module(module: nn.Module, segments: tuple[LayerSegment, ...]) -> None:
    """Checkpoints a module in place, as one segment or, an ``nn.Sequential``, as several."""
    module.__class__ = _checkpointed(_kind(module), segments)


def restore_module(module: nn.Module) -> None:
    """Undoes :func:`checkpoint_module`."""
    module.__class__ = _kind(module)


def _kind(module: Any) -> Any:
    return module.made_from[0] if isinstance(module, Checkpointed) else type(module)


class Checkpointed:
    """A base class of checkpointed modules, besides their own class."""

    made_from: tuple[Any, tuple[LayerSegment, ...]]  # the class of the module, and its segments

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns the parts for ``pickle`` and ``copy``, which do not find a class that was made at run time."""
        parts: Any = super().__reduce_ex__(protocol)
        return _new, self.made_from, *parts[2:]


def _new(kind: Any, segments: tuple[LayerSegment, ...]) -> Any:
    checkpointed = _checkpointed(kind, segments)
    return checkpointed.__new__(checkpointed)


@functools.cache
def _checkpointed(kind: Any, segments: tuple[LayerSegment, ...]) -> Any:
    """Returns a checkpointed subclass. A ``forward`` set on the instance would still run the original after a copy."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for segment in segments:
            args = (_run(self, segment, args, kwargs),)
        return args[0]

    return type(
        kind.__name__, (Checkpointed, kind), {"forward": forward, "__module__": kind.__module__, "made_from": (kind, segments)}
    )


def _run(module: Any, segment: LayerSegment, args: Any, kwargs: Any) -> Any:
    layers = [module] if segment.end is None else list(module)[segment.start : segment.end]
    function: Callable[..., Any] = functools.partial(_run_layers, layers)
    if segment.end is None:
        function = functools.partial(_kind(module).forward, module)
    if not torch.compiler.is_compiling() and (run := runner.get()) is not None:
        return run(module, segment, function, args, kwargs)
    if not segment.recomputed:
        return function(*args, **kwargs)
    return run_checkpointed(layers, function, args, kwargs, name=_kind(module).__name__, selective=segment.selective)


def _run_layers(layers: Iterable[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


EXPECTED = "expected names of named_modules(): blocks=['encoder', 'decoder']"


class CheckpointHandle:
    """The result of :func:`checkpoint_activations`.

    Attributes:
        parts: what is recomputed, as names of modules, ``"features[0:4]"`` for modules of an ``nn.Sequential``, and with
            ``" (selective)"`` behind a part whose expensive operators are not computed again.
        activation_bytes: bytes of activations that stay for the backward; None without ``budget``.
    """

    def __init__(self, modules: list[nn.Module], parts: tuple[str, ...], activation_bytes: int | None) -> None:
        self.parts = parts
        self.activation_bytes = activation_bytes
        self._modules = modules

    def remove(self) -> None:
        """Undoes the checkpointing, for graphs that are made from now on."""
        for module in self._modules:
            restore_module(module)

    def __repr__(self) -> str:
        size = "" if self.activation_bytes is None else f", activation_bytes={format_bytes(self.activation_bytes)}"
        return f"{type(self).__name__}(parts={list(self.parts)}{size})"


def checkpoint_activations(
    module: nn.Module,
    *,
    blocks: str | Iterable[str] = "auto",
    segments: int | None = None,
    selective: bool = False,
    budget: int | str | None = None,
    inputs: Any = None,
) -> CheckpointHandle:
    """Checkpoints parts of a module in place. Their activations are computed again in the backward instead of being kept.

    Loss, gradients, random numbers and running statistics stay the same. A call replaces the checkpoints of an earlier call.

    Args:
        module: any module. Names of parameters, ``state_dict()`` and ``isinstance`` stay as they are.
        blocks: names of submodules (of the module itself: ``""``). ``"auto"`` takes the repeated blocks of the network, such as
            the layers of a transformer. If there are none, each outermost ``nn.Sequential`` is cut into segments.
        segments: number of segments of an ``nn.Sequential``. Default: the square root of its length. The last stays as it is.
        selective: keeps the outputs of matrix multiplications, convolutions and attention, which are expensive to compute again.
        budget: bytes of activations that may stay, such as ``"2GiB"``. As few blocks or segments as possible are recomputed. In
            the backward, the activations of one block come on top. Default: all blocks are recomputed.
        inputs: needed for ``budget``: a batch of as many rows as one device gets in one forward. It is a tensor, a tuple of
            positional arguments or a mapping of keyword arguments. Nothing is computed: a fake forward counts bytes.

    Returns:
        A handle. ``handle.remove()`` undoes the checkpointing.

    Raises:
        ValueError: there is nothing to checkpoint, a name is unknown, or the activations do not fit into the budget.

    Example:
        >>> net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
        >>> handle = savings.checkpoint_activations(net)
        >>> handle.parts
        ('[0:4]', '[4:8]', '[8:12]')
        >>> savings.checkpoint_activations(net, budget="24KiB", inputs=torch.zeros(16, 64))
        CheckpointHandle(parts=['[12:16]'], activation_bytes=24.00 KiB)
    """
    for submodule in module.modules():
        restore_module(submodule)
    if selective and budget is not None:
        raise ValueError("selective=True was given beside budget=, which chooses by itself: expected one of them")
    cut = blocks == "auto" and not find_blocks(module)
    segments_of = {
        name: tuple(
            segment._replace(selective=selective and segment.recomputed)
            for segment in _segments(find_module(module, name), segments, cut=cut)
        )
        for name in _names(module, blocks)
    }
    remaining = None
    if budget is not None:
        segments_of, remaining = _choose(module, segments_of, parse_bytes(budget), inputs)
    changed = []
    for name, cuts in segments_of.items():
        if any(segment.recomputed for segment in cuts):
            changed.append(module.get_submodule(name))
            checkpoint_module(changed[-1], cuts)
    parts = [_text(name, segment) for name, cuts in segments_of.items() for segment in cuts if segment.recomputed]
    return CheckpointHandle(changed, tuple(parts), remaining)


def _names(module: nn.Module, blocks: str | Iterable[str]) -> list[str]:
    if blocks != "auto":
        check_type("blocks", blocks, Iterable, "'auto', or the names of submodules")
        names = [blocks] if isinstance(blocks, str) else list(blocks)
        if not names:
            raise ValueError(f"blocks={blocks!r} is empty, {EXPECTED}")
        return names
    if names := list(find_blocks(module)):
        return names
    for name, child in module.named_modules():
        outermost = not any(name.startswith(f"{other}." if other else "") for other in names)
        if outermost and type(child).forward is nn.Sequential.forward and len(children_of(child)) > 1:
            names.append(name)
    if not names:
        raise ValueError(f"{type(module).__name__} has neither repeated blocks nor an nn.Sequential to checkpoint, {EXPECTED}")
    return names


def _segments(module: nn.Module, count: int | None, cut: bool) -> tuple[LayerSegment, ...]:
    if not cut and count is None:
        return (LayerSegment(),)
    if type(module).forward is not nn.Sequential.forward:
        raise ValueError(f"segments={count}, but {type(module).__name__} is not an nn.Sequential: leave segments out")
    length = len(children_of(module))
    if count is None:
        count = max(2, round(math.sqrt(length)))
    check_number("segments", count, "the number of parts of an nn.Sequential", whole=True)
    if not 2 <= count <= length:
        raise ValueError(f"segments={count}, expected a number from 2 to the {length} modules of the nn.Sequential")
    size = length // count
    places = [*range(0, size * count, size), length]
    return tuple(LayerSegment(start, end, recomputed=end < length) for start, end in itertools.pairwise(places))


def _choose(
    module: nn.Module, segments_of: dict[str, tuple[LayerSegment, ...]], budget: int, inputs: Any
) -> tuple[dict[str, tuple[LayerSegment, ...]], int]:
    """Returns ``segments_of`` with as few recomputed segments as the budget allows, and the bytes that stay."""
    if inputs is None:
        raise ValueError("budget needs inputs: give a batch of as many rows as one device gets in one forward")
    modules = {name: module.get_submodule(name) for name in segments_of}
    for name, cuts in segments_of.items():
        checkpoint_module(modules[name], cuts)
    try:
        saved = measure_saved_bytes(module, inputs)
    finally:
        for child in modules.values():
            restore_module(child)
    waiting: list[ModulePart] = [(modules[name], segment) for name, cuts in segments_of.items() for segment in cuts]
    chosen: dict[ModulePart, bool] = {}
    while (size := saved.total(chosen)) > budget:
        # The first of several equal ones: the last ones are recomputed while the activations of all others are still there.
        best = min(waiting, key=lambda part: saved.total({**chosen, part: False}), default=None)
        if best is None or saved.total({**chosen, best: False}) >= size:
            raise ValueError(
                f"the activations do not fit into budget={format_bytes(budget)}: {format_bytes(size)} ({size} bytes) stay"
            )
        waiting.remove(best)
        chosen[best] = best not in saved.mutated and saved.total({**chosen, best: True}) <= budget
    return {
        name: tuple(
            segment._replace(recomputed=(part := (modules[name], segment)) in chosen, selective=chosen.get(part, False))
            for segment in cuts
        )
        for name, cuts in segments_of.items()
    }, size


def _text(name: str, segment: LayerSegment) -> str:
    place = "" if segment.end is None else f"[{segment.start}:{segment.end}]"
    return f"{name}{place}{' (selective)' if segment.selective else ''}"


def run_checkpointed(
    modules: Sequence[nn.Module], function: Callable[..., Any], args: Any, kwargs: Any, *, name: str, selective: bool = False
) -> Any:
    """Returns ``function(*args, **kwargs)``. The graph keeps the arguments only, and the backward runs the function again.

    The function may write to buffers of ``modules``. If ``selective``, the graph also keeps outputs of expensive operators.
    """
    leaves, rebuild = torch_private.flatten((args, kwargs))
    is_training = any(module.training for module in modules)
    if not torch.is_grad_enabled() or (not is_training and any(hasattr(leaf, _CACHE) for leaf in leaves)):
        return function(*args, **kwargs)
    leaves = without_empty_cache(leaves, name)

    def run(*again: Any) -> Any:
        positional, named = rebuild(list(again))
        return function(*positional, **named)

    if torch.compiler.is_compiling():  # the compiler runs operators again, with their random numbers, and no writes
        settings: dict[str, Any] = {"context_fn": _make_selective} if selective else {}
        return checkpoint(run, *leaves, use_reentrant=False, **settings)
    # Tensors are passed by position: torch finds the devices, and thereby autocast, from positional arguments only.
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    before = versions(tensors)
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    parameters = [parameter for owner in owners for parameter in parameters_of(owner).values() if parameter is not None]
    devices = [tensor.device for tensor in (*tensors, *parameters)]  # an argument may be an object, layers on another device
    again = functools.partial(_Rerun.contexts, owners, devices, selective)
    outputs = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=again)
    if versions(tensors) != before:
        raise RuntimeError(
            f"{name} writes to its input in place, so its forward cannot run again: set inplace=False on the module that does, "
            "or call checkpoint_activations before inplace_activations"
        )
    return outputs


class _Rerun:
    """A context of each further run of a forward. One graph may enter it several times (``retain_graph=True``)."""

    def __init__(self, owners: list[nn.Module], devices: list[torch.device], inner: AbstractContextManager[Any]) -> None:
        self._owners = [(owner, buffers_of(owner)) for owner in owners if buffers_of(owner)]
        self._random = RandomState(devices)
        self._inner = inner
        self._written: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._entered: list[ExitStack] = []

    @classmethod
    def contexts(cls, owners: list[nn.Module], devices: list[torch.device], selective: bool) -> tuple[Any, "_Rerun"]:
        """Returns the contexts of the first run of a forward, and of each further one."""
        first, again = _make_selective() if selective else noop_context_fn()
        if selective:  # hooks of saved tensors do not get the outputs that it keeps, as before torch 2.15
            first.respect_saved_tensors_hooks = False
        rerun = cls(owners, devices, again)
        return rerun.first_run(first), rerun

    @contextmanager
    def first_run(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Records the buffers that the block writes to, with their values before."""
        before = []
        for owner, buffers in self._owners:
            if owner.training and buffers.get("running_mean") is not None:
                # torch's norms do not count these writes as versions. Outputs in training do not depend on the values.
                self._written += [(buffers, name, None) for name, buffer in buffers.items() if buffer is not None]
            elif owner.training:
                before += [(buffers, name, buffer, buffer.clone()) for name, buffer in buffers.items() if buffer is not None]
        now = versions([buffer for _, _, buffer, _ in before])
        with inner:
            yield
        for version, (buffers, name, buffer, value) in zip(now, before, strict=True):
            if buffers.get(name) is not buffer or versions([buffer]) != [version]:
                self._written.append((buffers, name, value))
        self._random.end()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._random.again())
            for buffers, name, value in self._written:
                current = buffers[name]
                stack.callback(buffers.__setitem__, name, current)
                start = current if value is None else value
                buffers[name] = None if start is None else start.clone()
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


ModulePart = tuple[nn.Module, LayerSegment]


class SavedBytes(TorchDispatchMode):
    """Watches a forward: the storages that its graph keeps. Each counts once, whoever keeps it; ``free`` tensors do not count."""

    def __init__(self, free: Iterable[Tensor]) -> None:
        super().__init__()
        self.mutated: set[ModulePart] = set()  # write in place to an output of an expensive operator, which then cannot be kept
        self._storages: dict[int, torch.UntypedStorage] = {}  # keeps their ids unique
        self._keepers: defaultdict[int, set[ModulePart | None]] = defaultdict(set)
        self._inputs: defaultdict[ModulePart, set[int]] = defaultdict(set)
        self._expensive: defaultdict[ModulePart, set[int]] = defaultdict(set)
        self._free = self._note(free)
        self._part: ModulePart | None = None  # that runs
        self._outputs: list[Tensor] = []  # of its expensive operators

    def total(self, recomputed: Mapping[ModulePart, bool]) -> int:
        """Returns the bytes that stay if some parts are recomputed. The values say if a part is selective."""
        storages = {storage for storage, keepers in self._keepers.items() if keepers - recomputed.keys()}
        for part, selective in recomputed.items():
            storages |= self._inputs[part] | (self._expensive[part] if selective else set())
        return sum(self._storages[storage].nbytes() for storage in storages - self._free)

    def run(self, module: nn.Module, segment: LayerSegment, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs one part. A part inside another one belongs to the outer one."""
        if self._part is not None:
            return function(*args, **kwargs)
        self._part = part = module, segment
        self._inputs[part] |= self._note(_tensors_in((args, kwargs)))
        try:
            result = function(*args, **kwargs)
            if any(versions(self._outputs)):
                self.mutated.add(part)
            return result
        finally:
            self._part = None
            self._outputs.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook of saved tensors."""
        for storage in self._note([tensor]):
            self._keepers[storage].add(self._part)
        return tensor.detach()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **kwargs or {})
        if self._part is not None and is_expensive(operator, args, kwargs or {}):
            tensors = _tensors_in(result)
            self._expensive[self._part] |= self._note(tensors)
            self._outputs += tensors
        return result

    def _note(self, tensors: Iterable[Tensor]) -> set[int]:
        storages = {storage_id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages |= storages
        return set(storages)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.leaves_of_tree(tree) if isinstance(leaf, Tensor)]


def measure_saved_bytes(module: nn.Module, inputs: Any) -> SavedBytes:
    """Runs a forward of fake tensors. The parts are those of :func:`checkpoint_module`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: fake_like(tensor, mode) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    batch = torch_private.map_tensors(lambda tensor: fake_like(tensor, mode), inputs)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    saved = SavedBytes([*state.values(), *_tensors_in(batch)])
    token = runner.set(saved.run)
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
        with warnings.catch_warnings(action="ignore"), mode, saved, torch.enable_grad(), hooks:
            torch.func.functional_call(module, state, args, dict(kwargs))
    except Exception as error:
        raise ValueError(
            f"the bytes of {type(module).__name__} cannot be counted without its values: choose blocks by name ({error!r})"
        ) from error
    finally:
        runner.reset(token)
    return saved


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None = None, shape: torch.Size | None = None) -> Any:
    """Returns a tensor without memory, like another one but for its device and shape."""
    settings: dict[str, Any] = {"dtype": tensor.dtype, "device": device or tensor.device}
    with mode, torch.no_grad():
        if shape is None and tensor.layout == torch.strided:
            copied = torch.empty_strided(tensor.size(), tensor.stride(), **settings)
        else:
            copied = torch.empty(tensor.shape if shape is None else shape, **settings)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


_MULTIPLICATIONS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")}


def is_expensive(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for an operator whose outputs are kept."""
    place = torch_private.ATTENTION_KERNELS.get(operator)
    if place is not None:  # attention that draws random numbers has to run again, to draw them again
        return not (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0))
    return operator in _MULTIPLICATIONS


def _keep_expensive(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


_make_selective = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)


_CACHE = "get_seq_length"  # of a cache of transformers


def without_empty_cache(leaves: list[Any], name: str) -> list[Any]:
    """Returns the arguments of a block with None in place of a cache, to which a recomputation would append once more.

    Keys of earlier tokens change the result, so such a cache is refused. The first tensor has the shape ``[rows, tokens, ...]``.
    """
    hidden = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), None)
    tokens = 0 if hidden is None else hidden.shape[1]
    outputs: list[Any] = []
    for leaf in leaves:
        length = leaf.get_seq_length() if hasattr(leaf, _CACHE) else None
        if length not in (None, 0, tokens):  # blocks before this one may have appended the tokens of this call
            raise ValueError(
                f"{name} gets a cache with the keys of {length} tokens for {tokens} new ones, to which a recomputation would "
                "append: train without past_key_values, or do not checkpoint this block"
            )
        outputs.append(leaf if length is None else None)
    return outputs


def _checkpoint(name: str, step: Any) -> Mapping[str, Any] | None:
    has_parts = bool(find_blocks(step.module)) or any(type(part) is nn.Sequential for part in step.module.modules())
    is_possible = has_parts and not step.blocks and name not in step.savings
    return {"savings": sorted_names([*step.savings, name])} if is_possible else None


SELECTIVE = Saving(
    name="checkpoint_activations(selective=True)",
    option="selective checkpoints",
    saves="the activations inside of blocks, but results of matrix products and attention",
    cost="a second run of the cheap operations of these blocks",
    needs="repeated blocks, or an `nn.Sequential`",
    order=300,
    change=functools.partial(_checkpoint, "checkpoint_activations(selective=True)"),
    change_module=functools.partial(checkpoint_activations, selective=True),
    lines=("savings.checkpoint_activations(module, selective=True)",),
)
CHECKPOINT = Saving(
    name="checkpoint_activations",
    option="checkpointed blocks",
    saves="the activations inside of blocks",
    cost="a second forward of these blocks",
    needs="repeated blocks, or an `nn.Sequential`",
    order=310,
    change=functools.partial(_checkpoint, "checkpoint_activations"),
    change_module=checkpoint_activations,
    instead_of=(SELECTIVE.name,),
    lines=("savings.checkpoint_activations(module)",),
)
