"""One process per device, under torchrun."""
