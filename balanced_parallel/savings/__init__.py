"""Ways to lower memory without changing the result.

:func:`checkpoint_activations`, :func:`inplace_activations`, :func:`offload_activations`.
"""

from .checkpointing import checkpoint_activations
from .evaluation import inference
from .gradient_release import release_gradients_in_backward
from .inplace_modules import inplace_activations
from .language_model_heads import replace_lm_head
from .linear_cross_entropy import LinearCrossEntropy
from .offloading import offload_activations
from .running_losses import RunningLoss

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
