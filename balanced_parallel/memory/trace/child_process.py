"""Runs a function in a forked process: it has every object of the caller without sending it, and leaves nothing behind."""

import gc
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__: list[str] = []

T = TypeVar("T")
PATIENCE = 20.0  # seconds


def start_in_child(function: Callable[[], T]) -> Callable[[], T | BaseException]:
    """Starts ``function`` in a forked process. The returned function waits for it, and returns its result or its exception.

    Autograd refuses to run in a process that was forked after a backward on an accelerator. In that case, and on platforms
    other than Linux, ``function`` runs in this process. So it does if the child hangs: a fork copies locks that other threads
    hold, and nothing releases them in the child.

    Raises:
        RuntimeError: the process ended without a result. Raised by the returned function.
    """
    if sys.platform != "linux":
        return function
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, whose locks the child does not take
        child = os.fork()
    if child == 0:
        os.close(read)
        _send_result(function, write)
    os.close(write)

    def finish() -> T | BaseException:
        with os.fdopen(read, "rb") as pipe:
            hangs = not _is_readable(pipe.fileno(), child)
            if hangs:
                os.kill(child, signal.SIGKILL)
            message = pipe.read()
        _, status = os.waitpid(child, 0)
        if hangs:
            return function()
        if not message:
            raise RuntimeError(f"the process that traced the step ended with status {status} and without a result")
        result: T | BaseException = pickle.loads(message)
        if isinstance(result, BaseException) and runs_in_parent_only(result):
            return function()
        return result

    return finish


def _is_readable(pipe: int, child: int) -> bool:
    """Waits for data in the pipe. Returns False if the child uses no processor for ``PATIENCE`` seconds."""
    used = -1
    while not select.select([pipe], [], [], PATIENCE)[0]:
        before, used = used, _ticks(child)
        if used == before:
            return False
    return True


def _ticks(child: int) -> int:
    """Returns the processor time of a process, in ticks of the clock."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime in proc(5)


def runs_in_parent_only(error: BaseException) -> bool:
    """Returns True for the error of autograd in a process that was forked after a backward on an accelerator."""
    return isinstance(error, RuntimeError) and "Autograd-and-Fork" in str(error)


def _send_result(function: Callable[[], Any], write: int) -> None:
    """Sends the result or the exception to the parent, and ends this process without running exit handlers."""
    status = 1
    try:
        gc.freeze()  # the collector does not visit, and so does not copy, the parent's objects
        torch.set_num_threads(1)  # the threads of the parent's pool do not exist here
        try:
            result: Any = function()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            result = error
        with os.fdopen(write, "wb") as pipe:
            pipe.write(_pickled(result))
        status = 0
    finally:
        os._exit(status)


def _pickled(result: Any) -> bytes:
    try:
        message = pickle.dumps(result)
        if isinstance(result, BaseException):
            pickle.loads(message)
        return message
    except Exception:  # noqa: BLE001 - an exception with arguments of its own
        kind = next(base for base in type(result).__mro__ if base.__module__ == "builtins")
        return pickle.dumps(kind(f"{type(result).__name__}: {result}"))
