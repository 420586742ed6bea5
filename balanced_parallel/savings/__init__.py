"""Ways to lower memory without changing the result."""

from .gradient_release import release_gradients_in_backward
from .language_model_heads import replace_lm_head
from .linear_cross_entropy import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "release_gradients_in_backward", "replace_lm_head"]
