"""Runs two updates that compute nothing, and brings back what they allocated. In a process of its own, as a rule."""

import contextlib
import functools
import gc
import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ...batch.microbatches import cut_batch
from ...batch.nested import leaves
from ...batch.row_marks import Arguments
from ...savings.activation_checkpointing import checkpoint_blocks
from ..errors import HINT, UnknownMemory
from ..operators.cuda import cuda_choices
from .allocations import Count
from .fake_devices import HOME, host_beside
from .fake_tensors import fake_batch, fake_copy, names_of
from .patches import counting_random_states, devices_that_mix, meeting_alone, rows_of_one_sequence, undisturbed
from .request import Request, Trace
from .strategies import Layout

__all__: list[str] = []

TRACED = 3  # micro-batches: a first, one that adds, one that reduces; more of them need no more


def run_traces(jobs: Sequence[tuple[Request, int]]) -> list[Trace]:
    """One trace for each request and its number of rows in a micro-batch, in as many processes as there are cores.

    Raises:
        UnknownMemory: an operator's memory cannot be told without values.
        BaseException: what the module, the criterion or the optimizer raises.
    """
    importlib.import_module("torch._dynamo")  # which fake tensors import: here, or in every process again
    count = min(len(jobs), os.cpu_count() or 1)
    shares = [jobs[start::count] for start in range(count)]  # those that follow in one process find torch's caches filled
    calls = [functools.partial(_trace_all, share) for share in shares]
    results = [finish() for finish in [_start(call) for call in calls]]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    traces: list[Any] = [None] * len(jobs)
    for start, result in enumerate(results):
        traces[start::count] = result if isinstance(result, list) else []
    return traces


def _trace_all(jobs: Sequence[tuple[Request, int]]) -> list[Trace]:
    if jobs[0][0].layout.needs_warm_up:
        _trace(*jobs[0])
    return [_trace(*job) for job in jobs]


def _start(call: Callable[[], list[Trace]]) -> Callable[[], list[Trace] | BaseException]:
    """Starts a forked process: it has the module without sending it, and what happens there to torch ends with it. Autograd
    refuses to run in a process that was forked after a backward on an accelerator; then, and where nothing forks, it is here."""
    if sys.platform != "linux":
        return call
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, whose locks the child does not take
        child = os.fork()
    if child == 0:
        os.close(read)
        _answer(call, write)
    os.close(write)

    def finish() -> list[Trace] | BaseException:
        with os.fdopen(read, "rb") as pipe:
            found = pipe.read()
        _, status = os.waitpid(child, 0)
        if not found:
            raise RuntimeError(f"the process that traced the step ended with status {status} and without a word")
        result = pickle.loads(found)
        if isinstance(result, RuntimeError) and "Autograd-and-Fork" in str(result):
            return call()
        assert isinstance(result, (list, BaseException))
        return result

    return finish


def _answer(call: Callable[[], list[Trace]], write: int) -> None:
    """In the child: sends the trace or the failure, and ends without running anybody's exit handlers."""
    status = 1
    try:
        gc.freeze()  # what the parent has is not looked through, nor copied by looking
        torch.set_num_threads(1)  # threads of the parent's pool are not here
        try:
            result: Any = call()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            result = error
        with os.fdopen(write, "wb") as pipe:
            pipe.write(_pickled(result))
        status = 0
    finally:
        os._exit(status)


def _pickled(result: Any) -> bytes:
    try:
        sent = pickle.dumps(result)
        if isinstance(result, BaseException):
            pickle.loads(sent)
        return sent
    except Exception:  # noqa: BLE001 - an exception with arguments of its own
        kind = next(base for base in type(result).__mro__ if base.__module__ == "builtins")
        return pickle.dumps(kind(f"{type(result).__name__}: {result}"))


def _trace(request: Request, rows: int) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = fake_copy(request.module, mode, HOME)
    criterion = fake_copy(request.criterion, mode, HOME)
    checkpoint_blocks(module, request.blocks)
    whole = rows * (request.micro_batches // request.batches)
    place = host_beside(request.devices) if request.layout.batch_on_host else HOME
    batch = fake_batch((request.inputs, request.targets), whole, request.rows, mode, place, request.dim)
    count = Count(names_of({"": module, "criterion": criterion}), request.scalar, notes=request.kind.scratch)
    choices = cuda_choices(request.kind.fuses) if request.kind.like_cuda else contextlib.nullcontext()
    with undisturbed(), meeting_alone(), devices_that_mix(), rows_of_one_sequence(), choices, mode:
        try:
            _run(request, count, module, criterion, batch, rows)
        except DataDependentOutputException as error:
            raise _unknown(error.func, "gives a value that nobody knows") from error
        except DynamicOutputShapeException as error:
            raise _unknown(error.func, "gives a result whose size depends on values") from error
        except UnsupportedOperatorException as error:
            raise UnknownMemory(f"the operator {error.func} {_NO_KERNEL}") from error
        except RuntimeError as error:
            if "There was no fake impl registered for" not in str(error):
                raise
            name = str(error).partition("registered for ")[2].partition(". ")[0]
            raise UnknownMemory(f"the operator {name} {_NO_KERNEL}") from error
    events = _ordered(count.events, {call.position for call in count.calls})
    traced = min(request.micro_batches, TRACED)
    return Trace(rows, traced, count.blocks, events, count.operators, count.marks, count.flops, count.calls)


def _ordered(events: list[int], places: set[int]) -> list[int]:
    """What is released between two allocations, or two of ``places``, has no order: dictionaries by address decide it."""
    ordered: list[int] = []
    released: list[int] = []
    for place, event in enumerate(events):
        if event > 0 or place in places:
            ordered += sorted(released, reverse=True)
            released = []
        (ordered if event > 0 else released).append(event)
    return ordered + sorted(released, reverse=True)


_NO_KERNEL = "has no fake kernel: register one with torch.library.register_fake, which gives the shape of its result"


def _unknown(func: Any, why: str) -> UnknownMemory:
    return UnknownMemory(f"the operator {func} {why}, so its memory cannot be told beforehand: {HINT}")


def _run(request: Request, count: Count, module: Any, criterion: Any, batch: Any, rows: int) -> None:
    arguments, targets = batch
    count.see_all((leaf for _, leaf in leaves((arguments, targets))), "inputs")
    for part in (module, criterion):
        if isinstance(part, torch.nn.Module):
            count.see_all([*part.parameters(), *part.buffers()], "parameters")
    pieces = cut_batch(arguments, targets, [rows] * (request.micro_batches // request.batches), (request.dim, request.dim))
    micro_batches = (pieces * request.batches)[:TRACED]
    with count, contextlib.nullcontext() if request.kind.like_cuda else counting_random_states(count):
        layout = request.layout(request, module, criterion)
        count.see_all(layout.parameters, "parameters")  # fsdp has made new ones
        try:
            for name, some in (("first", micro_batches[:1]), ("second", micro_batches)):  # the first makes the optimizer's state
                gc.collect()
                count.mark(name)
                count.flops = 0
                _update(layout, count, some, host_beside(request.devices) if request.kind.like_cuda else None)
        finally:
            layout.close()


def _update(
    layout: Layout, count: Count, micro_batches: list[tuple[Arguments, tuple[Any, ...]]], host: torch.device | None
) -> None:
    count.see_all(layout.buckets, "communication buckets")
    layout.zero_grad()
    for index, (arguments, targets) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with contextlib.nullcontext() if last else layout.accumulating():
            loss = layout.loss(arguments, targets)
            count.turn("temporaries", "saved activations")
            count.see_all(layout.parameter_copies(), "parameters")
            count.mark("backward")
            loss.backward()
            count.see_all(layout.gradients(), "gradients")
            del loss
    count.mark("update")
    layout.optimizer.step()
    count.see_all(layout.optimizer_states(), "optimizer state")
    for state in layout.optimizer_states():
        if host is not None and isinstance(state, torch.Tensor) and state.dim() == 0:
            count.move(state, host)  # AdamW's count of steps, which stays with the CPU
