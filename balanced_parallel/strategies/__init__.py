"""Ways in which the gradients of an update come together: the replicas of a process, the ranks of
DDP, the shards of FSDP2.
"""

from . import ddp, fsdp, replicas  # register with gradient_sync

__all__: list[str] = ["ddp", "fsdp", "replicas"]
