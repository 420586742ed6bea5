"""The divisor of the mean of :class:`savings.LinearCrossEntropy`."""

from ..savings.chunked_cross_entropy import linear_cross_entropy
from ..savings.linear_cross_entropy import LinearCrossEntropy
from .rules import add_loss

__all__: list[str] = []

add_loss(LinearCrossEntropy, linear_cross_entropy)
