"""Memory of each of several devices: replicas on simulated devices, and ranks that communicate over gloo."""

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocator import ReduceScatter
from models import Problem
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from truth import allocator_peak, live_peak

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, Precision, simulate
from balanced_parallel.strategies.fsdp import shard

RANKS = 2
REPEATS = 3


class Autocast(nn.Module):
    """Autocast inside the forward, as torch documents it for ``nn.DataParallel``: its threads start without autocast."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.precision = module, Precision(precision)

    def forward(self, inputs: Tensor) -> Any:
        """Runs the module under autocast."""
        with self.precision.autocast([inputs.device]):
            return self.module(inputs)


def simulated_peaks(problem: Problem, layout: str, balanced: bool, precision: str, devices: int = 4) -> list[int]:
    """Returns the peak of each simulated device in the second step."""
    module, inputs, targets = copy.deepcopy(problem.module), problem.inputs, problem.targets
    with simulate(devices) as cluster:
        if layout == "replicas":
            model: nn.Module = DataParallelModel(module, precision=precision)
            criterion: Any = DataParallelCriterion(problem.criterion, precision=precision)
        else:
            model = nn.DataParallel(Autocast(module, precision).to("sim:0"))
            criterion = problem.criterion
        adamw = torch.optim.AdamW
        optimizer = BalancedOptimizer(model, adamw) if balanced else adamw(model.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            if layout == "replicas":
                loss = criterion(model(inputs), targets)
            else:
                with Precision(precision).autocast([torch.device("sim:0")]):
                    loss = criterion(model(inputs), targets.to("sim:0"))
            loss.backward()
            del loss
            optimizer.step()
        return list(cluster.peak)


def prepare(module: nn.Module, layout: str, balanced: bool, precision: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the module that a rank trains, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (RANKS,))
        for unit in shard(module, mesh, Precision(precision), lambda unit: None):
            unit.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[operator]
    else:
        module = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    if balanced:
        return module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)
    return module, torch.optim.AdamW(module.parameters())


Case = tuple[Problem, str, bool, str]  # layout, balanced, precision


def _rank_main(rank: int, folder: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    peaks = []
    for problem, layout, balanced, precision in cases:
        prepared = functools.partial(prepare, layout=layout, balanced=balanced, precision=precision)
        live = min(live_peak(problem, precision, prepared) for _ in range(REPEATS))
        given = [allocator_peak(problem, precision, False, prepared) for _ in range(REPEATS)]
        peaks.append((live, min(given)))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


def rank_peaks(cases: list[Case]) -> list[tuple[int, int]]:
    """Returns, for each case, the peak of the rank with the most: bytes of live tensors, and bytes of the allocator.

    Each is the least of three measurements, because the threads of gloo release their last tensors late, which the profiler does
    not see.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (folder, cases), nprocs=RANKS)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [(max(live), max(given)) for live, given in (zip(*peaks, strict=True) for peaks in zip(*found, strict=True))]
