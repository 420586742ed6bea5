"""Runs two updates on fake tensors, which compute nothing, and records every allocation.

In processes of their own.
"""

import contextlib
import contextvars
import dataclasses
import gc
import importlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (  # torch has no public module of fake tensors
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...savings.saving import Savings
from ...strategies.tracing import Shard, TracedBatch
from ..operators import HINT, KERNELS, UnknownMemory, autograd_kernels, cuda_choices
from ..problem import Layout, Request
from . import fakes
from .allocations import PACKAGE, Count, Trace, ordered
from .doubles import one_chunk, traced_host
from .fakes import HOME, host_of
from .private import leaves_of_tree
from .stacks import NotRepeating, extend_traces, find_repeated
from .values import is_small

T = TypeVar("T")
Job = tuple[Request, int]  # the rows of a micro-batch
Tracing = Callable[[Request, int], T]


def run_traces(jobs: Sequence[Job]) -> list[Trace]:
    """Returns one trace for each request and number of rows in a micro-batch.

    Uses as many processes as there are cores.
    """
    return _traces_of(jobs, _trace)


class ProgramError(ValueError):
    """The module, the criterion or the optimizer raised an error, which no other way to run them
    avoids.
    """


def try_traces(jobs: Sequence[Job]) -> list[Trace | ValueError]:
    """Returns a trace for each of ``jobs``, or the reason why there is none, in one line."""
    return _traces_of(jobs, _trace_or_reason)


_log = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds
BEAT = 3.0  # seconds between two lines of progress
_processes = contextvars.ContextVar["Processes | None"]("processes", default=None)


@contextlib.contextmanager
def keeping_processes(request: Request, seconds: float = math.inf) -> Iterator[None]:
    """Traces ``request`` and those that follow from it in the same processes, which find torch's
    caches filled, and raises ``TimeoutError`` after so many seconds.
    """
    with contextlib.closing(Processes([request] * 2, seconds)) as processes, fakes.uncollected():
        token = _processes.set(processes)
        try:
            yield
        finally:
            _processes.reset(token)


class Processes:
    """Forked processes that trace requests.

    They have the objects of the caller without receiving them, and leave nothing behind.

    A trace runs in this process on other platforms than Linux, after a backward on an accelerator,
    which autograd refuses in a fork, and if all processes hang: a fork copies locks that other
    threads hold, and nothing releases them there.
    """

    def __init__(self, requests: Sequence[Request], seconds: float = math.inf) -> None:
        # fake tensors import it: here once, not again in each process
        importlib.import_module("torch._dynamo")
        self._requests = requests
        self._end = time.monotonic() + seconds
        self._pool: ProcessPoolExecutor | None = None
        if fakes.FORKS and not multiprocessing.current_process().daemon:
            count = min(len(requests), os.cpu_count() or 1)
            self._pool = ProcessPoolExecutor(
                count, multiprocessing.get_context("fork"), _prepare, (requests,)
            )

    def run(self, jobs: Sequence[Job], function: Tracing[T]) -> list[T]:
        """Returns the results of a function of each job, a request and a number of rows."""
        self._check_time()
        if self._pool is None:
            return [function(*job) for job in jobs]
        # The locks of threads are not taken there.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            results = [
                self._pool.submit(_run_known, function, self._describe(request), rows)
                for request, rows in jobs
            ]
        try:
            if self._work(results):
                return [result.result() for result in results]
        except BrokenProcessPool:
            raise RuntimeError("the process that traced the step ended without a result") from None
        except RuntimeError as error:
            if not _runs_in_parent_only(error):
                raise
        self.close()
        return self.run(jobs, function)

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError("no option that fits was found in time: give more seconds")

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            for process in self._pool._processes.values():  # kill_workers() is new in Python 3.14
                process.kill()
            self._pool.shutdown()
            self._pool = None

    def _work(self, results: Sequence[Future[T]]) -> bool:
        """Waits for results, and logs progress.

        Returns False if the processes use no processor for ``PATIENCE`` seconds.
        """
        used: object = None
        begin = last_check = time.monotonic()
        while self._pool is not None and (running := wait(results, min(BEAT, PATIENCE)).not_done):
            self._check_time()
            now = time.monotonic()
            count = len(results)
            _log.info("traced %d of %d after %.0f s", count - len(running), count, now - begin)
            if now - last_check < PATIENCE:
                continue
            last_check = now
            # The times of a process in and for the system are fields 14 and 15 of proc(5), behind
            # its name.
            before = used
            used = [
                Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
                for process in self._pool._processes
            ]
            if used == before:
                return False
        return True

    def _describe(self, request: Request) -> tuple[int, dict[str, Any]]:
        """Returns the place of a known request, and what is different: modules and batches are not
        sent.
        """
        place = next((place for place, other in enumerate(self._requests) if other is request), 0)
        before = vars(self._requests[place])
        return place, {
            name: value for name, value in vars(request).items() if value is not before[name]
        }


def _runs_in_parent_only(error: Exception) -> bool:
    """Returns True for the error of autograd in a process that was forked after a backward on an
    accelerator.
    """
    return "Autograd-and-Fork" in str(error)


_requests: list[Request] = []  # Only a forked process has some.


def _prepare(requests: Sequence[Request]) -> None:
    """Begins a forked process, which the parent ends after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _requests.extend(requests)
    gc.freeze()  # The collector does not visit, and so does not copy, the parent's objects.
    gc.disable()  # One more run, after a trace, would take a sixth of its time.
    torch.set_num_threads(1)  # The threads of the parent's pool do not exist here.


def _run_known(
    function: Tracing[T],
    description: tuple[int, dict[str, Any]],
    rows: int,
) -> T:
    place, changes = description
    try:
        return function(dataclasses.replace(_requests[place], **changes), rows)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an exception with further arguments
            kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            raise kind(f"{type(error).__name__}: {error}") from None
        raise


def _run_in_processes(jobs: Sequence[Job], run: Tracing[T]) -> list[T]:
    if (processes := _processes.get()) is not None:
        return processes.run(jobs, run)
    with contextlib.closing(Processes([request for request, _ in jobs])) as processes:
        return processes.run(jobs, run)


def _traces_of(jobs: Sequence[Job], run: Tracing[T]) -> list[T | Trace]:
    """Returns a trace of each job: from few blocks where these repeat, else from ``run``."""
    repeated: list[Trace | None] = []
    # One row of a device is a special case for torch, with other operators.
    for _, group in itertools.groupby(jobs, lambda job: (id(job[0]), job[1] > job[0].row_step)):
        requests, numbers = zip(*group, strict=True)
        repeated += trace_few(requests[0], numbers)
    missing = [job for job, trace in zip(jobs, repeated, strict=True) if trace is None]
    others = iter(_run_in_processes(missing, run) if missing else [])
    traces = [trace or next(others) for trace in repeated]
    # Few blocks repeat in the order of their releases.
    return [
        each._replace(events=ordered(each.events)) if isinstance(each, Trace) else each
        for each in traces
    ]


def trace_few(request: Request, numbers: Sequence[int]) -> Sequence[Trace | None]:
    """Returns a trace for each number of rows of a module with many equal blocks, from traces with
    few of them; None where they do not show it.

    One block more is traced with the last number of rows. The others follow.
    """
    nothing = [None] * len(numbers)
    if (repeated := find_repeated(request)) is None:
        return nothing
    stack, fewest = repeated
    # Blocks near the ends may differ from those in the middle, more of them where tensors wait.
    for count in (fewest, fewest + 2):
        few, more = (dataclasses.replace(request, blocks=(stack, count + n)) for n in (0, 1))
        jobs = [(few, rows) for rows in numbers] + [(more, numbers[-1])]
        traces = _run_in_processes(jobs, _trace_or_reason)
        complete = [trace for trace in traces if isinstance(trace, Trace)]
        if len(complete) < len(traces):  # A module may need all blocks, or fail with them too.
            return nothing
        *shorts, long = complete
        with contextlib.suppress(NotRepeating):
            return extend_traces(shorts, long, stack, stack.length - count)
    return nothing


def _trace_or_reason(request: Request, rows: int) -> Trace | ValueError:
    try:
        return _trace(request, rows)
    except Exception as error:
        if _runs_in_parent_only(error):
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_of_package = frame.f_code.co_filename.startswith(PACKAGE)
        is_refused = isinstance(error, ValueError)
        prefix = "" if is_refused else f"{type(error).__name__}: "
        reason = f"{prefix}{error}".splitlines()[0]
        return ValueError(reason) if is_refused and is_of_package else ProgramError(reason)


def _trace(request: Request, rows: int) -> Trace:
    """Traces the module, or the module with only some blocks of a stack."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stack, number = request.blocks or (None, 0)
    with nullcontext() if stack is None else stack.cut(request.module, number):
        module, criterion, optimizer = fakes.fake_copy(
            (request.module, request.criterion, request.optimizer), mode
        )
    request = dataclasses.replace(request, optimizer=optimizer)
    host = host_of(request.devices)
    savings = Savings(request.savings)
    with fakes.undisturbed():
        savings.change_module(module)
        count = Count(
            fakes.names_of({"": module, "criterion": criterion}), request.kind, request.scalar
        )
        place = host if request.layout.batch_on_host else HOME
        whole = request.batch.resized(rows * request.micro_batches, is_small)
        batch = fakes.fake_batch(whole, mode, place, count)
        # Traces of a plan have few rows, and the operators of all numbers of them.
        most_rows = (request.update_rows or 0) * request.row_step
        rows_each = rows // request.row_step if most_rows else 1
        with (
            patch.object(mode, "cache_enabled", False),  # results.py has one for all traces.
            fakes.devices_that_mix(),
            fakes.rows_of_one_sequence(),
            one_chunk(rows / most_rows if most_rows else 0.0),
            autograd_kernels(KERNELS),
            cuda_choices(request.kind.is_gpu) if request.kind.like_cuda else nullcontext(),
            traced_host(host, rows_each) if request.kind.like_cuda else nullcontext(),
            mode,
            _unknown_memory(count),
        ):
            _run(request, count, module, criterion, batch, rows, savings)
    return Trace(
        rows,
        count.blocks,
        count.events,
        count.marks,
        count.flops,
    )


def _run(
    request: Request,
    count: Count,
    module: Any,
    criterion: Any,
    batch: TracedBatch,
    rows: int,
    savings: Savings,
) -> None:
    modules = nn.ModuleList(part for part in (module, criterion) if isinstance(part, nn.Module))
    is_sharded = request.layout.is_sharded
    if not is_sharded:
        count.see_all((*modules.parameters(), *modules.buffers()), "parameters")
    plan = batch.plan([HOME], None, rows, int)
    micro_batches = [shard for (shard,) in itertools.islice(plan, request.traced_micro_batches)]
    with (
        count,
        fakes.counting_resizes(count),
        nullcontext() if request.kind.like_cuda else fakes.counting_random_states(count),
        fakes.shapes_of_shards_uncounted(count) if is_sharded else nullcontext(),
    ):
        # Whole parameters are released before the first update.
        with count.paused() if is_sharded else nullcontext():
            layout = request.layout(request, module, criterion)
        try:
            savings.change_optimizers(layout.optimizers)
            count.see_all((*modules.parameters(), *modules.buffers()), "parameters")
            # The first update makes the state of the optimizer.
            for name, update in {"first": micro_batches[:1], "second": micro_batches}.items():
                # The objects of this trace are young, as the collector is off.
                gc.collect(1)
                count.mark(name)
                if request.mode == "evaluate":
                    _evaluate(layout, count, modules, update)
                    continue
                with savings.around_update(), layout.window():
                    if layout.is_whole:
                        _update_whole(layout, count, update[0])
                    else:
                        _update(request, layout, count, update)
                if request.kind.like_cuda:
                    _move_counts(layout.inner_optimizers, count, host_of(request.devices))
        finally:
            layout.close()


def _evaluate(layout: Layout, count: Count, modules: nn.Module, micro_batches: list[Shard]) -> None:
    modules.eval()
    with torch.no_grad():
        for micro_batch in micro_batches:
            layout.evaluate(micro_batch)
            count.mark_outputs(leaves_of_tree(layout.take_outputs()))
            count.see_all(copies_of(layout.replicas), "parameters")


def _update(request: Request, layout: Layout, count: Count, micro_batches: list[Shard]) -> None:
    count.see_all(layout.buckets, "communication buckets")
    clears_late = request.keeps_gradients and request.micro_batches == 1
    adds = request.reduces_each and "second" in count.marks
    if not clears_late and not adds:
        layout.zero_grad()
    losses = layout.losses(micro_batches)
    while losses:
        compute = losses.pop(0)
        with layout.accumulating() if losses else nullcontext():
            loss = compute()
            count.mark_outputs(leaves_of_tree(layout.take_outputs()))
            if clears_late:
                layout.zero_grad()
            count.turn("temporaries", "saved activations")
            count.see_all(copies_of(layout.replicas), "parameters")
            count.mark("backward")
            loss.backward()
            count.see_all(_gradients(layout), "gradients")
            del loss, compute
    count.mark("update")
    _refuse_merges(layout.optimizers, _gradients(layout))
    for optimizer in layout.optimizers:
        optimizer.step()
    count.see_all(states_of(layout.inner_optimizers), "optimizer state")


def _update_whole(layout: Layout, count: Count, part: Shard) -> None:
    """Runs an update in the user's own words. Its last backward and its last step are marked."""
    run_backward = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        count.turn("temporaries", "saved activations")
        count.mark("backward")
        run_backward(*args, **kwargs)
        count.see_all(_gradients(layout), "gradients")

    def begin_step(*_: object) -> None:
        count.mark("update")
        _refuse_merges(layout.optimizers, _gradients(layout))

    hook = register_optimizer_step_pre_hook(begin_step)
    try:
        with patch.object(torch.autograd, "backward", backward):
            layout.run(part)
    finally:
        hook.remove()
    for name in ("backward", "update"):
        count.marks.setdefault(name, len(count.events))
    count.see_all(states_of(layout.inner_optimizers), "optimizer state")


def copies_of(replicas: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the copies of the parameters on other devices."""
    for each in replicas:
        for tensors in each.copies.by_device.values():
            yield from tensors


def gradients_of(
    parameters: Iterable[Tensor],
    replicas: Iterable[Any],
    optimizers: Iterable[Optimizer],
) -> Iterator[Tensor | None]:
    """Yields the gradients of parameters, of what optimizers of torch update in their place, and
    those that replicas hold.
    """
    updated = [parameter for group in groups_of(optimizers) for parameter in group["params"]]
    yield from (parameter.grad for parameter in (*parameters, *updated) if parameter.is_leaf)
    for each in replicas:
        for bucket in each.gradients.buckets:
            for gradients in bucket.held.values():
                yield from gradients.values()


def _gradients(layout: Layout) -> Iterator[Tensor | None]:
    return gradients_of(layout.parameters, layout.replicas, layout.inner_optimizers)


def groups_of(optimizers: Iterable[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yields the groups of parameters of all optimizers."""
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def states_of(optimizers: Iterable[Optimizer]) -> Iterator[object]:
    """Yields the state of every parameter in optimizers of torch."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from leaves_of_tree(state)


def _move_counts(optimizers: Iterable[Optimizer], count: Count, host: torch.device) -> None:
    """Moves the step counts of AdamW, which stay on the host."""
    for state in states_of(each for each in optimizers if not each.param_groups[0].get("fused")):
        if isinstance(state, Tensor) and state.dim() == 0:
            count.move(state, host)


def _refuse_merges(optimizers: Iterable[Optimizer], gradients: Iterable[Tensor | None]) -> None:
    """Raises :class:`UnknownMemory` if an optimizer merges the rows of sparse gradients, as all do
    but SGD without momentum.
    """
    if not any(each is not None and each.layout == torch.sparse_coo for each in gradients):
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.SGD) or any(
            group["momentum"] for group in optimizer.param_groups
        ):
            raise UnknownMemory(
                f"{type(optimizer).__name__} merges the rows of a sparse gradient, and how many differ depends on values: give "
                "memory.estimate the module with sparse=False, or SGD without momentum"
            )


_NO_KERNEL = "has no fake kernel: register one with torch.library.register_fake, which gives the shape of its result"


@contextlib.contextmanager
def _unknown_memory(count: Count) -> Iterator[None]:
    """Raises :class:`UnknownMemory` in place of the errors of fake tensors, and says what was
    assumed before another error.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reason = (
            "gives a value that is not known"
            if isinstance(error, DataDependentOutputException)
            else "gives a result whose size depends on values"
        )
        raise UnknownMemory(
            f"the operator {error.func} {reason}, so its memory is not known beforehand: {HINT}"
        ) from error
    except UnsupportedOperatorException as error:
        raise UnknownMemory(f"the operator {error.func} {_NO_KERNEL}") from error
    except UnknownMemory:
        raise
    except Exception as error:
        if "There was no fake impl registered for" in str(error):
            name = str(error).partition("registered for ")[2].partition(". ")[0]
            raise UnknownMemory(f"the operator {name} {_NO_KERNEL}") from error
        if not count.assumed or _runs_in_parent_only(error):
            raise
        raise ValueError(
            f"{type(error).__name__}: {error}. Before it, {count.assumed}: if training selects fewer, {HINT}"
        ) from error
