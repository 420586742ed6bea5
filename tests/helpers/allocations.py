"""What the CPU's allocator says of a training step, as the profiler writes it down: the oracle of estimates."""

import contextlib

import torch
from torch.nn import functional as F

from balanced_parallel.savings.activation_checkpointing import checkpoint_blocks, find_blocks


def allocations(profile):
    """Bytes of every allocation, negative where it is freed, and the names of marks, in the order of time."""
    found = []

    def walk(event):
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name == "step":
            found.append((event.start_time_ns, None))
        for child in event.children:
            walk(child)

    for root in profile.profiler.kineto_results.experimental_event_tree():
        walk(root)
    return [size for _, size in sorted(found, key=lambda one: one[0])]


def used(build, batch, optimizer, precision="fp32", checkpoint=False, micro_batch_size=None, criterion=F.cross_entropy):
    """What the CPU's allocator says of the second step of the plain program."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        net, (inputs, targets) = build(), batch()
        if checkpoint:
            checkpoint_blocks(net, find_blocks(net))
        made = optimizer(net.parameters())
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        for _ in range(2):
            with torch.profiler.record_function("step"):
                made.zero_grad()
            size = micro_batch_size or len(inputs)
            for some, wanted in zip(inputs.split(size), targets.split(size), strict=True):
                with autocast:
                    loss = criterion(net(some), wanted)
                loss.backward()
                del loss
            made.step()
    now = peak = steps = 0
    for size in allocations(profile):
        if size is None:
            steps += 1
            peak = now
        else:
            now += size
            peak = max(peak, now)
    assert steps == 2
    return peak
