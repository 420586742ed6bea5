"""Caches of keys and values that models of Hugging Face make in training too, unless they get ``use_cache=False``."""

from typing import Any

from torch import Tensor

__all__: list[str] = []


def is_cache(argument: Any) -> bool:
    """Returns True for a cache of transformers."""
    return hasattr(argument, "get_seq_length")


def without_empty_cache(leaves: list[Any], name: str) -> list[Any]:
    """Returns the arguments of a block with None in place of a cache, to which a recomputation would append once more.

    transformers does the same in its own checkpointing. Keys of earlier tokens change the result, so such a cache is refused.

    Args:
        leaves: arguments of the block. The first tensor has the shape ``[rows, tokens, ...]``.
        name: of the block.

    Raises:
        ValueError: the cache has keys of earlier tokens.
    """
    hidden = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1), None)
    tokens = 0 if hidden is None else hidden.shape[1]
    kept: list[Any] = []
    for leaf in leaves:
        length = leaf.get_seq_length() if is_cache(leaf) else None
        if length not in (None, 0, tokens):  # blocks before this one may have appended the tokens of this call
            raise ValueError(
                f"{name} gets a cache with the keys of {length} tokens for {tokens} new ones, and a recomputation would append "
                "to it again: train without past_key_values, or do not checkpoint this block"
            )
        kept.append(leaf if length is None else None)
    return kept
