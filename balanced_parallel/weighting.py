"""What a mean loss divides by, and means that stay exact when they are taken in parts: sums and counts, divided once.

The mean of the replicas' means is the mean of the batch only when every replica counts the same number of terms. It does
not with an uneven split, ignored labels or class weights, and one replica without a single counted label makes it nan.
"""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ranks import sum_over_ranks, world_size

__all__: list[str] = []

Weight = Tensor | float


@functools.singledispatch
def loss_weight(criterion: Any, output: Any, *targets: Any, **kwargs: Any) -> Tensor:
    """What the mean that ``criterion(output, *targets)`` computes divides by, as a 0-dim tensor.

    Elements for the elementwise losses, kept targets for the class losses (their ``ignore_index`` left out), the sum of the
    kept targets' class weights where those are given. The same for every ``reduction``. Criteria are modules of
    ``torch.nn``, functions of ``torch.nn.functional``, or a ``functools.partial`` of one. For a criterion of your own,
    register its weight::

        @loss_weight.register(MyLoss)
        def _(criterion, output, target):
            return (target != criterion.padding).sum()

    Raises:
        TypeError: the weight of this criterion is not known.
    """
    raise TypeError(
        f"loss_weight does not know what {_name(criterion)} divides its mean by; give DataParallelCriterion weight=, a function "
        "(output, *targets) -> scalar, or register one with @loss_weight.register"
    )


def _class_weight(*, input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, **_: Any) -> Tensor:
    """Source: the formulas of ``nn.CrossEntropyLoss`` (probability targets divide by how many there are) and ``nn.NLLLoss``."""
    if target.is_floating_point():
        return torch.tensor(input.numel() // max(input.size(1 if input.dim() > 1 else 0), 1))
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (weight[target.masked_fill(~kept, 0)] * kept).sum()


def _elements(*, input: Tensor, target: Tensor, weight: Tensor | None = None, **_: Any) -> Tensor:
    """Elements after broadcasting. A ``weight`` rescales the terms but not the divisor."""
    if weight is not None and weight.dim() == input.dim() and weight.size(0) not in (1, input.size(0)):
        raise ValueError(
            f"the loss has a weight of shape {tuple(weight.shape)} for an output of shape {tuple(input.shape)}: a weight per row "
            "has to be cut like the rows; pass it with the targets, as in criterion(outputs, target, weight)"
        )
    return torch.tensor(torch.broadcast_shapes(input.shape, target.shape).numel())


def _element_weight(*, input: Tensor, target: Tensor, weight: Tensor | None = None, **_: Any) -> Tensor:
    """``F.mse_loss`` and ``F.l1_loss`` divide by the sum of their ``weight``."""
    return _elements(input=input, target=target) if weight is None else weight.sum()


_LOSSES: list[tuple[type[nn.Module], Callable[..., Tensor], Callable[..., Tensor]]] = [
    (nn.CrossEntropyLoss, F.cross_entropy, _class_weight),
    (nn.NLLLoss, F.nll_loss, _class_weight),
    (nn.BCELoss, F.binary_cross_entropy, _elements),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, _elements),
    (nn.MSELoss, F.mse_loss, _element_weight),
    (nn.L1Loss, F.l1_loss, _element_weight),
    (nn.SmoothL1Loss, F.smooth_l1_loss, _elements),
    (nn.HuberLoss, F.huber_loss, _elements),
]
_FUNCTIONS = {function: rule for _, function, rule in _LOSSES}


def _register(module: type[nn.Module], function: Callable[..., Tensor]) -> None:
    @loss_weight.register(module)
    def weigh(criterion: Any, output: Tensor, *targets: Tensor, **kwargs: Any) -> Tensor:
        if type(criterion).forward is not module.forward:
            return loss_weight.dispatch(object)(criterion, output)  # a subclass with a forward of its own is another loss
        settings = {name: getattr(criterion, name) for name in ("weight", "ignore_index") if hasattr(criterion, name)}
        return _weigh_call(function, (output, *targets), settings | kwargs)


for _module, _function, _ in _LOSSES:
    _register(_module, _function)


@loss_weight.register(types.FunctionType)
@loss_weight.register(types.BuiltinFunctionType)
@loss_weight.register(functools.partial)
def _weigh_function(criterion: Any, output: Any, *targets: Any, **kwargs: Any) -> Tensor:
    function, arguments, settings = _unwrap(criterion)
    if function in _FUNCTIONS:
        return _weigh_call(function, (*arguments, output, *targets), settings | kwargs)
    if function is not criterion:
        return loss_weight(function, output, *targets, **settings | kwargs)
    return loss_weight.dispatch(object)(criterion, output)


def _weigh_call(function: Callable[..., Tensor], arguments: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    bound = inspect.signature(function).bind(*arguments, **settings)
    if bound.arguments.get("size_average") is not None or bound.arguments.get("reduce") is not None:
        raise ValueError(f"{_name(function)} was given size_average= or reduce=, which torch deprecated; use reduction=")
    with torch.no_grad():
        return _FUNCTIONS[function](**bound.arguments)


def _unwrap(criterion: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function in nested partials, with their positional and keyword arguments."""
    if not isinstance(criterion, functools.partial):
        return criterion, (), {}
    function, arguments, settings = _unwrap(criterion.func)
    return function, (*arguments, *criterion.args), settings | criterion.keywords


def is_known(criterion: Any) -> bool:
    """Whether :func:`loss_weight` has a rule for ``criterion``."""
    function, _, _ = _unwrap(criterion)
    if isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        return function in _FUNCTIONS
    for module, _, _ in _LOSSES:
        if isinstance(function, module) and loss_weight.dispatch(type(function)) is loss_weight.dispatch(module):
            return type(function).forward is module.forward
    return loss_weight.dispatch(type(function)) is not loss_weight.dispatch(object)


def has_sum(criterion: Any) -> bool:
    """Whether ``criterion`` is a loss of torch, which gives the plain sum of its terms with ``reduction="sum"``."""
    function, _, _ = _unwrap(criterion)
    if isinstance(function, nn.Module):
        return any(type(function).forward is module.forward for module, _, _ in _LOSSES)
    return function in _FUNCTIONS


def reduction_of(criterion: Any) -> str:
    """``"mean"``, ``"sum"`` or ``"none"``: the setting of a module, a partial, or a function's default; else ``"mean"``."""
    function, _, settings = _unwrap(criterion)
    if isinstance(function, (types.FunctionType, types.BuiltinFunctionType)) and "reduction" not in settings:
        try:
            parameter = inspect.signature(function).parameters.get("reduction")
        except ValueError:  # a builtin without a signature
            parameter = None
        default = "mean" if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
        return str(default)
    return str(settings.get("reduction", getattr(function, "reduction", "mean")))


def _name(criterion: Any) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)


def weighted_mean(losses: Sequence[Tensor], weights: Sequence[Weight], device: torch.device | None = None) -> Tensor:
    """The exact mean of means: the sum of ``weight x loss`` over the sum of the weights, divided once.

    For a model that computes its own loss: ``weighted_mean([o.loss for o in outputs], weights)``. A weight of zero counts
    for nothing, even where its loss is nan; nan where all weights are zero. Where a process group with several ranks is
    running, the mean is over all ranks (each must call it), and gradients are right once they are averaged over ranks, as
    DistributedDataParallel does.

    Args:
        losses: one scalar per replica, each on its own device.
        weights: what each of them divided by: scalars, on any device.
        device: where the result goes; ``None`` is the device of the first loss.

    Raises:
        ValueError: not one weight per loss, no losses, or a loss that is not a scalar.
    """
    if len(losses) != len(weights) or not losses:
        raise ValueError(
            f"weighted_mean was given {len(losses)} losses and {len(weights)} weights, expected one weight "
            "per loss and at least one"
        )
    sums = [weighted_sum(loss, weight) for loss, weight in zip(losses, weights, strict=True)]
    return divide_once(sums, weights, device or losses[0].device)


def weighted_sum(mean: Tensor, weight: Weight) -> Tensor:
    """``mean x weight`` in at least float32; zero where the weight is zero, whatever the mean is."""
    if mean.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(mean.shape)}, expected a scalar: use reduction='mean' or 'sum'")
    mean = widen(mean.reshape(()))
    if not weight:
        nothing: Tensor = _Nothing.apply(mean)
        return nothing
    return mean * (weight.to(mean.device) if isinstance(weight, Tensor) else weight)


def widen(tensor: Tensor) -> Tensor:
    """Half precision as float32: a sum of losses or a count would soon be past what it can hold."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def divide_once(sums: Sequence[Tensor], weights: Sequence[Weight] | None, device: torch.device) -> Tensor:
    """The sum of ``sums`` over the sum of ``weights``, over all ranks; just the sum where ``weights`` is ``None``.

    Nan, with gradients of zero, where the weights sum to zero: what torch's own losses give for a batch without targets.
    """
    total = add_up(sums, device)
    divisor = torch.ones((), device=device) if weights is None else add_up(weights, device)
    if world_size() == 1:
        return _divide(total, divisor)
    whole = sum_over_ranks(torch.stack([total.double(), divisor.double()]))
    whole_divisor = torch.ones_like(whole[1]) if weights is None else whole[1]
    mine = _divide(total * world_size(), whole_divisor.to(total.dtype))
    value: Tensor = _Replaced.apply(mine, _divide(whole[0], whole_divisor).to(total.dtype))
    return value


def add_up(scalars: Sequence[Weight], device: torch.device) -> Tensor:
    """The sum of scalars that may lie on different devices, in their order. Only scalars move."""
    tensors = [
        scalar if isinstance(scalar, Tensor) else torch.tensor(scalar, dtype=None if isinstance(scalar, int) else torch.float64)
        for scalar in scalars
    ]
    return functools.reduce(torch.add, [widen(tensor).reshape(()).to(device) for tensor in tensors])


class _Nothing(torch.autograd.Function):
    """Zero, whose backward hands on no gradient at all: a gradient of zero could become nan in a loss that is 0 / 0, and
    without a graph there would be no backward, for which the hooks of the other ranks' reducers wait."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def _divide(total: Tensor, divisor: Tensor) -> Tensor:
    counted = divisor != 0
    return torch.where(counted, total / torch.where(counted, divisor, 1), torch.nan).to(total.dtype)


class _Replaced(torch.autograd.Function):
    """The value of the whole, with the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
