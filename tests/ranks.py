"""Runs a function on several ranks, as torchrun would start them, and brings back what each returned."""

import multiprocessing
import os
import socket
import time
import traceback


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(world_size, function, *arguments, timeout=120):
    """``[function(rank, *arguments) for rank in range(world_size)]``, each in a process of its own, with torchrun's environment.

    Raises ``AssertionError`` with the traceback of the first rank that failed, or after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(sender, rank, world_size, port, function, arguments), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes, processes, deadline):
    results = {}
    while len(results) < len(pipes):
        ready = multiprocessing.connection.wait(
            [pipe for rank, pipe in enumerate(pipes) if rank not in results], max(0, deadline - time.monotonic())
        )
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} did not answer in time"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failure, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                raise AssertionError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            assert failure is None, f"rank {rank} failed:\n{failure}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(sender, rank, world_size, port, function, arguments):
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
    try:
        answer = None, function(rank, *arguments)
    except BaseException:  # noqa: BLE001 - whatever it was, the test is to hear of it
        answer = traceback.format_exc(), None
    sender.send(answer)
    sender.close()
    time.sleep(0.2)  # let the others finish their last collective before this end of it is gone
