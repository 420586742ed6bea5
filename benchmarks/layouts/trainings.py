"""Twenty updates by each program, as its documentation says. All accumulate gradients over micro-batches of two rows."""

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from networks import Problem, make_problem
from torch import Tensor

UPDATES, ROWS, SIZE = 20, 12, 2
DROPOUT = "2 ranks, dropout"
Part = tuple[Tensor, tuple[Tensor, ...]]  # a micro-batch: inputs and targets
Run = Callable[[Problem, list[list[Part]]], None]


def train_with_ddp(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `DistributedDataParallel`, and `no_sync` but for the last micro-batch."""
    dist.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(problem.module)
    optimizer = make_optimizer(model)
    for parts in updates:
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else model.no_sync():
                (mean_loss(problem, model, part) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_accelerate(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `Accelerator(gradient_accumulation_steps=...)` and `accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(updates[0]))
    model, optimizer = accelerator.prepare(problem.module, make_optimizer(problem.module))
    for part in itertools.chain(*updates):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(problem, model, part))
            optimizer.step()
            optimizer.zero_grad()


def train_with_fabric(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `Fabric`, and `no_backward_sync` but for the last micro-batch."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(problem.module, make_optimizer(problem.module))
    for parts in updates:
        for part in parts:
            with fabric.no_backward_sync(model, enabled=part is not parts[-1]):
                fabric.backward(mean_loss(problem, model, part) / len(parts))
        optimizer.step()
        optimizer.zero_grad()


def train_with_fsdp(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `fully_shard` of each block, and `set_requires_gradient_sync` for the last micro-batch."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = problem.module
    for block in model.model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    for parts in updates:
        for part in parts:
            model.set_requires_gradient_sync(part is parts[-1])
            (mean_loss(problem, model, part) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_row(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `TrainStep(micro_batch_size=2, reproducible=True)`."""
    train_with_steps(problem, updates, reproducible=True)


def train_by_bits(problem: Problem, updates: list[list[Part]]) -> None:
    """A loop with `TrainStep(micro_batch_size=2, reproducible="bits")`."""
    train_with_steps(problem, updates, reproducible="bits")


def train_with_steps(problem: Problem, updates: list[list[Part]], **settings: Any) -> None:
    """Trains with the library, on one rank of several or in one process with three replicas."""
    from balanced_parallel import TrainStep, parallelize

    devices = ["cpu"] if "RANK" in os.environ else ["cpu"] * 3
    model, criterion = parallelize(problem.module, problem.criterion, devices, weight=problem.weight)
    step = TrainStep(model, criterion, make_optimizer(model), micro_batch_size=SIZE, **settings)
    for parts in updates:
        inputs = torch.cat([inputs for inputs, _ in parts])
        step(inputs, tuple(map(torch.cat, zip(*[targets for _, targets in parts], strict=True))))


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of all programs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def mean_loss(problem: Problem, model: Any, part: Part) -> Tensor:
    """Returns the mean loss of a micro-batch."""
    inputs, targets = part
    loss: Tensor = problem.criterion(model(inputs), *targets)
    return loss


TRAININGS: dict[str, tuple[str, Run]] = {
    "DDP by hand": ("torch", train_with_ddp),
    "Accelerate": ("accelerate", train_with_accelerate),
    "Lightning Fabric": ("lightning", train_with_fabric),
    "FSDP2 by hand": ("torch", train_with_fsdp),
    "balanced_parallel, reproducible=True": ("balanced-parallel", train_by_row),
    'balanced_parallel, reproducible="bits"': ("balanced-parallel", train_by_bits),
}
OWN = [name for name, (package, _) in TRAININGS.items() if package == "balanced-parallel"]


def run_training(name: str, rank: int = 0, ranks: int = 1, *, draws: bool = False) -> dict[str, Tensor]:
    """Trains a GPT-2, with dropout or without, on a rank's share of all batches. Returns its parameters, in float32."""
    problem = make_problem("GPT-2", UPDATES * ROWS, torch.float32, ignored=0.0)
    problem.module.train(draws)
    share = ROWS // SIZE // ranks
    parts = [*zip(problem.inputs.split(SIZE), *[each.split(SIZE) for each in problem.targets], strict=True)]
    micro_batches = [(inputs, tuple(targets)) for inputs, *targets in parts]
    starts = range(rank * share, len(parts), ROWS // SIZE)
    TRAININGS[name][1](problem, [micro_batches[start : start + share] for start in starts])
    return {key: whole(parameter) for key, parameter in problem.module.named_parameters()}


def whole(parameter: Any) -> Tensor:
    """Returns a copy of a parameter, joined from the ranks if they have shards of it."""
    joined: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return joined.detach().clone()


class Drift(NamedTuple):
    """The difference of two runs of one training."""

    differ: int  # elements of the parameters with other bits
    elements: int  # all
    relative: float  # the norm of the difference over the norm, of the worst parameter

    def __str__(self) -> str:
        share = f"{self.differ:,} of {self.elements:,}"
        return f"{share} ({self.relative:.0e})" if self.differ else share


def drift(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Drift:
    """Compares the parameters of two runs bit by bit."""
    pairs = [(found[name], value) for name, value in expected.items()]
    differ = sum(int((one.view(torch.int32) != other.view(torch.int32)).sum()) for one, other in pairs)
    relative = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    return Drift(differ, sum(other.numel() for _, other in pairs), relative)


def measure_drifts(run_on_ranks: Callable[[list[str], int], Any]) -> dict[str, dict[str, Drift]]:
    """Returns how far each program on other layouts is from itself on one rank, by program and layout."""
    drifts: dict[str, dict[str, Drift]] = {}
    for name in TRAININGS:
        one, two, three = (run_on_ranks(["--training", name], ranks) for ranks in (1, 2, 3))
        drifts[name] = {"2 ranks": drift(two, one), "3 ranks": drift(three, one)}
        if name in OWN:
            drifts[name]["3 replicas"] = drift(run_training(name), one)
        one, two = (run_on_ranks(["--training", name, "--draws"], ranks) for ranks in (1, 2))
        drifts[name][DROPOUT] = drift(two, one)
        print(name, {layout: str(each) for layout, each in drifts[name].items()}, flush=True)
    return drifts
