"""One update by each program, as its documentation says: a seed, a wrapped model, a loss, a backward."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from networks import Problem
from torch import Tensor, nn

SEED = 3


def train_with_ddp(problem: Problem) -> Tensor:
    """The same seed on all ranks by `torch.manual_seed(seed)`, `DistributedDataParallel`, the mean loss of the rank's rows."""
    return _train_with_ddp(problem, SEED)


def train_with_seeds_of_ranks(problem: Problem) -> Tensor:
    """DDP with `torch.manual_seed(seed + rank)`, so that the ranks draw different masks."""
    return _train_with_ddp(problem, SEED + int(os.environ["RANK"]))


def _train_with_ddp(problem: Problem, seed: int) -> Tensor:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model: Any = nn.parallel.DistributedDataParallel(problem.module)
    torch.manual_seed(seed)
    loss: Tensor = problem.criterion(model(problem.inputs), *problem.targets)
    loss.backward()
    return loss.detach()


def train_with_accelerate(problem: Problem) -> Tensor:
    """A loop with `set_seed(seed)`, `prepare_model` and `accelerator.backward`."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(problem.module)
    set_seed(SEED)
    loss: Tensor = problem.criterion(model(problem.inputs), *problem.targets)
    accelerator.backward(loss)
    return loss.detach()


def train_with_fabric(problem: Problem) -> Tensor:
    """A loop with `seed_everything(seed)`, `setup_module` and `fabric.backward`."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, precision="64-true")
    fabric.launch()
    model = fabric.setup_module(problem.module)
    fabric.seed_everything(SEED, verbose=False)
    loss: Tensor = problem.criterion(model(problem.inputs), *problem.targets)
    fabric.backward(loss)
    return loss.detach()


def train_by_row(problem: Problem) -> Tensor:
    """A loop with `torch.manual_seed(seed)`, `parallelize` and `TrainStep(reproducible=True)`."""
    from balanced_parallel import TrainStep, parallelize

    model, criterion = parallelize(problem.module, problem.criterion, strategy="auto", weight=problem.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = TrainStep(model, criterion, optimizer, reproducible=True)
    torch.manual_seed(SEED)
    return step(problem.inputs, problem.targets)


PEERS: dict[str, tuple[str, Callable[[Problem], Tensor]]] = {
    "DDP by hand": ("torch", train_with_ddp),
    "DDP by hand, a seed for each rank": ("torch", train_with_seeds_of_ranks),
    "Accelerate": ("accelerate", train_with_accelerate),
    "Lightning Fabric": ("lightning", train_with_fabric),
    "balanced_parallel, reproducible=True": ("balanced-parallel", train_by_row),
}
