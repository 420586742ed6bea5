"""Ways to lower memory without changing the result.

:func:`checkpoint_activations`, :func:`inplace_activations`, :func:`offload_activations`.
"""

from .checkpointing import checkpoint_activations
from .inplace_modules import inplace_activations
from .offloading import offload_activations

__all__ = ["checkpoint_activations", "inplace_activations", "offload_activations"]
