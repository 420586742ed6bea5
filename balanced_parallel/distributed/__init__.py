"""One process per device, under torchrun."""

from . import ddp_sync  # registers with gradient_sync

__all__: list[str] = ["ddp_sync"]
