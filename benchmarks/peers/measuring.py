"""Measures a program: its gradients, the memory and the traffic of its devices, and the time of its steps."""

import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from language_task import Case, build_model, make_rows
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from balanced_parallel.simulation import Cluster

HERE = Path(__file__).parent
ports: Iterator[int] | None = None  # for the process groups of the programs, one after the other
ITEM_SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "bool": 1, "signed char": 1}


class Memory(NamedTuple):
    """Bytes of one device in an update.

    Attributes:
        peak: the most bytes in use.
        through: bytes in and out, the batch from the host included.
    """

    peak: int
    through: int


def run_program(name: str, model: nn.Module, case: Case) -> None:
    """Runs a program of this folder on all rows, in a state as in a new process."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    if ports is not None:
        os.environ["MASTER_PORT"] = str(next(ports))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        warnings.simplefilter("ignore")  # they are about GPUs that are not there
        program.train(model, make_rows(case), case.batch_size, case.micro_batch_size, case.lr)
    _end_frameworks()


def _end_frameworks() -> None:
    """Ends the process group, and the state that frameworks leave in a process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def watching(before: Callable[[Any], None], after: Callable[[int], None]) -> Iterator[None]:
    """Calls functions before and after each update, by torch's hooks for all optimizers.

    Args:
        before: gets the optimizer.
        after: gets the number of updates so far. The step of an optimizer inside that of another does not count.
    """
    depth = updates = 0

    def enter(optimizer: Any, *_: Any) -> None:
        nonlocal depth
        if depth == 0:
            before(optimizer)
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth, updates
        depth -= 1
        if depth == 0:
            updates += 1
            after(updates)

    handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(name: str, case: Case) -> list[dict[str, Tensor]]:
    """Returns the gradients of each update."""
    model, found = build_model(case), list[dict[str, Tensor]]()

    def record(optimizer: Any) -> None:
        read = getattr(optimizer, "gradient", lambda parameter: parameter.grad)  # of a BalancedOptimizer
        named = [(key, read(parameter)) for key, parameter in model.named_parameters()]
        found.append({key: whole(gradient) for key, gradient in named if gradient is not None})

    with watching(record, lambda updates: None):
        run_program(name, model, case)
    return found


def whole(gradient: Any) -> Tensor:
    """Returns a copy on the CPU, of all shards."""
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.detach().to("cpu", copy=True)


def memory(name: str, case: Case, cluster: Cluster) -> list[Memory]:
    """Returns the peak of each device in the second update, and the traffic of the third."""
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    moved, peaks, through = Counter[tuple[str, str]](), list[int](), list[int]()

    def after(updates: int) -> None:
        nonlocal moved
        if updates == 1:
            gc.collect()
            cluster.reset_peak()
        elif updates == 2:
            peaks.extend(cluster.peak)
            moved = cluster.moved
            profiler.start()
        elif updates == 3:
            profiler.stop()
            copies = cluster.moved - moved
            through.extend(sum(count for ends, count in copies.items() if device in ends) for device in map(str, cluster.devices))

    with watching(lambda optimizer: None, after):
        run_program(name, build_model(case), case)
    collectives = ring_bytes(profiler)
    return [Memory(peak, count + collectives) for peak, count in zip(peaks, through, strict=True)]


def ring_bytes(profiler: profile) -> int:
    """Returns the bytes that go in and out of this rank in the collectives that a profiler has seen, with rings as in NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return sum(event_bytes(event["name"], event.get("args", {}), ranks) for event in events if "name" in event)


def event_bytes(name: str, arguments: dict[str, Any], ranks: int) -> int:
    """Returns the bytes in and out of one of the ranks for an event of the profiler, by the formulas of a ring."""
    parts = {
        "gloo:all_reduce": 4 * (ranks - 1) / ranks,
        "gloo:all_gather": 2 * (ranks - 1),  # the tensor is the part of one rank
        "gloo:broadcast": 2,
        "c10d::_reduce_scatter_base_": -2 * (ranks - 1) / ranks,  # gloo runs it as an all-reduce, which is counted: half of it
    }
    if name not in parts:
        if name.startswith("gloo:"):
            raise ValueError(f"the profiler has seen {name}, expected one of {sorted(parts)}: add its formula")
        return 0
    tensors = zip(arguments["Input Dims"], arguments["Input type"], strict=True)
    sizes = [math.prod(dims) * ITEM_SIZES[kind] for dims, kind in tensors if kind in ITEM_SIZES]
    return round(max(sizes) * parts[name])


def update_times(name: str, case: Case) -> list[float]:
    """Returns the seconds of each update of whole batches but the first."""
    ends: list[float] = []
    with watching(lambda optimizer: None, lambda updates: ends.append(time.perf_counter())):
        run_program(name, build_model(case), case)
    return [later - earlier for earlier, later in itertools.pairwise(ends[: case.rows // case.batch_size])]


def time_ratio(name: str, reference: str, case: Case, rounds: int) -> float:
    """Returns the time of an update over that of the reference. They take turns, and each goes first in half of the rounds."""
    for one in (name, reference):
        update_times(one, case)  # warms up
    ratios = []
    for index in range(rounds):
        order = (name, reference) if index % 2 == 0 else (reference, name)
        times = {one: statistics.median(update_times(one, case)) for one in order}
        ratios.append(times[name] / times[reference])
    return statistics.median(ratios)
