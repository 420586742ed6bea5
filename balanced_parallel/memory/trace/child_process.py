"""Runs a function in a forked process: it has every object of the caller without sending it, and leaves nothing behind."""

import gc
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__: list[str] = []

T = TypeVar("T")


def start_in_child(function: Callable[[], T]) -> Callable[[], T | BaseException]:
    """Starts ``function`` in a forked process. The returned function waits for it, and returns its result or its exception.

    Autograd refuses to run in a process that was forked after a backward on an accelerator. In that case, and on platforms
    other than Linux, ``function`` runs in this process.

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
            message = pipe.read()
        _, status = os.waitpid(child, 0)
        if not message:
            raise RuntimeError(f"the process that traced the step ended with status {status} and without a result")
        result: T | BaseException = pickle.loads(message)
        if isinstance(result, BaseException) and runs_in_parent_only(result):
            return function()
        return result

    return finish


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
