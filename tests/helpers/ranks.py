"""Runs functions on several ranks, as torchrun would start them, and returns their results."""

import functools
import gc
import importlib
import inspect
import multiprocessing.connection
import os
import random
import socket
import time
import traceback
import warnings
from typing import NamedTuple

import torch

from .processes import PROCESSES, enter_environment, start_process

_pools = {}


def run_ranks(world_size, function, *arguments, timeout=120, fresh=False):
    """Returns ``[function(rank, *arguments) for rank in range(world_size)]``, each from its own process.

    The processes are shared by all tests with this number of ranks. They keep their process group from test to test, and
    have the default dtype of the test.

    Args:
        timeout: seconds.
        fresh: starts processes for this function alone. It may start or end process groups, change the environment, and
            inherits the environment of the test.

    Raises:
        AssertionError: a rank failed, with its traceback, or no answer came in time.
    """
    if fresh:
        with Ranks(world_size) as ranks:
            return ranks.run(function, *arguments, timeout=timeout)
    if world_size not in _pools:
        _pools[world_size] = Ranks(world_size)
    try:
        return _pools[world_size].run(function, *arguments, timeout=timeout)
    except BaseException:  # the other ranks may wait for the one that failed
        _pools.pop(world_size).kill()
        raise


class Check(NamedTuple):
    """The function that a test of :func:`on_ranks` calls on each rank."""

    module: str
    name: str

    def __call__(self, rank, *arguments):
        return getattr(importlib.import_module(self.module), self.name).check(rank, *arguments)


def on_ranks(world_size, **settings):
    """Makes a test of a function, which is called on each rank with its number. Settings are those of :func:`run_ranks`.

    ``world_size`` is a number, or a function of the arguments of the test.
    """

    def decorate(check):
        parameters = [*inspect.signature(check).parameters.values()][1:]

        @functools.wraps(check)
        def test(**arguments):
            values = [arguments[parameter.name] for parameter in parameters]
            ranks = world_size(*values) if callable(world_size) else world_size
            run_ranks(ranks, Check(check.__module__, check.__name__), *values, **settings)

        test.check = check
        test.__signature__ = inspect.Signature(parameters)
        return test

    return decorate


def kill_pools():
    """Ends the shared processes. The next function starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


class Ranks:
    """Processes that run many functions, one after the other. After a failure they cannot be used again."""

    def __init__(self, world_size):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.pipes = []
        self.processes = []
        for rank in range(world_size):
            pipe, remote = PROCESSES.Pipe()
            settings = remote, dict(os.environ), rank, world_size, port
            process = start_process(_rank_main, settings, daemon=True)
            remote.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def run(self, function, *arguments, timeout=120):
        for pipe in self.pipes:
            pipe.send((torch.get_default_dtype(), function, arguments))
        deadline = time.monotonic() + timeout
        results = {}
        while len(results) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))
            assert ready, (
                f"ranks {sorted(set(range(len(self.pipes))) - set(results))} did not answer in time"
            )
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failure, value = pipe.recv()
                except EOFError:
                    self.processes[rank].join()
                    raise AssertionError(
                        f"rank {rank} died with exit code {self.processes[rank].exitcode}"
                    ) from None
                assert failure is None, f"rank {rank} failed:\n{failure}"
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]


def _rank_main(pipe, environment, rank, world_size, port):
    enter_environment(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    previous = None
    while True:
        try:
            dtype, function, arguments = pipe.recv()
        except EOFError:
            return
        _reset()
        if function != previous:
            gc.collect()
            gc.freeze()  # The next collection does not visit what this function has imported.
        previous = function
        torch.set_default_dtype(dtype)
        try:
            with warnings.catch_warnings():
                answer = None, function(rank, *arguments)
        except BaseException:  # noqa: BLE001 - the test reports every failure of a rank
            answer = traceback.format_exc(), None
        pipe.send(answer)
        del arguments, answer
        _reset()  # A module that is imported for the next function may make tensors.


def _reset():
    """Undoes settings that the function before may have left."""
    import torch.distributed as dist

    from balanced_parallel.runtime import collectives

    if dist.is_initialized():
        dist.group.WORLD.bound_device_id = (
            None  # Groups of CPUs have no backend for a simulated device.
        )
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.manual_seed(0)
    random.seed(0)
    collectives.facts_of_process["the sampler's batches"] = "no RankBatchSampler"
