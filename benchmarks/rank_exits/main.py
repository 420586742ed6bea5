"""Counts how ranks end: 3 ranks train, and exit with the model still alive, many times. See README.md.

The parent imports everything once and forks the ranks, so a round costs seconds and not half a minute.
"""

import argparse
import atexit
import collections
import faulthandler
import gc
import importlib
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from balanced_parallel import TrainStep, gather, parallelize
from balanced_parallel.runtime import collectives
from balanced_parallel.strategies import launch

RANKS = 3
FLAGS = argparse.ArgumentParser(description=__doc__)
FLAGS.add_argument("--rounds", type=int, default=500)
FLAGS.add_argument("--starve", action="store_true", help="one core for all, and for gloo's threads only if it is idle")
FLAGS.add_argument("--unprotected", action="store_true", help="the exit takes no care of gloo's threads")


def train(rank, ranks, folder, flags):
    """Starts the process group, trains, and leaves everything to the exit. Returns what stays alive."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    atexit.register(launch.end_process_group)  # as parallelize does for a group that it starts
    if flags.unprotected:
        collectives.keep_backends, launch.RELEASE_SECONDS = lambda: None, 0.0
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))
    model, criterion = parallelize(net, nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    for _ in range(3):
        step(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))
    gather(model(torch.randn(2, 4)))
    if flags.starve:
        for task in os.listdir("/proc/self/task"):
            if int(task) != os.getpid():
                os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    return step


def fork(ranks, flags):
    """Forks the ranks. Returns their process ids in the parent, and None in a rank that has trained."""
    folder, pids = tempfile.mkdtemp(), []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            faulthandler.enable()
            globals()["alive"] = train(rank, ranks, folder, flags)
            return None
    return pids


def import_everything(flags):
    """Imports what the training imports, which a child finds out."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        train(0, 1, tempfile.mkdtemp(), flags)
        os.write(writing, " ".join(sys.modules).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = pipe.read().split()
    os.wait()
    for name in names:
        if "cython" not in name and "__mp_main__" not in name:
            importlib.import_module(name)
    gc.freeze()  # pages stay shared with the children


def main():
    """Runs the rounds. In a rank it returns, so that the interpreter shuts down as after any script."""
    flags = FLAGS.parse_args()
    torch.set_num_threads(1)
    import_everything(argparse.Namespace(unprotected=False, starve=False))
    if flags.starve:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ends, began = collections.Counter(), time.monotonic()
    for done in range(1, flags.rounds + 1):
        pids = fork(RANKS, flags)
        if pids is None:
            return
        ends.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        if done % 25 == 0 or done == flags.rounds:
            print(f"{done} rounds, {(time.monotonic() - began) / done:.1f} s each; exit codes: {dict(ends)}", flush=True)


if __name__ == "__main__":
    main()
