"""Changes to torch and transformers while a step is traced, each for a reason that its docstring gives."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # torch has no public module of fake tensors

from ...runtime.trees import leaves
from .allocations import Count

__all__: list[str] = []


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Silences the log of fake tensors: torch raises an error and logs it too, with a traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turns the garbage collector off. Its runs depend on earlier objects, and equal traces must have equal events."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turns off warnings, the log of fake tensors, the garbage collector, and compilation, which refuses dispatch modes."""
    eager = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(action="ignore"), _without_log(), _no_collection(), eager:
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def counting_random_states(count: Count) -> Iterator[None]:
    """Records the random state that checkpointing saves for each block: 5 KB on the CPU.

    ``torch.get_rng_state`` returns a real tensor, and no dispatch mode sees it.
    """
    before = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = before()
        count.see(state, "temporaries", "get_rng_state")
        return state

    with _replaced(torch, "get_rng_state", get_rng_state):
        yield


@contextlib.contextmanager
def shapes_of_shards_uncounted(count: Count) -> Iterator[None]:
    """Leaves out the operators that ``DTensor`` runs on whole fake tensors, to learn the shapes of results.

    It remembers some shapes, and computes others at each call. No public hook surrounds this.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # there is no public name

    compute: Any = ShardingPropagator._propagate_tensor_meta_non_cached  # the function that the hook would surround

    def compute_uncounted(*args: Any) -> Any:
        with count.paused():
            return compute(*args)

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", compute_uncounted):
        yield


@contextlib.contextmanager
def devices_that_mix() -> Iterator[None]:
    """Lets an operator mix fake tensors of ``cpu`` and ``cpu:1``. Its result is on ``cpu:1``.

    Under a fake mode ``torch.tensor(data, device="cpu:1")`` is on ``cpu``, and no public hook decides about devices.
    """
    find: Any = FakeTensor._find_common_device  # the hook that is missing

    def find_common_device(func: Any, args: Any) -> Any:
        try:
            return find(func, args)
        except RuntimeError:  # two devices; a FakeTensorDeviceMismatchError from torch 2.13 on
            devices = {leaf.fake_device for leaf in leaves(args) if isinstance(leaf, FakeTensor)}
            indexed = [device for device in devices if device.index is not None]
            if len(indexed) != 1 or any(device.type != "cpu" for device in devices):
                raise
            return indexed[0], False

    with _replaced(FakeTensor, "_find_common_device", staticmethod(find_common_device)):
        yield


@contextlib.contextmanager
def rows_of_one_sequence() -> Iterator[None]:
    """Makes transformers treat each row as one sequence (``masking_utils.find_packed_sequence_indices``).

    It reads position ids to find rows of several sequences. It takes fake tensors for tensors under compilation, and then
    makes a mask, which selects other kernels.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with _replaced(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
