"""Memory of a plain training step on the CPU, by its allocator: the oracle of estimates."""

import contextlib
import gc
import time

import torch
from helpers.memory_problems import PROBLEMS
from torch import nn
from torch.nn import functional as F

from balanced_parallel import parallelize
from balanced_parallel.memory.operators.workspaces import AllocatorProfile
from balanced_parallel.savings.checkpointing import checkpoint_blocks, find_blocks


def used(build, batch, optimizer, precision="fp32", checkpoint=False, micro_batch_size=None, criterion=F.cross_entropy):
    """Returns the peak of the second step of the plain program, in bytes."""
    profile = AllocatorProfile()
    with profile.recorded():
        net, (inputs, targets) = build(), batch()
        if checkpoint:
            checkpoint_blocks(net, find_blocks(net))
        made = optimizer(net.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    size = micro_batch_size or len(inputs)
    for _ in range(2):
        profile.reset_peak()
        with profile.recorded():
            made.zero_grad()
            for some, wanted in zip(inputs.split(size), targets.split(size), strict=True):
                with autocast:
                    loss = criterion(net(some), wanted)
                loss.backward()
                del loss
            made.step()
    return profile.peak


def used_by_shards(rank, problem, rows, precision, accumulate):
    """Returns the peak of the second update of the plain loop under FSDP2, on this rank."""
    gc.collect()
    build, batch = PROBLEMS[problem]
    profile, rises = AllocatorProfile(), []
    with profile.recorded():
        inputs, targets = (tensor.clone() for tensor in batch(rows))
        model, criterion = parallelize(build(), nn.CrossEntropyLoss(), strategy="fsdp", precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())
    for unit in model.units:
        unit.set_custom_reduce_scatter(ReduceScatter())
    for _ in range(6):
        profile.reset_peak()
        before = profile.now
        with profile.recorded():
            optimizer.zero_grad()
            for _ in range(accumulate):
                loss = criterion(model(inputs), targets)
                loss.backward()
                del loss
            optimizer.step()
        if abs(profile.now - before) < 1024:
            rises.append(profile.peak - before)
    assert rises, "the profiler has not seen every release"
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [inputs, targets, *model.parameters(), *(one.grad for one in model.parameters()), *state]
    held = sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)
    return min(rises) + held


class ReduceScatter:
    """Makes the copy of gloo's reduce-scatter be released by this thread, which the profiler sees, and not by one of gloo."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        work = torch.distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        work.wait()
        time.sleep(0.01)  # the thread of gloo releases its reference
