"""Runs functions on several ranks, as torchrun would start them, and brings back what each returned."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback


def run_ranks(world_size, function, *arguments, timeout=120):
    """``[function(rank, *arguments) for rank in range(world_size)]``, each in a process of its own, with torchrun's environment.

    Raises ``AssertionError`` with the traceback of the first rank that failed, or after ``timeout`` seconds.
    """
    with Ranks(world_size) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


class Ranks:
    """Processes that are started once and run many functions. After a failure they are of no more use: they may wait for it."""

    def __init__(self, world_size):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            pipe, remote = context.Pipe()
            process = context.Process(target=_rank_main, args=(remote, rank, world_size, port), daemon=True)
            process.start()
            remote.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.join()

    def run(self, function, *arguments, timeout=120):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        deadline = time.monotonic() + timeout
        results = {}
        while len(results) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(set(range(len(self.pipes))) - set(results))} did not answer in time"
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failure, value = pipe.recv()
                except EOFError:
                    self.processes[rank].join()
                    raise AssertionError(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None
                assert failure is None, f"rank {rank} failed:\n{failure}"
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]


def _rank_main(pipe, rank, world_size, port):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = None, function(rank, *arguments)
        except BaseException:  # noqa: BLE001 - whatever it was, the test is to hear of it
            answer = traceback.format_exc(), None
        pipe.send(answer)
