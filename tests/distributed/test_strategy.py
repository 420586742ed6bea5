"""The strategy of ``parallelize``: what fits one device, and what is impossible."""

import logging

import pytest
import torch
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelModel, parallelize
from balanced_parallel.distributed import strategy
from balanced_parallel.distributed.ddp import DistributedModel
from balanced_parallel.distributed.fsdp import ShardedModel


def test_strategies_that_are_impossible_in_one_process_have_clear_errors():
    for name in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=f"strategy='{name}' in one process, expected 'auto' or 'replicas'.*torchrun"):
            parallelize(build_net(), nn.MSELoss(), ["cpu"], strategy=name)
    with pytest.raises(ValueError, match="strategy='zero', expected one of 'auto', 'replicas', 'ddp', 'fsdp'"):
        parallelize(build_net(), nn.MSELoss(), ["cpu"], strategy="zero")
    with pytest.raises(ValueError, match="compress='bf16' with strategy='replicas', expected strategy='ddp'"):
        parallelize(build_net(), nn.MSELoss(), ["cpu"], strategy="replicas", compress="bf16")
    with pytest.raises(ValueError, match="compress='bf16' in one process, expected None"):
        parallelize(build_net(), nn.MSELoss(), ["cpu"], compress="bf16")
    with pytest.raises(ValueError, match="compress='int8', expected 'bf16', 'fp16' or None"):
        parallelize(build_net(), nn.MSELoss(), ["cpu"], compress="int8")


def check_auto(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    strategy._log.addHandler(handler)
    strategy._log.setLevel(logging.INFO)
    free_bytes = strategy.free_bytes
    example = torch.randn(400, 4), class_targets(400)
    size = 4 * sum(parameter.nbytes for parameter in build_net().parameters())
    found = []
    try:
        for mine, settings in (
            (2 * size, {}),
            (2 * size - 1, {}),
            (2 * size, {"example": example}),
            (2**30, {"example": example}),
        ):
            # one rank has less than the other; the two share the memory of this machine
            strategy.free_bytes = lambda device, mine=mine: 2 * mine if rank == 0 else 2**40
            model, _ = parallelize(build_net(), nn.CrossEntropyLoss(), **settings)
            found.append(type(model))
        assert isinstance(parallelize(build_net().requires_grad_(False)), DataParallelModel)
    finally:
        strategy._log.removeHandler(handler)
        strategy.free_bytes = free_bytes
    assert found == [DistributedModel, ShardedModel, ShardedModel, DistributedModel]
    with pytest.raises(ValueError, match="strategy='replicas' with 2 ranks, expected 'auto', 'ddp' or 'fsdp'"):
        parallelize(build_net(), nn.CrossEntropyLoss(), strategy="replicas")
    return lines


def test_auto_shards_a_model_that_is_too_large_for_one_device():
    first, second = run_ranks(2, check_auto)
    assert not second
    assert len(first) == 4
    state = "needs 1.02 KiB (parameters, gradients and AdamW's state) of 1.02 KiB"
    assert first[0] == f"strategy='auto' is 'ddp': under 'ddp' a rank {state}"
    assert first[1].startswith("strategy='auto' is 'fsdp'")
    assert "(an update by memory.estimate)" in first[2]


def check_alone(rank):
    for name in ("auto", "replicas", "ddp", "fsdp"):  # one rank has nothing to share
        assert isinstance(parallelize(build_net(), nn.CrossEntropyLoss(), strategy=name)[0], DataParallelModel)
    return True


def test_one_rank_is_a_replica_with_every_strategy():
    assert run_ranks(1, check_alone) == [True]


def check_compression(rank):
    inputs, targets = torch.randn(6, 4), class_targets(6)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model, criterion = parallelize(build_net(), nn.CrossEntropyLoss(), compress=name)
        criterion(model(inputs), targets).backward()
        assert all(torch.equal(one.grad, one.grad.to(dtype).float()) for one in model.parameters())
    large = strategy.free_bytes
    strategy.free_bytes = lambda device: 0
    try:  # compression is what "ddp" has
        assert isinstance(parallelize(build_net(), nn.CrossEntropyLoss(), compress="bf16")[0], DistributedModel)
    finally:
        strategy.free_bytes = large
    return True


def test_compressed_gradients_are_reduced_in_half_precision():
    assert run_ranks(2, check_compression) == [True, True]
