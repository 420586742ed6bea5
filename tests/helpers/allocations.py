"""Memory of a plain training step on the CPU, by its allocator: the oracle of estimates."""

import contextlib

import torch
from torch.nn import functional as F

from balanced_parallel.runtime.allocator_profile import AllocatorProfile
from balanced_parallel.savings.activation_checkpointing import checkpoint_blocks, find_blocks


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
