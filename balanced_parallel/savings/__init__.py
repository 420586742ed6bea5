"""Ways to lower memory without changing the result: of activations, heads of language models, gradients, and evaluation."""

from .checkpointing import checkpoint_activations
from .evaluation import RunningLoss, inference
from .gradient_release import release_gradients_in_backward
from .inplace import inplace_activations
from .linear_cross_entropy import LinearCrossEntropy
from .lm_heads import replace_lm_head
from .offloading import offload_activations

__all__ = [
    "LinearCrossEntropy",
    "RunningLoss",
    "checkpoint_activations",
    "inference",
    "inplace_activations",
    "offload_activations",
    "release_gradients_in_backward",
    "replace_lm_head",
]
