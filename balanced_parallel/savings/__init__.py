"""Ways to lower memory without changing the result.

Activations: :func:`checkpoint_activations`, :func:`inplace_activations`, :func:`offload_activations`. Heads of language models:
:class:`LinearCrossEntropy`, :func:`replace_lm_head`. Gradients: :func:`release_gradients_in_backward`. Evaluation and logging:
:func:`inference`, :class:`RunningLoss`.
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
