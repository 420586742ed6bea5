"""One process per device, under torchrun."""

from . import ddp_sync, fsdp_sync  # register with gradient_sync

__all__: list[str] = ["ddp_sync", "fsdp_sync"]
