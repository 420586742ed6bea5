"""Savings that are settings of a step and not functions: layouts over devices, precision, optimizers, micro-batches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .saving import Saving


def _spread_state(step: Any) -> Mapping[str, Any] | None:
    is_possible = step.devices > 1 and step.layout.takes_balanced_optimizer and not step.balanced
    return {"balanced": True} if is_possible else None


def _shard(step: Any) -> Mapping[str, Any] | None:
    is_possible = step.devices > 1 and not step.layout.is_sharded and not step.balanced
    balanced = getattr(step.optimizer, "needs_whole_parameters", False)  # of matrices
    return {"layout": "fsdp", "split": None, "balanced": balanced} if is_possible else None


def use_bf16_parameters(module: nn.Module) -> None:
    """Converts parameters and buffers in place, as ``module.to(torch.bfloat16)``, which refuses the copies of a trace."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


def _stores_fp32(step: Any) -> bool:
    return step.precision != "fp16" and any(each.dtype == torch.float32 for each in step.module.parameters())


def _use_optimizer(make: Callable[..., torch.optim.Optimizer], smaller: tuple[str, ...], step: Any) -> Mapping[str, Any] | None:
    """Replaces an optimizer that is not among those with as little state. Those of an existing step stay."""
    choice = step.optimizer
    if not hasattr(choice, "make") or choice.name in smaller:
        return None
    if choice.name == "SGD" and not choice.plain([nn.Parameter(torch.zeros(1))])[0].param_groups[0]["momentum"]:
        return None
    return {"optimizer": dataclasses.replace(choice, make=make)}


MICRO_BATCHES = Saving(
    name="2 micro-batches",
    option="micro-batches",
    saves="half of the activations",
    cost="smaller kernels",
    order=0,
    stage="by hand",
    change=lambda step: {"micro_batches": 2},
)
BALANCED = Saving(
    name="BalancedOptimizer",
    option="BalancedOptimizer",
    saves="the optimizer's state, over the devices",
    cost="traffic of the updated parameters",
    needs="several devices",
    order=100,
    stage="layout",
    change=_spread_state,
)
SHARDED = Saving(
    name='strategy="fsdp"',
    option="FSDP2",
    saves="parameters, gradients and the optimizer's state, over the ranks",
    cost="traffic of all parameters in every micro-batch",
    needs="torchrun",
    order=110,
    stage="layout",
    change=_shard,
)
BF16 = Saving(
    name='precision="bf16"',
    option="bf16",
    saves="half of most activations",
    cost="other arithmetic",
    order=500,
    stage="arithmetic",
    result="other arithmetic",
    change=lambda step: {"precision": "bf16"} if step.precision == "fp32" else None,
)
BF16_PARAMETERS = Saving(
    name="module.to(torch.bfloat16)",
    option="bf16 parameters",
    saves="half of parameters, gradients and the optimizer's state",
    cost="updates of three digits: small ones are lost",
    order=510,
    stage="arithmetic",
    result="other arithmetic",
    suits=_stores_fp32,
    change_module=use_bf16_parameters,
    lines=("module.to(torch.bfloat16)",),
)
_SGD = Saving(
    name="another optimizer: SGD",
    option="SGD",
    saves="all of the optimizer's state",
    cost="another result",
    order=600,
    stage="optimizer",
    result="another optimizer",
    change=functools.partial(_use_optimizer, torch.optim.SGD, ()),
)
_ADAFACTOR = dataclasses.replace(
    _SGD,
    name="another optimizer: Adafactor",
    option="Adafactor",
    saves="the optimizer's state, but a row and a column of each matrix",
    order=610,
    change=functools.partial(_use_optimizer, torch.optim.Adafactor, ("Adafactor",)),
)
_ADAMW8BIT = dataclasses.replace(
    _SGD,
    name="another optimizer: AdamW8bit",
    option="AdamW8bit",
    saves="three quarters of AdamW's state",
    needs="torchao",
    order=620,
    change=None,
    bytes_of=lambda parts: parts["optimizer state"] * 3 // 4,
)
_IN_PLACE = Saving(
    name="nn.LeakyReLU(inplace=True)",
    option="activations in place",
    saves="the input of each such activation",
    cost="an error or other numbers where something else reads that input",
    order=320,
    stage="by hand",
)
_UPDATES_IN_BACKWARD = Saving(
    name="register_post_accumulate_grad_hook",
    option="updates in the backward",
    saves="the gradients, but the largest",
    cost="no clipping, no accumulation",
    needs="one process, and a loop by hand",
    order=330,
    stage="by hand",
)
