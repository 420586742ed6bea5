"""Counts the collectives of one update: of DDP and FSDP2 in torch's fake process group, of replicas on simulated devices."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # there is no public fake process group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, simulate

WIDTH, UNITS = 256, 3
PARAMETERS = UNITS * (WIDTH * WIDTH + WIDTH)

_OPERATIONS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and bytes of collectives. The bytes are those of the whole tensor, which is the largest argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = _OPERATIONS[function._schema.name.partition("::")[2]]
            self.calls[name] += 1
            self.bytes[name] += max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Starts a process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_net() -> nn.Sequential:
    """Returns a network of equal units."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])


def count_ddp(gpus: int) -> CollectiveCounter:
    """Counts an update of ``DistributedDataParallel``."""

    def all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # the reducer's own call fails in a dispatch mode: "expected the hook result is either a Tensor or ... found None"
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with fake_ranks(gpus):
        net = DistributedDataParallel(make_net())
        net.register_comm_hook(None, all_reduce)
        with CollectiveCounter() as counter:
            net(torch.ones(2, WIDTH)).sum().backward()
    return counter


def count_fsdp(hosts: int, local: int) -> CollectiveCounter:
    """Counts an update of FSDP2 on one host, or of HSDP on several."""
    with fake_ranks(hosts * local):
        shape, names = ((local,), ("device",)) if hosts == 1 else ((hosts, local), ("host", "device"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        net = make_net()
        for unit in net:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        with CollectiveCounter() as counter:
            net(torch.ones(2, WIDTH)).sum().backward()
    return counter


def count_replicas(gpus: int) -> tuple[list[int], list[int]]:
    """Returns the bytes that each device sends to other devices in one update, and those that it holds afterwards."""
    with simulate(gpus) as cluster:
        net = make_net()
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.MSELoss())
        step = TrainStep(model, criterion, BalancedOptimizer(model, torch.optim.AdamW))
        inputs, targets = torch.ones(gpus, WIDTH), torch.zeros(gpus, WIDTH)
        step(inputs, targets)  # makes the copies
        before = cluster.moved
        step(inputs, targets)
        moved, held = cluster.moved - before, list(cluster.live)
    devices = [f"sim:{index}" for index in range(gpus)]
    return [sum(moved[one, other] for other in devices if other != one) for one in devices], held
