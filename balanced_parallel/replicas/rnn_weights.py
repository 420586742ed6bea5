"""Copies of an RNN's weights in one block of memory, which cuDNN takes as they are.

cuDNN needs all weights of an RNN in one buffer, in its own order. ``nn.RNNBase.flatten_parameters`` makes this buffer for the
parameters of a module. Copies on another device need a buffer too. Otherwise they are copied together in every forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []


class RNNWeights:
    """The RNNs of a module, whose weights are copied to other devices.

    Args:
        modules: all modules of the tree.
        place: the index of each parameter, by its id.
    """

    def __init__(self, modules: Iterable[nn.Module], place: Mapping[int, int]) -> None:
        self._rnns: list[tuple[nn.RNNBase, list[int]]] = []
        self._addresses: dict[torch.device, list[int]] = {}
        for module in modules:
            weights: Any = getattr(module, "_flat_weights", ()) if isinstance(module, nn.RNNBase) else ()
            if isinstance(module, nn.RNNBase) and weights and all(id(weight) in place for weight in weights):
                self._rnns.append((module, [place[id(weight)] for weight in weights]))

    def flatten(self, copies: Mapping[torch.device, Sequence[Tensor]]) -> None:
        """Moves new copies of the weights of each RNN to one buffer.

        Args:
            copies: of all parameters, by device. Copies that have not moved since the last call stay where they are.
        """
        for device, tensors in copies.items() if self._rnns else ():
            weights = [[tensors[at] for at in places] for _, places in self._rnns]
            if _addresses_of(weights) == self._addresses.get(device):
                continue
            with torch.inference_mode(False):
                for (rnn, _), some in zip(self._rnns, weights, strict=True):
                    # the method reads sizes and ``_flat_weights`` of its object, and nothing else
                    nn.RNNBase.flatten_parameters(SimpleNamespace(**{**vars(rnn), "_flat_weights": some}))  # type: ignore[arg-type]
            self._addresses[device] = _addresses_of(weights)


def _addresses_of(weights: list[list[Tensor]]) -> list[int]:
    return [weight.data_ptr() for some in weights for weight in some]
