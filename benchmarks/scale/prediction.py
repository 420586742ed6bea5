"""Predictions by the alpha-beta model: a message of m bytes takes alpha + m / beta seconds.

A layout is a list of collectives. Time and traffic of a step both follow from that list, so that the traffic can be counted.
"""

import math
from dataclasses import dataclass

LAYOUTS = ("replicas", "DDP", "FSDP2", "HSDP")


@dataclass(frozen=True)
class Network:
    """Links of a cluster. Latencies are those of NCCL's own model, bandwidths are nominal (8 x H100, 8 x 400 Gbit/s).

    Attributes:
        gpus_per_host: GPUs that NVLink connects.
        inside: bytes per second in one direction of each GPU, inside of a host.
        outside: bytes per second in one direction of each host, over all of its network cards.
        efficiency: achieved part of both.
        launch: seconds before a collective starts (NCCL: baseLat, Ring, Simple).
        hop_inside, hop_outside: seconds per step of a ring (NCCL: hwLat, Ring, Simple).
        tree_hop: seconds per level of a tree (NCCL: hwLat, Tree, Simple).
    """

    gpus_per_host: int = 8
    inside: float = 450e9
    outside: float = 8 * 50e9
    efficiency: float = 0.8
    launch: float = 8.4e-6
    hop_inside: float = 3.4e-6
    hop_outside: float = 14e-6
    tree_hop: float = 28e-6


@dataclass(frozen=True)
class Job:
    """A model, and the rows of each GPU. The defaults are a GPT of 1.3 billion parameters.

    Attributes:
        units: blocks that FSDP2 shards, each on its own.
        tokens: per GPU and update.
        flops: per second of one GPU.
        utilization: achieved part of ``flops``.
        gathered: bytes of a parameter that FSDP2 gathers (bfloat16).
        reduced: bytes of a gradient that is reduced (float32).
        bucket: bytes of a bucket of DDP, and of the replicas.
    """

    parameters: int = 1_300_000_000
    units: int = 24
    tokens: int = 16_384
    flops: float = 989e12
    utilization: float = 0.4
    gathered: int = 2
    reduced: int = 4
    bucket: int = 25 * 2**20

    @property
    def compute(self) -> float:
        """Seconds of forward and backward: 6 operations per parameter and token."""
        return 6 * self.parameters * self.tokens / (self.flops * self.utilization)


@dataclass(frozen=True)
class Collective:
    """Equal collectives in one step.

    Attributes:
        operation: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"broadcast"``.
        size: bytes of the whole tensor, over all calls.
        calls: number of calls.
        ranks: of each group.
        hosts: that a group extends over.
        share: groups that use the links of a host at the same time.
    """

    operation: str
    size: float
    calls: int
    ranks: int
    hosts: int
    share: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in all calls: the least possible, which rings reach; the last one broadcasts nothing."""
        if self.operation == "broadcast":
            return self.size
        return (2 if self.operation == "all_reduce" else 1) * self.size * (self.ranks - 1) / self.ranks

    def seconds(self, network: Network) -> float:
        """Returns the time of all calls, one after the other, by the faster of ring and tree."""
        if self.ranks == 1:
            return 0.0
        bandwidth = network.inside if self.hosts == 1 else min(network.inside, network.outside / self.share)
        passes = 2 if self.operation == "all_reduce" else 1
        outside = self.hosts - 1
        ring = passes * ((self.ranks - 1 - outside) * network.hop_inside + outside * network.hop_outside)
        transfer = self.sent / (bandwidth * network.efficiency)
        options = [self.calls * (network.launch + ring) + transfer]
        if self.operation == "all_reduce":
            levels = self.ranks / self.hosts - 1 + math.log2(self.hosts)
            tree = 2 * self.size / (bandwidth * network.efficiency)
            options.append(self.calls * (network.launch + 2 * levels * network.tree_hop) + tree)
        return min(options)


def collectives(layout: str, job: Job, gpus: int, network: Network) -> list[Collective]:
    """Returns the collectives of one update."""
    hosts = math.ceil(gpus / network.gpus_per_host)
    local = gpus // hosts
    gathered, reduced = job.gathered * job.parameters, job.reduced * job.parameters
    buckets = math.ceil(reduced / job.bucket)
    if layout == "replicas":  # with BalancedOptimizer: owners update their part, and all devices receive it
        parts = ("broadcast", "reduce_scatter", "all_gather")  # the first before the forward: other code may write to parameters
        return [Collective(part, reduced, buckets, gpus, hosts) for part in parts]
    if layout == "DDP":
        return [Collective("all_reduce", reduced, buckets, gpus, hosts)]
    ranks, group_hosts = (gpus, hosts) if layout == "FSDP2" else (local, 1)
    sharded = [
        Collective("all_gather", 2 * gathered, 2 * job.units, ranks, group_hosts),  # in forward and in backward
        Collective("reduce_scatter", reduced, job.units, ranks, group_hosts),
    ]
    if layout == "HSDP" and hosts > 1:  # the shards of each local rank, over the hosts; all local ranks at the same time
        sharded.append(Collective("all_reduce", reduced / local, job.units, hosts, hosts, share=local))
    return sharded


def persistent_bytes(layout: str, job: Job, gpus: int, network: Network) -> float:
    """Returns the bytes of parameters, gradients and AdamW's state on each device, in float32; activations come on top."""
    hosts = math.ceil(gpus / network.gpus_per_host)
    owners = {"replicas": gpus, "DDP": 1, "FSDP2": gpus, "HSDP": gpus // hosts}[layout]
    weights = 4 * job.parameters / (owners if layout in ("FSDP2", "HSDP") else 1)
    return weights + 12 * job.parameters / owners


def transient_bytes(layout: str, job: Job) -> float:
    """Returns the bytes of the communication: two gathered units and a unit's gradients, or two buckets."""
    if layout in ("FSDP2", "HSDP"):
        return (2 * job.gathered + job.reduced) * job.parameters / job.units
    return 2 * job.bucket


@dataclass(frozen=True)
class Prediction:
    """One layout on a number of GPUs. Times are seconds."""

    layout: str
    gpus: int
    compute: float
    communication: float
    bytes: float
    sent: float

    @property
    def overlapped(self) -> float:
        """The least time of a step: all communication overlaps with the computation."""
        return max(self.compute, self.communication)

    @property
    def sequential(self) -> float:
        """The largest time of a step: nothing overlaps."""
        return self.compute + self.communication


def predict(layout: str, gpus: int, job: Job | None = None, network: Network | None = None) -> Prediction | None:
    """Returns a prediction, or None if the layout is not possible: replicas are in one process, so on one host."""
    job, network = job or Job(), network or Network()
    if layout == "replicas" and gpus > network.gpus_per_host:
        return None
    parts = collectives(layout, job, gpus, network)
    return Prediction(
        layout,
        gpus,
        job.compute,
        sum(part.seconds(network) for part in parts),
        persistent_bytes(layout, job, gpus, network) + transient_bytes(layout, job),
        sum(part.sent for part in parts),
    )
