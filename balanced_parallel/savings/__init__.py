"""Ways to lower memory without changing the result.

Activations: :func:`checkpoint_activations`, :func:`inplace_activations`, :func:`offload_activations`. Heads of language models:
:class:`LinearCrossEntropy`, :func:`replace_lm_head`. Gradients: :func:`release_gradients_in_backward`. Evaluation and logging:
:func:`inference`, :class:`RunningLoss`.
"""

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
