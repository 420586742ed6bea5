"""Devices of the tests in tests/gpu: GPUs, or simulated devices in their place. And the networks and steps that they compare."""

import contextlib
import copy
import functools
import gc
import runpy
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    Precision,
    TrainStep,
)

TASKS = Path(__file__).parents[2] / "scripts" / "tasks.py"
SYNCHRONIZES = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp
LOSS_LIMIT = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # relative, over the updates
# Layouts of simulated devices, of which tests of other folders prove the numbers.
SIMULATED = {"all": [], "behind the CPU": [pytest.mark.slow]}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
]  # libraries of GPUs warn about settings of this machine


def on(*layouts):
    """Runs a test on layouts of the GPUs of this machine, and on one or two of them of two simulated devices.

    Replicas on one device share its parameters. The first device twice therefore reaches the split, the workers and the sums of
    gradients. The CPU beside it reaches broadcasts, copies between devices and several owners of optimizer state.
    """
    gpus = [pytest.param(("gpu", layout), id=f"gpu: {layout}", marks=ON_GPU) for layout in layouts]
    simulated = [
        pytest.param(("sim", name), id=f"sim: {name}", marks=SIMULATED.get(name, []))
        for name in [name for name in SIMULATED if name in layouts] or layouts[-1:]
    ]
    return pytest.mark.parametrize("machine", [*gpus, *simulated], indirect=True)


def make_layout(name, accelerators):
    """Returns the list of devices with this name. The test is skipped if it needs another GPU."""
    first = accelerators[0]
    cpu = torch.device("cpu")
    if "all" in name and len(accelerators) == 1:
        pytest.skip("needs two GPUs, and this machine has one")
    return {
        "one": [first],
        "twice": [first, first],
        "beside the CPU": [first, cpu],
        "behind the CPU": [cpu, first],
        "all": accelerators,
        "all in reverse": accelerators[::-1],
    }[name]


@dataclass(frozen=True)
class Machine:
    """The devices of the replicas of a test; one may be there twice. ``cluster`` has the simulated ones, and is None for GPUs."""

    devices: list
    cluster: object = None

    @property
    def accelerators(self):
        return [device for device in dict.fromkeys(self.devices) if device.type != "cpu"]

    @property
    def first(self):
        return self.accelerators[0]

    def size(self, on_gpus, simulated):
        """Returns the size of a problem. Simulated devices compute on the CPU."""
        return on_gpus if self.cluster is None else simulated

    def synchronize(self):
        for device in self.accelerators:
            torch.accelerator.synchronize(device)

    def release(self):
        """Frees the memory of earlier tests."""
        gc.collect()
        self.synchronize()
        torch.get_device_module(self.first).empty_cache()

    def median_seconds(self, function, times=10):
        """Returns the median time of some calls, after two more. Each ends with a wait for all devices."""
        measured = []
        for _ in range(times + 2):
            self.synchronize()
            started = time.perf_counter()
            function()
            self.synchronize()
            measured.append(time.perf_counter() - started)
        return statistics.median(measured[2:])

    @contextlib.contextmanager
    def forbidding_waits(self):
        """Raises an error where the host waits for a device."""
        with self.cluster.forbidding_waits() if self.cluster else _debug_synchronization("error"):
            yield

    def count_waits(self, function):
        """Returns how often the host waited for a device during a call."""
        if self.cluster:
            before = len(self.cluster.waits)
            function()
            return len(self.cluster.waits) - before
        with warnings.catch_warnings(record=True) as record, _debug_synchronization("warn"):
            warnings.simplefilter("always")
            function()
        return sum(SYNCHRONIZES in str(warning.message) for warning in record)


def sleep(device):
    """Puts a sleep of 20 ms on the current stream of a GPU. Simulated devices find races without one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(30_000_000)  # clock cycles; no public kernel takes a given time


@contextlib.contextmanager
def _debug_synchronization(mode):
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def networks(machine):
    """Returns small networks by name, each with a batch of inputs. On GPUs, the gradients of one fill several buckets."""
    torch.manual_seed(0)
    rows = machine.size(37, 13)
    width = machine.size(2600, 26)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    conv = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    wide = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
    return {
        "mlp": (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)),
            torch.randn(rows, 64),
        ),
        "conv": (
            nn.Sequential(*conv, nn.Flatten(), nn.Linear(32, 10)),
            torch.randn(rows, 3, 16, 16),
        ),
        "attention": (
            nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 8, 10)),
            torch.randn(rows, 8, 64),
        ),
        "several buckets": (nn.Sequential(*wide), torch.randn(rows, 64)),
    }


def language_model(machine, rows, seed=0, words=8192, width=512, layers=4):
    """Returns the model of train.py, by default with 20 million parameters, and a batch. Simulated ones are small."""
    torch.manual_seed(0)
    tasks = _tasks()
    words = machine.size(words, 64)
    width = machine.size(width, 32)
    model = tasks["LanguageModel"](
        words, width, layers=machine.size(layers, 1), heads=machine.size(width // 64, 2)
    )
    tokens = torch.randint(
        words, (rows, tasks["CONTEXT"] + 1), generator=torch.Generator().manual_seed(seed)
    )
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@functools.cache
def _tasks():
    return runpy.run_path(str(TASKS))


def labels(rows):
    """Returns the targets of a batch. One label in three is ignored."""
    targets = torch.arange(rows) % 10
    targets[::3] = -100
    return targets


def make_step(
    net,
    devices,
    precision="fp32",
    micro_batch_size=None,
    optimizer=torch.optim.SGD,
    lr=0.1,
    **others,
):
    """Returns a step of a copy of ``net``, clipped, with the optimizer spread over the devices."""
    model = DataParallelModel(copy.deepcopy(net), list(devices))
    balanced = BalancedOptimizer(model, optimizer, lr=lr)
    settings = {
        "micro_batch_size": micro_batch_size,
        "precision": precision,
        "max_grad_norm": 1.0,
        **others,
    }
    return TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), balanced, **settings)


def plain_step(net, batch, device, precision):
    """Returns a step of the plain loop with AdamW, with the loss on one device."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        with Precision(precision).autocast([device]):
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def parameters_of(step):
    """Returns the parameters that a step trains, flat and on the host."""
    return torch.cat([parameter.detach().flatten().cpu() for parameter in step.model.parameters()])


def relative_error(found, expected):
    """Returns the norm of the difference over the norm of ``expected``. It is nan if one of them is not finite."""
    found = found.detach().double().cpu()
    expected = expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())
