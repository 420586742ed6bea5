"""Runs measurements in new processes: one with several simulated devices, or several ranks with a device each."""

import contextlib
import importlib.util
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import measuring
import torch
import torch.distributed as dist
from language_task import Case
from measuring import Memory, gradients, memory, time_ratio
from torch import Tensor

from balanced_parallel import simulate
from balanced_parallel.simulation import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from helpers.processes import PROCESSES  # processes in which torch is imported already
from helpers.ranks import Ranks

FRAMEWORKS = ("transformers", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate", "lightning_fabric")
ATTEMPTS, LIMIT = 3, 200.0  # seconds: the slowest takes 20 on an idle machine


class Findings(NamedTuple):
    """Results of a process: the gradients of each update, and the memory of its devices."""

    gradients: list[dict[str, Tensor]]
    memory: list[Memory]


class Layout(NamedTuple):
    """Devices and processes of a program: one process with all simulated devices, or ranks with one each."""

    devices: int
    ranks: int


def preload() -> None:
    """Makes new processes start with all frameworks imported."""
    PROCESSES.set_forkserver_preload(["torch", "balanced_parallel", *filter(importlib.util.find_spec, FRAMEWORKS)])


def free_ports(count: int) -> list[int]:
    """Returns ports for process groups that follow each other: torch reads the addresses of the group before at the same port.

    They are below those that Linux gives to connections, so that no connection of the ranks takes one of them.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(range(15000, 32000), 5 * count):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
        return ports[:count]


def run_processes(layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns what the function returns on each rank, in the environment of the layout, in new processes.

    Ranks that do not answer are started again: seldom, a process group after another one waits forever for its store.
    """
    for attempt in range(ATTEMPTS):
        try:
            with Ranks(layout.ranks) as processes:
                found: list[Any] = processes.run(_run_quietly, free_ports(100), layout, function, *arguments, timeout=LIMIT)
            return found
        except AssertionError as error:
            if "did not answer" not in str(error) or attempt == ATTEMPTS - 1:
                raise
            print(f"{function.__name__}, {arguments[0]}: {error}, again", flush=True)
    raise AssertionError("not reached")


def _run_quietly(rank: int, ports: list[int], layout: Layout, function: Callable[..., Any], *arguments: Any) -> Any:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    measuring.ports = iter(ports)
    with environment(rank, layout) as cluster:
        return function(rank, cluster, layout, *arguments)


def measure(rank: int, cluster: Cluster, layout: Layout, name: str, gradient_case: Case, memory_case: Case) -> Findings:
    """Measures the gradients of a program, on the first rank, and the memory of the devices of this process."""
    found = gradients(name, gradient_case)
    of_devices = memory(name, memory_case, cluster)
    if layout.ranks > 1:
        of_devices = [of_devices[rank]]
    return Findings(found if rank == 0 else [], of_devices)


def measure_time(rank: int, cluster: Cluster, layout: Layout, name: str, reference: str, case: Case, rounds: int) -> float:
    """Returns the time of an update over that of the reference."""
    return time_ratio(name, reference, case, rounds)


@contextlib.contextmanager
def environment(rank: int, layout: Layout) -> Iterator[Cluster]:
    """Shows the devices to torch and to the frameworks, which know only those of vendors."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "5",
        "ACCELERATE_TORCH_DEVICE": f"sim:{rank}",  # for Accelerate and for the Trainer
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, settings))
        if layout.ranks == 1:
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(variable, None)
        if importlib.util.find_spec("transformers") and layout.ranks == 1:
            from transformers import TrainingArguments

            # it asks torch.cuda for the number of GPUs
            stack.enter_context(mock.patch.object(TrainingArguments, "n_gpu", property(lambda self: layout.devices)))
        if importlib.util.find_spec("lightning_fabric") and layout.ranks > 1:
            stack.enter_context(shown_to_fabric())
        yield stack.enter_context(simulate(layout.devices))


@contextlib.contextmanager
def shown_to_fabric() -> Iterator[None]:
    """Registers simulated devices with Fabric, in the place of the CPU: the accelerator that it chooses on this machine."""
    from lightning_fabric.accelerators import ACCELERATOR_REGISTRY, CPUAccelerator
    from lightning_fabric.strategies import DDPStrategy

    class Simulated(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index)
            if not dist.is_initialized():  # Fabric passes a device_id, which torch refuses for this type of device
                dist.init_process_group("gloo")

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("sim", index) for index in range(int(devices))]

    ACCELERATOR_REGISTRY.register("cpu", Simulated, override=True)
    with mock.patch.object(DDPStrategy, "_determine_ddp_device_ids", return_value=None):  # else it starts a stream of CUDA
        yield
