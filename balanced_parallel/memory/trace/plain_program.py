"""The plain program of a trace: its loss, and what it trains."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...loss.partial_sums import Shard

__all__: list[str] = []


def compute_loss(criterion: Any, output: Any, targets: tuple[Any, ...]) -> Tensor:
    """Returns the loss of an output, whose entries are spread over the criterion's arguments if it is a tuple."""
    result: Tensor = Shard(criterion, 1, output, targets, {}).call()
    return result


def learned_parameters(module: nn.Module, criterion: Any) -> list[Tensor]:
    """Returns the parameters of the module and of the criterion, each once."""
    found: Iterable[Tensor] = [*module.parameters(), *(criterion.parameters() if isinstance(criterion, nn.Module) else ())]
    return list(dict.fromkeys(found))
