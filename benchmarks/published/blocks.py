"""Programs that measure single blocks: Liger-Kernel's benchmarks and that of cut cross-entropy."""

import contextlib
from typing import Any

import torch
from models import Program, bf16, on_meta
from torch import Tensor, nn
from torch.nn import functional as F


class Retained(nn.Module):
    """A layer whose input is a parameter. Its graph stays alive after the backward, as with ``retain_graph=True``."""

    def __init__(self, layer: nn.Module, input: Tensor, retains: bool = True) -> None:
        super().__init__()
        self.layer, self.input, self.retains = layer, nn.Parameter(input), retains
        self.saved: list[Tensor] = []

    def forward(self, _: Tensor) -> Tensor:
        """Returns the output of the layer."""
        self.saved = []
        keep = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with keep if self.retains else contextlib.nullcontext():
            result: Tensor = self.layer(self.input)
            return result

    def _keep(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor


class _Gradient(torch.autograd.Function):
    """A scalar whose gradient with respect to ``output`` is given, or a new random tensor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor | None) -> Tensor:
        ctx.output = output  # a variable of the program until the end of the backward
        ctx.gradient = torch.randn_like(output) if gradient is None else gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        ctx.gradient = ctx.gradient.to(ctx.output.dtype)  # as autograd does, and it stays until the end of the backward
        return ctx.gradient, None


class Backward(nn.Module):
    """``output.backward(gradient)`` as a criterion."""

    def __init__(self, gradient: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("gradient", gradient)

    def forward(self, output: Tensor) -> Tensor:
        """Returns a scalar whose backward begins with the gradient."""
        result: Tensor = _Gradient.apply(output, self.gradient)
        return result


class Still(torch.optim.SGD):
    """An optimizer that does nothing: gradients are added up from one run to the next."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves the gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leaves the parameters."""


def _run(layer: nn.Module, input: Tensor, criterion: Any, retains: bool = True) -> Program:
    return Program(Retained(layer, input, retains), criterion, torch.zeros(2, 1), (), {"optimizer": Still})


@on_meta
def mlp(activation: str, rows: int, length: int) -> Program:
    """Builds the MLP of Llama in bf16."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    layer = LlamaMLP(LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act=activation))
    return _run(layer.to(bf16), torch.empty(rows, length, 4096, dtype=bf16), Backward())


@on_meta
def layer_norm(width: int) -> Program:
    """Builds ``nn.LayerNorm`` on 4,096 rows."""
    input = torch.empty(4096, width)
    return _run(nn.LayerNorm(width), input, Backward(torch.empty_like(input)))


@on_meta
def rms_norm(width: int) -> Program:
    """Builds the RMSNorm of Llama on 2,048 rows in bf16, with a weight in float32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    input = torch.empty(2048, width, dtype=bf16)
    return _run(LlamaRMSNorm(width), input, Backward(torch.empty_like(input)))


class CrossEntropy(nn.Module):
    """The loss of logits, with its targets as a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("targets", torch.empty(rows, dtype=torch.int64))

    def forward(self, logits: Tensor) -> Tensor:
        """Returns the mean loss."""
        return F.cross_entropy(logits, self.targets)  # type: ignore[arg-type]


@on_meta
def cross_entropy(words: int) -> Program:
    """Builds the loss of 16,384 rows of logits."""
    return _run(nn.Identity(), torch.empty(16384, words), CrossEntropy(16384), retains=False)


class Head(nn.Module):
    """A language model's head with its loss: capped logits in bf16, the loss in float32."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.empty(256000, 2304, dtype=bf16)), CrossEntropy(rows)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the mean loss."""
        logits = hidden @ self.weight.T
        logits = torch.tanh(logits / 30.0) * 30.0
        result: Tensor = self.loss(logits.float())
        return result


@on_meta
def gemma_head(rows: int) -> Program:
    """Builds the head of Gemma 2 (2B)."""
    program = _run(Head(rows), torch.empty(rows, 2304, dtype=bf16), torch.sum, retains=False)
    return Program(program.module, program.criterion, program.inputs, (), {"optimizer": torch.optim.SGD})
