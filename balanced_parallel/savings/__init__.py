"""Ways to lower memory without changing the result: of activations, heads of language models,
optimizer state, and evaluation.
"""

from .checkpointing import checkpoint_activations
from .evaluation import inference
from .linear_cross_entropy import LinearCrossEntropy, replace_lm_head
from .offloading import offload_activations, offload_optimizer

__all__ = [
    "LinearCrossEntropy",
    "checkpoint_activations",
    "inference",
    "offload_activations",
    "offload_optimizer",
    "replace_lm_head",
]
