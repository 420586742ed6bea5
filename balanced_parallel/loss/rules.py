"""Rules of the losses of torch: the divisor of their mean, their reduction, and their targets.

A divisor is the number of elements, rows or counted targets, or the sum of the targets' class
weights.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rule = Callable[..., Tensor]
# Parts of the names of losses whose rows depend on each other. Their value on the batch is not a
# mean over shards.
_COUPLED = re.compile(
    "barlowtwins|batchall|batchhard|cliploss|concordance|contrastive|dice|hardtriplet|infonce|jaccard|jsd|lovasz|mining|miner|"
    "multiplenegatives|npair|ntxent|pearson|siglip|simclr|supcon|tversky|vicreg"
)


@functools.singledispatch
def loss_weight(criterion: Any, output: object, *targets: Any, **kwargs: object) -> Tensor:
    """Returns the divisor of the mean that ``criterion(output, *targets)`` computes, as a 0-dim
    tensor.

    Elementwise losses divide by elements, margin and embedding losses and CTC by rows. Class losses
    divide by the number of targets other than ``ignore_index``, or by the sum of their class
    weights. A criterion is a module of ``torch.nn``, a function of ``torch.nn.functional``, or a
    ``functools.partial`` of one. Register other criteria::

        @loss_weight.register(MyLoss)
        def _(criterion, output, target):
            return (target != criterion.padding).sum()

    Raises:
        TypeError: if the weight of this criterion is unknown, or its rows depend on each other.

    Example:
        >>> output, target = torch.zeros(4, 3), torch.tensor([0, 1, 2, -100])
        >>> loss_weight(torch.nn.CrossEntropyLoss(), output, target)
        tensor(3)
        >>> loss_weight(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])), output, target)
        tensor(7.)
        >>> loss_weight(torch.nn.MSELoss(), output, torch.zeros(4, 3))
        tensor(12)
    """
    refuse_coupled(criterion)
    raise TypeError(
        f"loss_weight does not know the divisor of the mean of {_name(criterion)}; give DataParallelCriterion weight=, a "
        "function (output, *targets) -> scalar, or register one with @loss_weight.register"
    )


def refuse_coupled(criterion: Any) -> None:
    """Raises ``TypeError`` if the name of a loss shows that its rows depend on each other."""
    function = unwrap(criterion)[0]
    plain_name = re.sub(r"[^a-z]", "", _name(function).lower())
    if _COUPLED.search(plain_name) or type(function).__module__.startswith(
        "pytorch_metric_learning."
    ):
        raise TypeError(
            f"{_name(function)} appears to be a loss whose rows depend on each other, so it is no mean of parts: give "
            "DataParallelCriterion whole=True, which computes it once for all rows; AdditiveLoss(statistics, finish) for a "
            "function of sums, as DiceLoss is; or weight=, a function (output, *targets) -> scalar, if rows are independent"
        )


_count = torch.tensor  # Reading a number on the CPU does not wait for a device.


def _terms(*shapes: torch.Size) -> Tensor:
    """Returns the number of elements of the shapes, broadcast together."""
    # torch.broadcast_shapes is slow.
    whole = shapes[0] if len({*shapes}) == 1 else torch.Size(torch.broadcast_shapes(*shapes))
    return _count(whole.numel())


def _classes(
    *, target: Tensor, weight: Tensor | None = None, ignore_index: int | None = -100, **_: object
) -> Tensor:
    """Divisor of ``nn.CrossEntropyLoss`` and ``nn.NLLLoss``.

    Targets that are probabilities divide by their number.
    """
    if target.is_floating_point():
        return _count(target.numel() // max(target.size(1 if target.dim() > 1 else 0), 1))
    # None is the default of linear_cross_entropy.
    counted = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return counted.sum()
    return (weight[target.masked_fill(~counted, 0)] * counted).sum()


def _elements(
    *, input: Tensor, target: Tensor, weight: Tensor | None = None, **_: object
) -> Tensor:
    """Number of elements after broadcasting. A ``weight`` scales the terms, not the divisor."""
    if (
        weight is not None
        and weight.dim() == input.dim()
        and weight.size(0) not in (1, input.size(0))
    ):
        raise ValueError(
            f"the loss has a weight of shape {tuple(weight.shape)} for an output of shape {tuple(input.shape)}: a weight per row "
            "must be split like the rows; pass it with the targets, as in criterion(outputs, target, weight)"
        )
    return _terms(input.shape, target.shape)


def _weighted_elements(
    *, input: Tensor, target: Tensor, weight: Tensor | None = None, **_: object
) -> Tensor:
    """Divisor of ``F.mse_loss`` and ``F.l1_loss``: the sum of ``weight`` if it is given."""
    return _elements(input=input, target=target) if weight is None else weight.sum()


def _divergence(*, input: Tensor, target: Tensor, reduction: str = "mean", **_: object) -> Tensor:
    if reduction == "batchmean":
        return _count(input.size(0) if input.dim() else 1)
    return _terms(input.shape, target.shape)


def _gaussian(*, input: Tensor, target: Tensor, var: Tensor | float, **_: object) -> Tensor:
    shapes = [input.shape, target.shape]
    # gaussian_nll_loss adds a dimension to one variance for each row.
    if isinstance(var, Tensor) and var.shape != input.shape[:-1]:
        shapes.append(var.shape)
    return _terms(*shapes)


def _rows(*, input: Tensor, **_: object) -> Tensor:
    """Number of rows: the elements of all dimensions but the last, the classes."""
    return _terms(input.shape[:-1])


def _pairs(*, input1: Tensor, input2: Tensor, target: Tensor, **_: object) -> Tensor:
    """Number of pairs. One target may be that of all."""
    return _terms(input1.shape[:-1], input2.shape[:-1], target.shape)


def _ranking(*, input1: Tensor, input2: Tensor, target: Tensor, **_: object) -> Tensor:
    return _terms(input1.shape, input2.shape, target.shape)


def _triplets(
    *,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance_function: Any = None,
    **_: object,
) -> Tensor:
    if distance_function is None or isinstance(distance_function, nn.PairwiseDistance):
        return _terms(anchor.shape[:-1], positive.shape[:-1], negative.shape[:-1])
    distances = distance_function(anchor, positive), distance_function(anchor, negative)
    return _terms(*(each.shape for each in distances))


def _sequences(
    *, log_probs: Tensor, target_lengths: Tensor | tuple[int, ...] | list[int], **_: object
) -> Tensor:
    """Divisor of ``F.ctc_loss``, the number of sequences.

    It divides the loss of each sequence by its length before.
    """
    lengths = target_lengths.numel() if isinstance(target_lengths, Tensor) else len(target_lengths)
    return _count(1 if log_probs.dim() == 2 else lengths)


# Each loss: its module, its function, and the divisor of its mean.
_LOSSES: list[tuple[type[nn.Module], Callable[..., Tensor], Rule]] = [
    (nn.CrossEntropyLoss, F.cross_entropy, _classes),
    (nn.NLLLoss, F.nll_loss, _classes),
    (nn.BCELoss, F.binary_cross_entropy, _elements),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, _elements),
    (nn.MSELoss, F.mse_loss, _weighted_elements),
    (nn.L1Loss, F.l1_loss, _weighted_elements),
    (nn.SmoothL1Loss, F.smooth_l1_loss, _elements),
    (nn.HuberLoss, F.huber_loss, _elements),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, _elements),
    (nn.GaussianNLLLoss, F.gaussian_nll_loss, _gaussian),
    (nn.KLDivLoss, F.kl_div, _divergence),
    (nn.SoftMarginLoss, F.soft_margin_loss, _elements),
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss, _elements),
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss, _rows),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, _rows),
    (nn.MultiMarginLoss, F.multi_margin_loss, _rows),
    (nn.CosineEmbeddingLoss, F.cosine_embedding_loss, _pairs),
    (nn.MarginRankingLoss, F.margin_ranking_loss, _ranking),
    (nn.TripletMarginLoss, F.triplet_margin_loss, _triplets),
    (nn.TripletMarginWithDistanceLoss, F.triplet_margin_with_distance_loss, _triplets),
    (nn.CTCLoss, F.ctc_loss, _sequences),
]
if hasattr(nn, "LinearCrossEntropyLoss"):  # new in torch 2.13
    _LOSSES.append((nn.LinearCrossEntropyLoss, F.linear_cross_entropy, _classes))
RULES: dict[Callable[..., Tensor], Rule] = {}
# Handlers of these losses. A handler that a user registers for one of them replaces it here.
_FORMS: dict[Callable[..., Tensor], tuple[type[nn.Module], Callable[..., Tensor]]] = {}


@functools.cache
def _signature(function: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(function)


def arguments_of(
    function: Callable[..., Tensor], /, *args: Any, **kwargs: object
) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    try:
        return _signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"{function.__qualname__}: {error}; pass targets after outputs: criterion(outputs, targets)"
        ) from None


def instead_of(value: object) -> str:
    """Returns what to write in place of a value that is no tensor."""
    if isinstance(value, Mapping) and value:
        entry = next(iter(value))
        return f"give a function of an entry, as lambda output, target: loss(output[{entry!r}], target)"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "pass a tensor that is in it"
    return "use torch.as_tensor"


def divisor(rule: Rule, criterion: Any, arguments: dict[str, object]) -> Tensor:
    """Returns the divisor of a mean from the arguments of its call by name."""
    for name in ("input", "target"):
        if name in arguments and not isinstance(arguments[name], Tensor):
            kind = type(arguments[name]).__name__
            advice = instead_of(arguments[name])
            raise TypeError(
                f"the {name} of {_name(criterion)} is a {kind}, expected a tensor: {advice}"
            )
    return rule(**arguments).detach()  # faster than torch.no_grad()


def add_loss(
    module: type[nn.Module], function: Callable[..., Tensor], rule: Rule = _classes
) -> None:
    """Adds a loss to those that are computed as sums: its module, its function, and the divisor of
    its mean.
    """
    RULES[function] = rule
    arguments = _signature(module.forward).parameters
    names = [
        name
        for name in _signature(rule).parameters
        if name in _signature(function).parameters and name not in arguments
    ]

    @loss_weight.register(module)
    def weigh(criterion: Any, output: object, *targets: Any, **kwargs: object) -> Tensor:
        if type(criterion).forward is not module.forward:
            # a subclass with its own forward is another loss
            return loss_weight.dispatch(object)(criterion, output)
        settings = {name: getattr(criterion, name) for name in names if hasattr(criterion, name)}
        bound = arguments_of(module.forward, criterion, output, *targets, **kwargs)
        del bound["self"]
        if "log_input" in bound:  # name of the argument in PoissonNLLLoss.forward
            bound["input"] = bound.pop("log_input")
        return divisor(rule, criterion, settings | bound)

    _FORMS[weigh] = module, function


for _loss in _LOSSES:
    add_loss(*_loss)


@loss_weight.register(nn.AdaptiveLogSoftmaxWithLoss)
def _weigh_adaptive(criterion: Any, output: object, *targets: Any) -> Tensor:
    return _count(targets[0].numel())


FUNCTIONS = types.FunctionType, types.BuiltinFunctionType


@loss_weight.register(types.FunctionType)
@loss_weight.register(types.BuiltinFunctionType)
@loss_weight.register(functools.partial)
def _weigh_function(criterion: object, output: Any, *targets: object, **kwargs: Any) -> Tensor:
    function, arguments, settings = unwrap(criterion)
    if not isinstance(function, FUNCTIONS) or function not in RULES:
        weigh = loss_weight.dispatch(object) if function is criterion else loss_weight
        return weigh(function, output, *targets, **settings | kwargs)
    bound = arguments_of(function, *arguments, output, *targets, **settings | kwargs)
    if bound.get("size_average") is not None or bound.get("reduce") is not None:
        raise ValueError(
            f"{_name(function)} was given size_average= or reduce=, which torch deprecated; use reduction="
        )
    return divisor(RULES[function], function, bound)


# Handlers for many criteria, which may raise TypeError.
_GENERAL = {loss_weight.dispatch(object), loss_weight.dispatch(types.FunctionType), *_FORMS}


def unwrap(criterion: object) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function inside nested partials, with their positional and keyword arguments."""
    if not isinstance(criterion, functools.partial):
        return criterion, (), {}
    function, arguments, settings = unwrap(criterion.func)
    return function, (*arguments, *criterion.args), settings | criterion.keywords


def find_torch_loss(criterion: Any) -> Rule | None:
    """Returns the function of ``torch.nn.functional`` that a module, a partial or a function
    computes, or None.
    """
    function, _, _ = unwrap(criterion)
    if isinstance(function, FUNCTIONS):
        return function if function in RULES else None
    module, form = _FORMS.get(loss_weight.dispatch(type(function)), (None, None))
    return form if module is not None and type(function).forward is module.forward else None


def is_known(criterion: object) -> bool:
    """Returns True if :func:`loss_weight` has a rule for ``criterion``."""
    return (
        find_torch_loss(criterion) is not None
        or loss_weight.dispatch(type(unwrap(criterion)[0])) not in _GENERAL
    )


def has_sum(criterion: Any) -> bool:
    """Returns True if ``reduction="sum"`` gives the sum of the terms of the mean."""
    function = find_torch_loss(criterion)
    # The sum omits the division by the length of each sequence.
    return function is not None and function is not F.ctc_loss


def _name(criterion: object) -> str:
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def reduction_of(criterion: Any) -> str:
    """Returns the reduction of a criterion: ``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``.

    The attribute of an unknown module does not determine the result of its ``forward``, which is
    assumed to be a mean.
    """
    function, _, settings = unwrap(criterion)
    if "reduction" in settings or "size_average" in settings or "reduce" in settings:
        return str(reduction_in(settings))
    if isinstance(function, FUNCTIONS):
        try:
            parameter = inspect.signature(function).parameters["reduction"]
        # it has no such argument, or is a builtin without a signature
        except (KeyError, ValueError):
            return "mean"
        return "mean" if parameter.default is parameter.empty else str(parameter.default)
    return str(getattr(function, "reduction", "mean")) if is_known(criterion) else "mean"


def reduction_in(settings: dict[str, object]) -> str:
    """Returns the reduction that keyword arguments select, including the deprecated
    ``size_average=`` and ``reduce=``.
    """
    if settings.get("size_average") is None and settings.get("reduce") is None:
        return str(settings.get("reduction", "mean"))
    if settings.get("reduce") is False:
        return "none"
    return "sum" if settings.get("size_average") is False else "mean"


def counts_classes(criterion: Any) -> bool:
    """Returns True if the divisor is the number of class indices that are not ignored: targets
    alone tell it.
    """
    loss = find_torch_loss(criterion)
    return loss in (F.cross_entropy, F.nll_loss) and not unwrap(criterion)[1]
