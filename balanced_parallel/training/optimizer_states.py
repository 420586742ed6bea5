"""The state of an optimizer by the names of its parameters, so that it does not depend on their order."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..optim.balanced import BalancedOptimizer

__all__: list[str] = []


def state_by_name(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the state of an optimizer, with names where ``torch.optim`` has numbers.

    Args:
        optimizer: of torch, or a :class:`BalancedOptimizer`.
        trained: the parameters by name. Others are called by their number.
    """
    names, found = _names(optimizer, trained), optimizer.state_dict()
    return {
        "class": class_name(optimizer),
        "state": {names[number]: state for number, state in found["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in found["param_groups"]],
    }


def numbered_state(optimizer: Optimizer, trained: Mapping[str, Tensor], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state from :func:`state_by_name` as the optimizer's ``load_state_dict()`` takes it.

    Raises:
        ValueError: the param groups have other parameters.
    """
    names, groups = _names(optimizer, trained), _whole_groups(optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    loaded, first = [], 0
    if len(groups) != len(state_dict["param_groups"]):
        raise ValueError(f"the state has {len(state_dict['param_groups'])} param groups, expected {len(groups)}")
    for place, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        mine = names[first : first + len(group["params"])]
        first += len(mine)
        different = sorted({*mine} ^ {*saved["params"]})
        if different:
            raise ValueError(
                f"param group {place} of the state has {len(saved['params'])} parameters, expected the {len(mine)} of the "
                f"optimizer: only one of them has {', '.join(different[:3])}"
            )
        loaded.append({**saved, "params": [numbers[name] for name in mine]})
    return {"state": {numbers[name]: value for name, value in state_dict["state"].items()}, "param_groups": loaded}


def class_name(optimizer: Any) -> str:
    """Returns the class of a scheduler, or of the plain optimizer, however it is spread over devices or ranks."""
    if isinstance(optimizer, BalancedOptimizer):
        return optimizer.recipe[0].__name__
    return type(getattr(optimizer, "optim", optimizer)).__name__  # of a ZeroRedundancyOptimizer


def _names(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the parameters, in the order in which a ``state_dict()`` numbers them."""
    known = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in trained.items()}  # of torch.compile
    parameters = [parameter for group in _whole_groups(optimizer) for parameter in group["params"]]
    return [known.get(id(parameter), f"parameter {number}") for number, parameter in enumerate(parameters)]


def _whole_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.recipe[1] if isinstance(optimizer, BalancedOptimizer) else optimizer.param_groups
