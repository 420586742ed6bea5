"""The gradient buckets of a module, summed one by one while the backward runs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..runtime.streams import SideStreams, Streams
from .bucket import Bucket, Schedule

__all__: list[str] = []

BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel


class GradientBuckets:
    """The gradient buckets of all parameters of one module.

    Args:
        side: streams for sums that overlap with the backward; made on first use where devices have streams.
    """

    def __init__(self, side: SideStreams | None = None) -> None:
        self.buckets: list[Bucket] = []
        self.deferred = False  # of the forwards that run now
        self.is_sharded = False  # owners receive the gradients, until the sharding is undone
        self.side = side

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in this block stay with the replicas until :meth:`reduce`, or a backward of a later forward."""
        before, self.deferred = self.deferred, True
        try:
            yield
        finally:
            self.deferred = before

    def reduce(self) -> None:
        """Sums the gradients that the replicas hold."""
        for bucket in self.buckets:
            bucket.reduce()

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the gradients that the replicas hold."""
        for bucket in self.buckets:
            bucket.scale(factor)

    def drop(self) -> None:
        """Forgets the gradients that the replicas hold."""
        for bucket in self.buckets:
            bucket.drop()
        if self.side is not None:  # a backward that failed did not join
            self.side.join()

    def rebuild(self, *groups: Sequence[nn.Parameter]) -> None:
        """Makes new buckets of those parameters in each of ``groups`` that require a gradient."""
        self.reduce()
        learning = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
        self.buckets = [bucket for group in learning for bucket in make_buckets(group)]

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes the owners' memory from ``copies`` of some parameters, which have moved."""
        for bucket in self.buckets:
            if bucket.owners is not None:
                bucket.owners.repoint({parameter: copies[parameter] for parameter in copies if parameter in bucket})

    def schedules(self, streams: Streams) -> Iterator[tuple[Bucket, Schedule]]:
        """Yields each bucket with the schedule of its backward, for a forward on ``streams``."""
        if self.side is None and any(streams.values()):
            self.side = SideStreams()
        for bucket in self.buckets:
            yield bucket, Schedule(streams, self.side, bucket is not self.buckets[-1], self.deferred)


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Returns buckets of at most 25 MiB (or one parameter) and one dtype. The last parameters come first, as in the backward."""
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, tuple[Bucket, int]] = {}
    for parameter in reversed(parameters):
        bucket, size = open_buckets.get(parameter.dtype, (None, 0))
        if bucket is None or size + parameter.nbytes > BUCKET_BYTES:
            bucket, size = Bucket([]), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_buckets[parameter.dtype] = bucket, size + parameter.nbytes
    return buckets
