"""What is different around a traced step: no collector, no log, replicas that run one after the other."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from .allocations import Count

__all__: list[str] = []


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """What a fake operator refuses is raised; torch logs it too, with a traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Cycles are collected between the updates only: the collector runs when it likes, and the same trace must be the same."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No warnings, no log, no collector."""
    with warnings.catch_warnings(action="ignore"), _without_log(), _no_collection():
        yield


@contextlib.contextmanager
def _standing_in(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def counting_random_states(count: Count) -> Iterator[None]:
    """Checkpointing keeps the state of the random numbers for each block: 5 KB, which lie on the CPU."""
    before = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = before()
        count.see(state, "temporaries", "get_rng_state")
        return state

    with _standing_in(torch, "get_rng_state", get_rng_state):
        yield


@contextlib.contextmanager
def devices_that_mix() -> Iterator[None]:
    """``torch.tensor(data, device="cpu:1")`` is on ``cpu`` under a fake mode: beside tensors of ``cpu:1`` it is one of these."""
    find: Any = FakeTensor._find_common_device

    def find_common_device(func: Any, args: Any) -> Any:
        try:
            return find(func, args)
        except RuntimeError:  # of two devices; a FakeTensorDeviceMismatchError from torch 2.13 on
            devices = {leaf.fake_device for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)}
            indexed = [device for device in devices if device.index is not None]
            if len(indexed) != 1 or any(device.type != "cpu" for device in devices):
                raise
            return indexed[0], False

    with _standing_in(FakeTensor, "_find_common_device", staticmethod(find_common_device)):
        yield


@contextlib.contextmanager
def rows_of_one_sequence() -> Iterator[None]:
    """transformers looks whether a row holds several sequences, and takes a fake tensor for one that is being compiled, of which
    it expects the worst: a mask, and with it other kernels (masking_utils.find_packed_sequence_indices). Here rows hold one."""
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with _standing_in(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
