"""Rows of the arguments of a call: marks for them, their number, and their split over replicas and micro-batches.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3), silently drops samples if a second input has fewer rows,
and passes objects of unknown types whole to every device. Here sizes differ by at most one row, and inputs with different numbers
of rows are an error. So are ambiguous inputs, unless :class:`Whole`, :class:`Rows` or ``in_dims`` tell where the rows are.

An effective batch is split into as few micro-batches as possible. 14 rows of at most 3 per device, on two devices::

                 time ->
                 micro-batch 0   micro-batch 1   micro-batch 2
    device 0     rows 0-2        rows 5-7        rows 10-11
    device 1     rows 3-4        rows 8-9        rows 12-13

Rows that are cut by cost are :class:`RowShards`. Each replica takes its shard as it is, with a length of its own.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..runtime.devices import DeviceLike, move, resolve_devices
from ..runtime.values import check_number, check_type
from . import containers
from .containers import Dims, check_dim, leaf_dims, map_leaves, spread
from .outputs import PerReplica
from .plan import Combine, assign_rows, check_split, cut_by_cost, proportional_sizes, split_sizes

__all__: list[str] = []


class Arguments(NamedTuple):
    """Arguments of one call. Error messages name them ``inputs[0]`` or ``kwargs['mask']``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class Whole:
    """Marks an argument that every replica gets whole. Its tensors are copied to the device of each replica.

    Args:
        value: any value.

    Example:
        >>> images, anchors = torch.zeros(5, 3), torch.zeros(7, 4)
        >>> pieces = scatter((images, Whole(anchors)), ["cpu", "cpu"])
        >>> [(shard.shape, whole.shape) for shard, whole in pieces]
        [(torch.Size([3, 3]), torch.Size([7, 4])), (torch.Size([2, 3]), torch.Size([7, 4]))]
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, Whole) else value


class Rows:
    """Marks a list with one entry per row: images of different sizes, one mapping per image, names.

    Each replica gets a list of its entries.

    Args:
        entries: one entry per row, of any type.

    Raises:
        TypeError: if ``entries`` is a tensor or not a sequence.

    Example:
        >>> images = [torch.zeros(3, 20, 30), torch.zeros(3, 40, 40), torch.zeros(3, 10, 60)]
        >>> [len(shard) for shard in scatter(Rows(images), ["cpu", "cpu"])]
        [2, 1]
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        if isinstance(entries, torch.Tensor) or not isinstance(entries, Sequence):
            raise TypeError(f"Rows was given {containers.describe(entries)}, expected a list with one entry per row")
        self.entries = list(entries)


class Along:
    """Marks a tensor, or a list of plain values, with its rows in dimension ``dim``."""

    def __init__(self, leaf: Any, dim: int) -> None:
        self.leaf = leaf
        self.dim = dim


MARKS = (Whole, Rows, Along)


def without_mark(value: Any) -> Any:
    """Returns the value inside a mark, or ``value`` itself if it has none."""
    if isinstance(value, Rows):
        return value.entries
    return value.value if isinstance(value, Whole) else value


def mark(arguments: Arguments, dims: Dims, function: Callable[..., Any], *, first: int = 0, unnamed: int = 0) -> Arguments:
    """Marks ``arguments`` with the dimensions of their rows.

    Args:
        arguments: arguments of a call.
        dims: a sequence by position, a mapping by position or name, or one dimension for all. ``None`` marks nothing.
        function: the function that is called. Its signature gives the position of a name.
        first: position in the call of ``arguments.inputs[0]``.
        unnamed: number of further arguments that the function has before ``arguments.inputs[0]``. An output that is a tuple fills
            several arguments of a criterion, but is one argument of the call.

    Raises:
        ValueError: if ``dims`` has an entry for an argument that does not exist.
    """
    if dims is None:
        return arguments
    count = first + len(arguments.inputs)
    of_place: dict[int | str, Dims] = {}
    if isinstance(dims, int):
        of_place = dict.fromkeys([*range(first, count), *arguments.kwargs], dims)
    elif isinstance(dims, Mapping):
        names = _names(function)
        for key, of_argument in dims.items():
            of_place[_place_of(key, names, unnamed, count, arguments.kwargs)] = of_argument
    elif len(dims) > count:
        raise ValueError(
            f"the dimensions {dims!r} are given for {len(dims)} arguments, but {count} were passed by position; give the others "
            "by name, as in {'mask': None}"
        )
    else:
        of_place = dict(enumerate(dims))
    inputs = [
        mark_leaves(value, of_place[place], f"inputs[{place - first}]") if place in of_place else value
        for place, value in enumerate(arguments.inputs, first)
    ]
    kwargs = {
        name: mark_leaves(value, of_place[name], f"kwargs[{name!r}]") if name in of_place else value
        for name, value in arguments.kwargs.items()
    }
    return Arguments(tuple(inputs), kwargs)


def dims_of_method(dims: Dims, method: Callable[..., Any], name: str) -> Dims:
    """Returns the part of ``in_dims`` for the arguments of a method other than ``forward``.

    Raises:
        ValueError: if ``in_dims`` has positions, which are those of ``forward``.
    """
    if dims is None or isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping) or any(isinstance(key, int) for key in dims):
        raise ValueError(
            f"in_dims={dims!r} has positions of arguments of forward, which do not apply to {name!r}: give in_dims by name, as "
            "in {'mask': None}, or wrap arguments in Whole(...) or Rows(...) at the call"
        )
    names = _names(method)
    return {key: of_argument for key, of_argument in dims.items() if names is None or key in names}


def mark_lists(node: Any, dim: int) -> Any:
    """Marks the entries of lists whose entries are known to have rows each.

    Without marks, a shard with as many rows as the list has entries would be ambiguous.
    """
    if isinstance(node, list) and containers.open_container(node) is not None:
        return mark_leaves(node, dim, "")
    container = None if isinstance(node, torch.Tensor) else containers.open_container(node)
    if container is None:
        return node
    children = [mark_lists(child, dim) for child in container.children]
    changed = any(new is not old for new, old in zip(children, container.children, strict=True))
    return container.rebuild(children) if changed else node


def _place_of(key: Any, names: list[str] | None, unnamed: int, count: int, kwargs: Mapping[str, Any]) -> int | str:
    """Returns the position of an argument in the call, or its name if it is passed by name."""
    if names is None or key in kwargs:
        return key if isinstance(key, int) else str(key)
    if isinstance(key, str) and key in names:
        return names.index(key) - unnamed
    if not isinstance(key, int) or not 0 <= key + unnamed < len(names):
        raise ValueError(
            f"dimensions are given for {key!r}, expected one of the arguments {', '.join(names)}, or the position of one"
        )
    return names[key + unnamed] if key >= count else key


def _names(function: Callable[..., Any]) -> list[str] | None:
    """Returns the names of a function's arguments, or None if it accepts any arguments or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def mark_leaves(value: Any, dims: Dims, place: str) -> Any:
    """Returns a value with its leaves marked, as :func:`mark` marks those of an argument. Marks that it has stay."""
    if isinstance(value, (*MARKS, PerReplica)):  # they carry their own dimensions
        return value
    if dims is None:
        return Whole(value)
    dims_of_leaves = leaf_dims(value, dims, 0, place)

    def mark_leaf(leaf: Any) -> Any:
        dim = next(dims_of_leaves)
        if isinstance(leaf, (*MARKS, PerReplica)):
            return leaf
        has_rows = (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) or containers.is_row_list(leaf)
        return Whole(leaf) if dim is None else Along(leaf, dim) if has_rows else leaf

    return containers.map_leaves(mark_leaf, value)


def count_rows(node: Any, dim: int = 0, expected: int | None = None, name: str = "inputs") -> int | None:
    """Returns the number of rows, which all parts of ``node`` with rows must have; None if no part has rows.

    Args:
        node: arguments, or another structure.
        dim: dimension of the rows in tensors that are not marked.
        expected: number of rows of the inputs that ``node`` belongs to. It decides if the entries of a list are rows or have rows
            each.
        name: of ``node`` in messages.

    Raises:
        ValueError: if two parts have different numbers of rows, a tensor has no dimension ``dim``, or the entries of a list may
            be rows or have rows.
        TypeError: for an array, a PackedSequence, or an object that holds tensors. Replicas would get them whole by mistake.
    """
    only = node.inputs[0] if type(node) is Arguments and len(node.inputs) == 1 and not node.kwargs else node
    only = only[0] if type(only) is tuple and len(only) == 1 else only
    if type(only) is torch.Tensor and 0 <= dim < only.dim():  # shortcut for the most frequent input
        return only.size(dim)
    first: tuple[str, Any, int] | None = None
    ambiguous: dict[str, list[Any]] = {}
    parts = [(node.inputs, name), (node.kwargs, "kwargs")] if isinstance(node, Arguments) else [(node, name)]
    for place, leaf, holder in (entry for part, called in parts for entry in _leaves(part, called)):
        rows = _leaf_rows(leaf, dim, place)
        if rows is None:
            continue
        if holder is not None and type(leaf) is not Along:
            ambiguous[holder[0]] = holder[1]
        if first is not None and first[2] != rows:
            raise ValueError(
                f"the {name} have different numbers of rows along dimension {dim}: {first[0]} is {_described(first[1])} "
                f"({first[2]} rows), {place} is {_described(leaf)} ({rows} rows); give all the same number of rows, wrap an "
                "input that every replica needs whole in Whole(...), a list with one entry per row in Rows(...), or give in_dims="
            )
        if first is None or first[0].startswith(tuple(ambiguous)):
            first = place, leaf, rows
    for place, entries in ambiguous.items():
        assert first is not None
        if (first[0].startswith(place) and first[2] != expected) or len(entries) == first[2]:
            raise ValueError(
                f"{place} is a list of {len(entries)} entries of one type (the first is {containers.describe(entries[0])}): each "
                "entry may be a row, or have all rows. Wrap the list in Rows(...) if its entries are rows, make it a tuple or "
                "give in_dims= if each entry has all rows, or wrap it in Whole(...)"
            )
    return None if first is None else first[2]


def _leaves(
    node: Any, name: str, holder: tuple[str, list[Any]] | None = None
) -> Iterator[tuple[str, Any, tuple[str, list[Any]] | None]]:
    """Yields each leaf with its key path, and with the outermost list around it whose entries could be rows."""
    container = containers.open_container(node)
    if container is None:
        yield name.removeprefix("."), node, holder
        return
    if holder is None and isinstance(node, list) and _may_be_rows(node):
        holder = name.removeprefix("."), node
    for place, child in zip(container.places, container.children, strict=True):
        yield from _leaves(child, name + place, holder)


def _may_be_rows(entries: list[Any]) -> bool:
    """Returns True if the entries have one type, and tensors among them one number of dimensions and one dtype."""
    kinds = {(type(entry), entry.dim(), entry.dtype) if isinstance(entry, torch.Tensor) else type(entry) for entry in entries}
    return len(kinds) == 1 and not kinds & {*MARKS, PerReplica, type(None)}


def _described(leaf: Any) -> str:
    leaf = leaf.leaf if type(leaf) is Along else leaf
    if isinstance(leaf, Rows):
        return f"Rows of {len(leaf.entries)} entries"
    return f"outputs of {len(leaf)} replicas" if isinstance(leaf, PerReplica) else containers.describe(leaf)


def _leaf_rows(leaf: Any, dim: int, place: str) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return _tensor_rows(leaf, dim, place)
    if type(leaf) is Along:
        return _tensor_rows(leaf.leaf, leaf.dim, place) if isinstance(leaf.leaf, torch.Tensor) else len(leaf.leaf)
    if isinstance(leaf, Rows):
        return len(leaf.entries)
    if isinstance(leaf, PerReplica):
        return None if None in leaf.sizes else sum(size or 0 for size in leaf.sizes)
    if containers.is_row_list(leaf):
        return len(leaf) or None
    if isinstance(leaf, PackedSequence):
        raise TypeError(f"{place} is a PackedSequence, which cannot be split by rows: pass the padded tensor and the lengths")
    if getattr(leaf, "ndim", 0) and hasattr(leaf, "__array__"):
        raise TypeError(f"{place} is an array of shape {tuple(leaf.shape)}, expected a tensor: use torch.as_tensor")
    if _holds_tensors(leaf, 3):
        raise TypeError(
            f"{place} is {containers.describe(leaf)} that holds tensors, which cannot be split by rows: pass its tensors, or a "
            "dataclass or a mapping of them, Rows(list) for a list with one object per row, or Whole(...) to pass it whole to "
            "every replica"
        )
    return None


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*MARKS, torch.nn.Module, type, functools.partial)) or inspect.isroutine(value):
        return False
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    else:
        children = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in _slots(value.__class__))]
    return any(_holds_tensors(child, depth - 1) for child in children)


@functools.lru_cache
def _slots(kind: type) -> list[str]:
    """Returns the names of the attributes in ``__slots__``, of base classes too."""
    return [name for base in kind.__mro__ for name, value in vars(base).items() if inspect.ismemberdescriptor(value)]


def _tensor_rows(tensor: torch.Tensor, dim: int, place: str) -> int | None:
    if tensor.dim() == 0:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{place} is {containers.describe(tensor)}, expected rows in dimension {dim}: give in_dims= for arguments with rows "
            "in another dimension, or wrap it in Whole(...)"
        )
    return tensor.size(dim)


def cut(node: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Splits ``node`` into ``len(sizes)`` pieces of ``sizes[i]`` rows. Tensors become views, nothing is copied.

    Values without rows are in all pieces. Marks stay, so that pieces can be split again. :func:`move_leaves` removes them.
    """
    if len(sizes) == 1:
        return [node]
    if type(node) is Arguments and not node.kwargs:
        return [Arguments(inputs, {}) for inputs in cut(node.inputs, sizes, dim)]
    starts = [0, *itertools.accumulate(sizes)][: len(sizes)]

    def cut_leaf(leaf: Any) -> list[Any]:
        if isinstance(leaf, RowShards) and len(leaf) == len(sizes):
            return list(leaf)
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_nested:
                layout = "nested" if leaf.is_nested else str(leaf.layout)
                raise TypeError(
                    f"a {layout} tensor cannot be split by rows, expected a dense one: pass .to_dense() of a sparse tensor, the "
                    "padded tensor and the lengths of a nested one, or wrap it in Whole(...) if every replica needs all of it"
                )
            return [leaf.narrow(dim, *at) for at in zip(starts, sizes, strict=True)] if leaf.dim() else [leaf] * len(sizes)
        if type(leaf) is Along:
            return [Along(piece, leaf.dim) for piece in cut(leaf.leaf, sizes, leaf.dim)]
        if containers.is_row_list(leaf):
            return [leaf[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        if isinstance(leaf, Rows):
            return [Rows(leaf.entries[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        if isinstance(leaf, PerReplica) and None not in leaf.sizes:
            return [leaf.narrow(*at) for at in zip(starts, sizes, strict=True)]
        return [leaf] * len(sizes)

    return containers.unzip_leaves(cut_leaf, node, len(sizes))


def move_leaves(node: Any, device: torch.device | None) -> Any:
    """Returns ``node`` with all tensors on ``device``, or where they are if that is None, and without marks."""

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if device is None else move(leaf, device)
        if isinstance(leaf, Whole):
            return move_leaves(leaf.value, device)
        if isinstance(leaf, Rows):
            return [move_leaves(entry, device) for entry in leaf.entries]
        if type(leaf) is Along:
            return move_leaves(leaf.leaf, device)
        return leaf.on(device) if isinstance(leaf, PerReplica) and device is not None else leaf

    return containers.map_leaves(move_leaf, node)


class RowShards(PerReplica):
    """One argument, or one part of it, in one shard per replica."""


def as_shards(parts: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None = None) -> Any:
    """Merges the arguments of the replicas into one structure. Each leaf becomes :class:`RowShards`, unless there is one replica.

    Args:
        parts: arguments of each replica, of the same structure.
        sizes: number of rows of each.
        order: position of each row in the batch, for the outputs.
    """
    if len(parts) == 1:
        return parts[0]
    return containers.zip_leaves(lambda place, leaves: RowShards(leaves, sizes).in_order(order), parts)


def find_shards(arguments: Arguments) -> RowShards | None:
    """Returns an argument that is cut already, or None. If one is, all are."""
    for value in (*arguments.inputs, *arguments.kwargs.values()):
        if type(value) is torch.Tensor:  # shortcut for the most frequent argument
            return None
        for _, leaf in containers.leaves(value):
            if isinstance(leaf, RowShards):
                return leaf
            if isinstance(leaf, torch.Tensor):
                return None
    return None


def take_rows(node: Any, rows: Sequence[int], dim: int = 0) -> Any:
    """Returns copies of some rows of ``node``, in the order of ``rows``. Values without rows stay.

    Args:
        node: arguments with marks, as :func:`cut` takes them.
        rows: indices.
        dim: dimension of the rows in tensors that are not marked.

    Raises:
        TypeError: for outputs of replicas, whose rows are on several devices.
    """
    index: dict[torch.device, torch.Tensor] = {}

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _select(leaf, dim) if leaf.dim() else leaf
        if type(leaf) is Along:
            return Along(take_rows(leaf.leaf, rows, leaf.dim), leaf.dim)
        if containers.is_row_list(leaf):
            return _entries(leaf, type(leaf))
        if isinstance(leaf, Rows):
            return Rows(_entries(leaf.entries, list))
        if isinstance(leaf, PerReplica) and not isinstance(leaf, RowShards):
            raise TypeError("rows were given as outputs of replicas, expected tensors on the host: call gather(device='cpu')")
        return leaf

    def _entries(entries: Sequence[Any], kind: Any) -> Any:
        return kind(entries[row] for row in rows)

    def _select(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if tensor.device not in index:
            index[tensor.device] = torch.tensor(rows, dtype=torch.long, device=tensor.device)
        return tensor.index_select(dim, index[tensor.device])

    return containers.map_leaves(take, node)


def pinned(node: Any) -> Any:
    """Returns ``node`` with tensors of the host in page-locked memory, so that copies to a device do not wait."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if leaf.is_cpu and leaf.layout == torch.strided else leaf
        if type(leaf) is Along:
            return Along(pinned(leaf.leaf), leaf.dim)
        return Rows([pinned(entry) for entry in leaf.entries]) if isinstance(leaf, Rows) else leaf

    return containers.map_leaves(pin, node)


def scatter(
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    dim: int = 0,
    *,
    split: Sequence[float] | None = None,
) -> list[Any]:
    """Splits ``inputs`` by rows over devices.

    Tensors with at least one dimension are split along ``dim``, and their shards are moved to the devices. Gradients flow back
    to ``inputs``. Lists of strings or numbers are split in the same way, one entry per row. 0-dim tensors, plain values and other
    objects go to every replica. Containers keep their type.

    Args:
        inputs: a tensor, or tuples, named tuples, lists, mappings and dataclasses of tensors.
        device_ids: devices, as in :class:`DataParallelModel`.
        dim: dimension of the rows.
        split: one weight per device. ``None`` means sizes that differ by at most one row.

    Returns:
        A list with one structure like ``inputs`` per device that gets rows. Without rows, a list with one structure.

    Raises:
        TypeError: ``device_ids`` is not a list of devices, or ``dim`` not an integer.
        ValueError: if inputs have different numbers of rows. The message names both inputs and their shapes.

    Example:
        >>> shards = scatter({"x": torch.zeros(9, 5), "scale": 2.0}, ["cpu"] * 4)
        >>> [shard["x"].shape[0] for shard in shards]
        [3, 2, 2, 2]
        >>> shards[3]["x"].shape, shards[3]["scale"]
        (torch.Size([2, 5]), 2.0)
        >>> [shard.shape for shard in scatter(torch.zeros(8, 5), ["cpu", "cpu"], split=[3, 1])]
        [torch.Size([6, 5]), torch.Size([2, 5])]
    """
    devices = resolve_devices(device_ids)
    check_dim(dim)
    used, sizes = assign_rows(count_rows(inputs, dim), devices, check_split(split, len(devices)))
    pieces = [inputs] if sizes is None else cut(inputs, sizes, dim)
    return [move_leaves(piece, device) for piece, device in zip(pieces, used, strict=True)]


def shard_by_cost(
    samples: Sequence[Any],
    shards: int,
    *,
    cost: Callable[[Any], float],
    collate: Callable[[list[Any]], Any],
    combine: Combine | None = None,
) -> tuple[Any, Any]:
    """Splits samples of unequal cost into shards, and pads each shard on its own.

    Returns inputs for a :class:`DataParallelModel`, and targets for a :class:`DataParallelCriterion`. Each tensor is a
    :class:`PerReplica` of the shards. The gathered outputs have the order of the samples.

    Args:
        samples: one for each row.
        shards: the number of devices, ``len(model.devices)``.
        cost: of a sample, such as ``len``.
        collate: makes ``(inputs, targets)`` of any list of samples, or a mapping of inputs with ``"labels"``.
        combine: cost of a shard, from the costs of its rows, as in :class:`TrainStep`.

    Raises:
        TypeError: an argument of another type.
        ValueError: there are no samples, a cost is negative or not finite, or ``collate`` returns something else.

    Example:
        >>> samples = [torch.ones(length) for length in (9, 3, 4, 2, 3, 2, 1, 1)]
        >>> pad = torch.nn.utils.rnn.pad_sequence
        >>> inputs, targets = shard_by_cost(samples, 3, cost=len, collate=lambda some: (pad(some, True), torch.ones(len(some))))
        >>> [tuple(shard.shape) for shard in inputs]
        [(1, 9), (3, 4), (4, 2)]
        >>> outputs = DataParallelModel(torch.nn.Identity(), ["cpu"] * 3)(inputs)
        >>> outputs.gather().sum(1)
        tensor([9., 3., 4., 2., 3., 2., 1., 1.])
    """
    check_type("samples", samples, Sequence, "a list with one sample for each row")
    check_number("shards", shards, "the number of devices", at_least=1, whole=True)
    for name, function in (("cost", cost), ("collate", collate), ("combine", combine or sum)):
        check_type(name, function, Callable, "a function")
    if not samples:
        raise ValueError("there are no samples, expected at least one")
    runs = cut_by_cost([cost(sample) for sample in samples], shards, combine) if shards > 1 else [list(range(len(samples)))]
    pairs = [inputs_and_targets(collate([samples[row] for row in run])) for run in runs]
    sizes, order = [len(run) for run in runs], [row for run in runs for row in run]
    inputs, targets = zip(*pairs, strict=True)
    return as_shards(inputs, sizes, order), as_shards(targets, sizes, order)


def inputs_and_targets(collated: Any) -> tuple[Any, Any]:
    """Splits the result of a ``collate``.

    Raises:
        ValueError: it is not a pair, nor a mapping with labels.
    """
    if isinstance(collated, Mapping) and "labels" in collated:
        return collated, collated["labels"]
    if isinstance(collated, (tuple, list)) and len(collated) == 2:
        return collated[0], collated[1]
    raise ValueError(
        f"collate returned {containers.describe(collated)}, expected (inputs, targets), or a mapping of inputs with 'labels', "
        "which are the targets"
    )


def as_arguments(inputs: Any) -> Arguments:
    """Converts ``inputs`` to the arguments of a call: a mapping to keyword arguments, a tuple to positional arguments."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(spread(inputs), {})


def count_micro_batches(rows: int, micro_batch_size: int | None, shares: int | Sequence[float]) -> int:
    """Returns the smallest number of micro-batches with at most ``micro_batch_size`` rows per device; 0 without rows.

    Args:
        rows: number of rows of the whole batch.
        micro_batch_size: largest number of rows per device; ``None`` means no limit.
        shares: number of equal devices, or the weight of each device.
    """
    if micro_batch_size is None or rows == 0:
        return min(rows, 1)
    count = -(-rows // (micro_batch_size * (shares if isinstance(shares, int) else len(shares))))
    while max(split_sizes(-(-rows // count), shares)) > micro_batch_size:  # the largest share decides
        count += 1
    return count


def cut_batch(
    arguments: Arguments, targets: tuple[Any, ...], sizes: Sequence[int], dims: tuple[int, int]
) -> list[tuple[Arguments, tuple[Any, ...]]]:
    """Splits arguments along ``dims[0]`` and targets along ``dims[1]`` into micro-batches of ``sizes[i]`` rows. Copies nothing.

    Raises:
        ValueError: if the number of rows of the targets is not that of the arguments, or a multiple of it.
    """
    target_rows = count_rows(targets, dims[1], sum(sizes), "targets")
    target_sizes = sizes if target_rows is None else proportional_sizes(target_rows, sizes)
    arguments, targets = mark_lists(arguments, dims[0]), mark_lists(targets, dims[1])
    return list(zip(cut(arguments, sizes, dims[0]), cut(targets, target_sizes, dims[1]), strict=True))


def detach_outputs(outputs: PerReplica, order: Sequence[int] | None) -> PerReplica:
    """Returns the outputs of the replicas, detached from the autograd graph. ``order`` is that of their rows."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return outputs.map(lambda output: map_leaves(detach, output)).in_order(order)


def join_outputs(micro_batches: Sequence[PerReplica], dims: Dims) -> PerReplica:
    """Joins the outputs of all micro-batches as the outputs of one batch, in the order of the rows."""
    entries = [output for outputs in micro_batches for output in outputs]
    joined = PerReplica(entries, [size for outputs in micro_batches for size in outputs.sizes], dims)
    orders = [outputs.order for outputs in micro_batches]
    return joined.in_order(None if None in orders else [row for order in orders for row in order or ()])
