"""One process per device, under torchrun."""

from . import ddp, fsdp  # register with gradient_sync

__all__: list[str] = ["ddp", "fsdp"]
