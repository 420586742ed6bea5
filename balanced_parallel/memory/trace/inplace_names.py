"""The activations that may be in place, found on fake copies in a process of its own."""

import contextlib
import dataclasses

from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public module of fake tensors

from ...savings.activation_checkpointing import checkpoint_blocks
from ...savings.inplace_modules import find_inplace_activations
from ..operators.cuda import cuda_choices
from .applied_savings import change_module
from .child_process import start_in_child
from .fake_devices import HOME
from .fake_tensors import fake_batch, fake_copy
from .patches import undisturbed
from .traced_request import Request

__all__: list[str] = []


def with_inplace_activations(request: Request) -> Request:
    """Returns the request with every activation in place that may be."""
    return dataclasses.replace(request, inplace=inplace_names(request))


def inplace_names(request: Request) -> tuple[str, ...]:
    """Returns the names of the modules that :func:`inplace_activations` changes, after the other savings of the request.

    Nothing is computed: the memory that operators read and keep decides, and the version counters of autograd.

    Raises:
        BaseException: the module raised it.
    """

    def find() -> tuple[str, ...]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        module = fake_copy(request.module, mode, HOME)
        inputs, kwargs = fake_batch(tuple(request.inputs), min(request.rows, 4), request.rows, mode, HOME, request.dim)
        choices = cuda_choices(request.kind.fuses) if request.kind.like_cuda else contextlib.nullcontext()
        with undisturbed(), choices, mode:
            change_module(module, request.savings)
            checkpoint_blocks(module, request.blocks)
            return find_inplace_activations(module, kwargs or inputs, have_values=False)

    found = start_in_child(find)()
    if isinstance(found, BaseException):
        raise found
    return found
