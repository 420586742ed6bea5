"""Ways to lower memory without changing the result: :func:`checkpoint_activations`, :func:`offload_activations`."""

from .checkpointing import checkpoint_activations
from .offloading import offload_activations

__all__ = ["checkpoint_activations", "offload_activations"]
