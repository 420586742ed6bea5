"""One effective batch, one exact update."""

from . import replica_sync  # registers with gradient_sync

__all__: list[str] = ["replica_sync"]
