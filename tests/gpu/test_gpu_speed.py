"""Times of steps beside the plain loop and ``nn.DataParallel``, their peaks, and host memory over many steps.

Simulated devices have no speed: the steps run there, and no time is compared.
"""

import copy
import functools
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from helpers.gpu import language_model, make_step, on, plain_step
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from balanced_parallel import DataParallelCriterion, DataParallelModel, Precision, TrainStep

SEARCH_LIMIT = 1.5  # a search for a plan in each step would be several times the step
GROWTH_LIMIT = 32.0  # MiB of host memory in 150 steps, after the first 50
SLOWER_LIMIT = 1.1
HOST_LIMIT = 1.25
PEAK_LIMIT = 1.05
HOTTEST_LIMIT = 1.1  # largest peak over the mean of all devices
LONGEST = 45.0  # seconds for the 200 steps
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(size):
    rows, positions, width, heads = size((16, 512, 1024, 16), (2, 16, 32, 2))
    layers = [
        nn.TransformerEncoderLayer(width, heads, width, 0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(positions * width, 10)), torch.randn(
        rows, positions, width
    )


def convolutions(size):
    rows, pixels, channels = size((16, 112, 64), (2, 8, 4))
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels))
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return net, torch.randn(rows, channels, pixels, pixels)


@on("twice")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux has /proc/self/statm")
@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (attention, lambda: sdpa_kernel(KERNELS, set_priority=True)),
        (
            convolutions,
            lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False),
        ),
    ],
    ids=["bf16 attention, cuDNN first", "cudnn.benchmark"],
)
def test_plans_of_cudnn_are_found_once(machine, build, setting, at_most):
    """cuDNN keeps its plans per thread. A new thread for each forward would search again, and leak the plans of the last one."""
    net, inputs = build(machine.size)
    half = inputs.to(machine.first), (torch.arange(len(inputs)) % 10).to(machine.first)
    whole = [torch.cat([tensor] * 2) for tensor in half]
    with setting():
        alone = make_step(net, [machine.first], "bf16", lr=1e-4)
        seconds = machine.median_seconds(lambda: alone(*half), machine.size(20, 1))
        together = make_step(net, machine.devices, "bf16", lr=1e-4)
        both, growth = many_steps(machine, lambda: together(*whole))
    if machine.cluster is None:
        at_most(
            f"{both * 1e3:.1f} ms of two replicas / twice the time of one",
            both / (2 * seconds),
            SEARCH_LIMIT,
        )
    at_most("MiB of the host that the later steps add", growth / 2**20, GROWTH_LIMIT)


def many_steps(machine, step):
    """Returns the median time of 200 steps, and the bytes by which the process grows after the first 50."""
    steps = machine.size(200, 8)
    times = []
    started = time.perf_counter()
    for number in range(steps):
        begun = time.perf_counter()
        step()
        machine.synchronize()
        times.append(time.perf_counter() - begun)
        if number == steps // 4:
            before = resident_bytes()
        if time.perf_counter() - started > LONGEST and number > steps // 4:
            break
    return statistics.median(times[2:]), resident_bytes() - before


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(machine, step):
    """Returns the median time of a step, and the peak of each device."""
    step()
    step()
    machine.synchronize()
    for device in set(machine.devices):
        torch.accelerator.reset_peak_memory_stats(device)
    seconds = machine.median_seconds(step, machine.size(10, 1))
    return seconds, [torch.accelerator.max_memory_allocated(device) for device in machine.devices]


@on("one", "twice")
def test_the_model_of_train_py_takes_the_time_and_the_memory_of_the_plain_loop(
    machine, at_most, record_property
):
    large = torch.accelerator.get_memory_info(machine.first)[1] > 30 * 2**30
    model, batch = language_model(
        machine, machine.size(256 if large else 64, 4), words=16384, width=1024, layers=8
    )
    batch = [tensor.to(machine.first) for tensor in batch]
    results = []
    for name in ("plain loop", "TrainStep"):
        machine.release()
        if name == "plain loop":
            step = plain_step(copy.deepcopy(model).to(machine.first), batch, machine.first, "bf16")
        else:
            step = functools.partial(
                make_step(model, machine.devices, "bf16", optimizer=torch.optim.AdamW, lr=1e-4),
                *batch,
            )
        results.append(measure(machine, step))
        del step
        if machine.cluster is None:
            record_property(
                "measured", f"{name}: {batch[0].numel() / results[-1][0]:,.0f} tokens/s"
            )
    (seconds, peaks), (own_seconds, own_peaks) = results
    if len(machine.devices) == 1:
        at_most("peak / plain loop", own_peaks[0] / peaks[0], PEAK_LIMIT)
        if machine.cluster is None:
            at_most("time / plain loop", own_seconds / seconds, SLOWER_LIMIT)


@on("all")
def test_a_step_takes_at_most_the_time_of_data_parallel_and_its_peaks_are_balanced(
    machine, at_most
):
    devices = machine.devices
    net, batch = language_model(machine, machine.size(32, 2) * len(devices))
    batch = [tensor.to(machine.first) for tensor in batch]
    model = nn.DataParallel(
        copy.deepcopy(net).to(machine.first), [device.index for device in devices]
    )
    theirs, _ = measure(machine, plain_step(model, batch, machine.first, "fp32"))
    del model
    machine.release()
    own, peaks = measure(
        machine,
        functools.partial(make_step(net, devices, optimizer=torch.optim.AdamW, lr=1e-4), *batch),
    )
    at_most("hottest peak / mean", max(peaks) * len(devices) / sum(peaks), HOTTEST_LIMIT)
    if machine.cluster is None:
        at_most(f"{own * 1e3:.1f} ms / nn.DataParallel", own / theirs, SLOWER_LIMIT)


@on("one")
def test_host_and_device_time_of_gpt2_small_beside_the_loops_by_hand(
    machine, at_most, record_property
):
    """Four micro-batches in bf16. The exact loop sums, and divides by the targets of all of them."""
    rows = machine.size(16, 4)
    model, batch = language_model(machine, rows, words=50257, width=768, layers=12)
    inputs, targets = (tensor.to(machine.first) for tensor in batch)

    def by_hand(exact):
        net = copy.deepcopy(model).to(machine.first)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

        def step():
            optimizer.zero_grad()
            count = (targets != -100).sum() if exact else 4
            for some, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                with Precision("bf16").autocast([machine.first]):
                    loss = nn.functional.cross_entropy(
                        net(some), wanted, reduction="sum" if exact else "mean"
                    )
                (loss / count).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

        return step

    own = DataParallelModel(copy.deepcopy(model), [machine.first])
    train = TrainStep(
        own,
        DataParallelCriterion(nn.CrossEntropyLoss()),
        torch.optim.AdamW(own.parameters(), lr=1e-4),
        micro_batch_size=rows // 4,
        precision="bf16",
        max_grad_norm=1.0,
    )
    programs = {
        "TrainStep": lambda: train(inputs, targets),
        "loop": by_hand(False),
        "exact loop": by_hand(True),
    }
    hosts = {name: [] for name in programs}
    wholes = {name: [] for name in programs}
    for _ in range(machine.size(12, 3)):
        for name, program in programs.items():
            machine.synchronize()
            started = time.perf_counter()
            program()
            hosts[name].append(time.perf_counter() - started)
            machine.synchronize()
            wholes[name].append(time.perf_counter() - started)
    host, whole = (
        {name: statistics.median(times[2:]) for name, times in each.items()}
        for each in (hosts, wholes)
    )
    for name in programs:
        text = f"{name}: host {host[name] * 1e3:.1f} ms of {whole[name] * 1e3:.1f} ms"
        record_property("measured", text)
    for name in ("loop", "exact loop") if machine.cluster is None else ():
        at_most(f"whole / {name}", whole["TrainStep"] / whole[name], SLOWER_LIMIT)
        at_most(f"host / {name}", host["TrainStep"] / host[name], HOST_LIMIT)
