"""Variants of a step for the table of tricks: what a trick would leave out is put in, or what it needs is changed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.nested import map_leaves
from ..batch.row_marks import Arguments
from ..savings.checkpointing import checkpoint_activations
from ..savings.linear_cross_entropy import LinearCrossEntropy
from .trace.optimizer_choice import OptimizerChoice
from .trace.plain_program import compute_loss
from .trace.traced_request import Request

__all__: list[str] = []


def keeping(criterion: Callable[..., Any], *, outputs: bool) -> Callable[..., Any]:
    """Returns a criterion that keeps the outputs of the model, or its losses with their graph, until the next call."""
    kept: list[Any] = []

    def call(output: Any, *targets: Any) -> Tensor:
        kept.clear()
        loss = compute_loss(criterion, output, targets)
        kept.append(output if outputs else loss)
        return loss

    return call


class ZeroedGradients(torch.optim.Optimizer):
    """Fills gradients with zeros in the place of releasing them, as ``zero_grad(set_to_none=False)`` does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        """Steps the optimizer."""
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills gradients with zeros."""
        self.inner.zero_grad(set_to_none=False)


def with_zeroed_gradients(choice: OptimizerChoice) -> OptimizerChoice:
    """Returns the choice of an optimizer that keeps gradients as zeros."""
    return OptimizerChoice(lambda parameters: ZeroedGradients(choice(parameters)), foreach=False)


class Evaluation(nn.Module):
    """An evaluation of a module as a step: the loss has no gradient, and one parameter of its own is trained.

    Args:
        with_graph: keeps the graph, as without ``torch.no_grad()``.
    """

    def __init__(self, module: nn.Module, with_graph: bool) -> None:
        super().__init__()
        self.inner, self.with_graph = module, with_graph
        self.trained = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with torch.set_grad_enabled(self.with_graph):
            return self.trained, self.inner(*inputs, **kwargs)


def evaluation(request: Request, *, with_graph: bool) -> Request:
    """Returns the request of an evaluation, without gradients of parameters and without a state of the optimizer."""
    criterion = request.criterion

    def call(trained: Tensor, output: Any, *targets: Any) -> Tensor:
        with torch.set_grad_enabled(with_graph):
            loss = compute_loss(criterion, output, targets)
        return trained + loss.detach()

    optimizer = OptimizerChoice(lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.0), foreach=False)
    return change(request, module=Evaluation(request.module, with_graph), criterion=call, optimizer=optimizer)


def in_bfloat16(request: Request) -> Request:
    """Returns the request of a model whose parameters and inputs are in bfloat16."""
    convert = functools.partial(_convert, dtype=torch.bfloat16)
    inputs = Arguments(map_leaves(convert, request.inputs.inputs), map_leaves(convert, request.inputs.kwargs))
    of_outputs = request.targets if isinstance(request.criterion, nn.CrossEntropyLoss) else map_leaves(convert, request.targets)
    return change(request, module=copy.deepcopy(request.module).to(torch.bfloat16), inputs=inputs, targets=of_outputs)


def half_input(request: Request) -> Request:
    """Returns the request with half the height and width of images, or half the length of sequences.

    Raises:
        ValueError: the inputs are vectors.
    """
    tensors = [one for one in request.inputs.inputs if isinstance(one, Tensor)]
    if not tensors or tensors[0].dim() < 2 or (tensors[0].dim() == 2 and tensors[0].is_floating_point()):
        raise ValueError("the inputs are vectors")
    dims = range(2, tensors[0].dim()) if tensors[0].dim() > 3 else (1,)
    sizes = {tensors[0].size(dim) for dim in dims}

    def halve(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        first, *others = leaf.shape
        per_row = first // request.rows  # flattened targets have several entries per row
        return leaf.new_empty(
            [first // 2 if per_row in sizes else first, *(size // 2 if size in sizes else size for size in others)]
        )

    inputs = Arguments(map_leaves(halve, request.inputs.inputs), map_leaves(halve, request.inputs.kwargs))
    return change(request, inputs=inputs, targets=map_leaves(halve, request.targets))


def checkpoint_sequential(request: Request) -> Request:
    """Returns the request with every outermost ``nn.Sequential`` in segments.

    Raises:
        ValueError: the model has none.
    """
    module = copy.deepcopy(request.module)
    names: list[str] = []
    for name, child in module.named_modules():
        is_outermost = not any(name.startswith(f"{other}." if other else "") for other in names)
        if is_outermost and type(child) is nn.Sequential and len(child) > 2:
            names.append(name)
    if not names:
        raise ValueError("there is no nn.Sequential")
    checkpoint_activations(module, blocks=names, segments=2)
    return change(request, module=module)


def without_logits(request: Request) -> Request:
    """Returns the request with the last linear layer in a :class:`LinearCrossEntropy`.

    Raises:
        ValueError: the model does not end in a linear layer, or the loss is another one.
    """
    module, criterion = copy.deepcopy(request.module), request.criterion
    linear = [name for name, child in module.named_modules() if type(child) is nn.Linear]
    if type(criterion) is not nn.CrossEntropyLoss or not linear:
        raise ValueError("there is no linear layer before a cross-entropy loss")
    *path, name = linear[-1].split(".")
    head: Any = module.get_submodule(linear[-1])
    setattr(module.get_submodule(".".join(path)), name, nn.Identity())
    fused = LinearCrossEntropy(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    return change(request, module=module, criterion=fused)


def change(request: Request, **changes: Any) -> Request:
    """Returns a copy of the request."""
    values = {**vars(request), **changes}
    return Request(**values)


def _convert(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
