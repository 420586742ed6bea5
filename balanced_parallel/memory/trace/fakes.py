"""Surroundings of a trace: fake copies of modules and batches, fake devices, and changes to torch."""

import contextlib
import copy
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

# torch has no public module of fake tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...strategies.tracing import TracedBatch
from .allocations import Count
from .private import leaves_of_tree, shared_id
from .quantized import FourBitLinear, is_four_bit
from .values import is_small

HOME = torch.device("cpu")


def fake_copy(parts: tuple[Any, ...], mode: FakeTensorMode) -> Any:
    """Returns deep copies of modules and functions with fake tensors. Ties stay."""

    def fake(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = fake_like(tensor, mode, HOME)
        return memo[id(tensor)]

    with (
        patch.object(Tensor, "__deepcopy__", fake),
        patch.object(nn.Parameter, "__deepcopy__", fake),
    ):
        modules = [
            module for part in parts if isinstance(part, nn.Module) for module in part.modules()
        ]
        try:
            return copy.deepcopy(parts, _four_bit_layers(modules, mode))
        # an attribute cannot be copied (a registered operator, a lock): share all plain objects
        except TypeError:
            return copy.deepcopy(parts, _shared(modules) | _four_bit_layers(modules, mode))


def _four_bit_layers(modules: list[nn.Module], mode: FakeTensorMode) -> dict[int, object]:
    """Returns a memo for ``deepcopy`` with stand-ins for layers of four bits."""

    def empty(*shape: int, **settings: Any) -> Tensor:
        with mode:
            return torch.empty(*shape, device=HOME, **settings)

    memo: dict[int, object] = {}
    for module in filter(is_four_bit, modules):
        bias = module.bias
        copied = fake_like(bias, mode, HOME) if isinstance(bias, Tensor) else None
        memo[id(module)] = FourBitLinear(module, copied, empty)
    return memo


def _shared(modules: list[nn.Module]) -> dict[int, object]:
    """Returns a memo for ``deepcopy`` that shares attributes of modules, except modules, tensors
    and plain containers.
    """
    copied = (nn.Module, Tensor, list, dict, tuple, set)
    return {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if not isinstance(value, copied)
    }


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Returns a tensor without memory, like another one but for its device."""
    settings: dict[str, Any] = {"dtype": tensor.dtype, "device": device}
    with mode, torch.no_grad():
        if tensor.layout == torch.strided:
            copied = torch.empty_strided(tensor.size(), tensor.stride(), **settings)
        else:
            copied = torch.empty(tensor.shape, **settings)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


def fake_batch(
    batch: TracedBatch,
    mode: FakeTensorMode,
    device: torch.device,
    count: Count,
) -> TracedBatch:
    """Returns a fake copy of a batch.

    ``count`` gets its tensors, and the values of small ones.
    """

    def fake(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        copied = fake_like(leaf, mode, device)
        count.see(copied, "inputs")
        if is_small(leaf):
            count.values.real[copied] = leaf.clone()
        return copied

    return batch.map(fake)


def names_of(modules: Mapping[str, object]) -> dict[int, str]:
    """Returns the names of all modules under some roots, by :func:`shared_id`, and of functions, by
    the id of their code.
    """
    names: dict[int, str] = {}
    for root, part in modules.items():
        names[id(getattr(getattr(part, "func", part), "__code__", None))] = root
        if isinstance(part, nn.Module):
            for name, module in part.named_modules():
                names.setdefault(
                    shared_id(module), ".".join(filter(None, (root, name))) or type(module).__name__
                )
    return names


def fake_devices(count: int) -> list[torch.device]:
    """Returns ``count`` devices for fake tensors: CPUs, because autograd aborts on accelerators
    that do not exist.

    The first has no index: a tensor that a model makes without naming a device is on it.
    """
    return [HOME, *(torch.device("cpu", index) for index in range(1, count))]


def host_of(count: int) -> torch.device:
    """Returns the fake device that represents the host of ``count`` fake devices."""
    return torch.device("cpu", count)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turns off the garbage collector.

    Its runs depend on earlier objects, and equal traces must have equal events. It visits all
    imported modules, more than half of the time that a plan takes between its traces.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turns off warnings, logs, the garbage collector, and compilation, which refuses dispatch
    modes.
    """
    eager = torch.compiler.set_stance("force_eager")
    level = logging.root.manager.disable
    with warnings.catch_warnings(action="ignore"), eager, uncollected():
        logging.disable()  # Torch raises errors and logs them too; a model logs in each process.
        try:
            yield
        finally:
            logging.disable(level)


Context = contextlib.AbstractContextManager[object]


def counting_random_states(count: Count) -> Context:
    """Records the random state that checkpointing saves for each block, a real tensor of 5 KB that
    no dispatch mode sees.
    """
    before = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = before()
        count.see(state, "temporaries", "get_rng_state")
        return state

    return patch.object(torch, "get_rng_state", get_rng_state)


def counting_resizes(count: Count) -> Context:
    """Records storages of FSDP, which frees and allocates them by a change of their size."""
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> object:
        result = before(storage, size)
        count.resize(storage)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resize)


def shapes_of_shards_uncounted(count: Count) -> Context:
    """Leaves out the operators that ``DTensor`` runs on whole fake tensors to learn shapes.

    No public hook surrounds them.
    """
    # there is no public name
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # The hook would surround this function.
    compute: Callable[..., object] = ShardingPropagator._propagate_tensor_meta_non_cached

    def compute_uncounted(*args: object) -> object:
        with count.paused():
            return compute(*args)

    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", compute_uncounted)


def devices_that_mix() -> Context:
    """Lets an operator mix fake tensors of ``cpu``, such as ``torch.tensor(data, device="cpu:1")``,
    and ``cpu:1``.
    """
    find: Callable[..., object] = FakeTensor._find_common_device  # the hook that is missing

    def find_common_device(func: object, args: object) -> object:
        try:
            return find(func, args)
        except RuntimeError:  # two devices; a FakeTensorDeviceMismatchError from torch 2.13 on
            devices = {
                leaf.fake_device for leaf in leaves_of_tree(args) if isinstance(leaf, FakeTensor)
            }
            indexed = [device for device in devices if device.index is not None]
            if len(indexed) != 1 or any(device.type != "cpu" for device in devices):
                raise
            return indexed[0], False

    return patch.object(FakeTensor, "_find_common_device", staticmethod(find_common_device))


def rows_of_one_sequence() -> Context:
    """Makes transformers treat each row as one sequence.

    It takes fake tensors for tensors under compilation, and makes masks of their position ids,
    which select other kernels.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None)


FORKS = sys.platform == "linux"
