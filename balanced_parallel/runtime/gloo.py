"""Threads of gloo at the end of a process.

Two of them threaten an exit. A thread that waits for a collective which never comes is waited for where its process group is
destroyed, if only because the interpreter shuts down. And a thread that releases the last tensors of a collective while the
interpreter shuts down aborts the process ("terminate called without an active exception", sometimes a segmentation fault).
torch has no way to wait for the release, https://github.com/pytorch/pytorch/issues/190489, so its threads are looked at here.
"""

import ctypes
import time
from pathlib import Path

import torch.distributed as dist

__all__: list[str] = []

_TASKS = Path("/proc/self/task")  # Linux alone has it


def keep_backends() -> None:
    """Keeps the backends of all running process groups until the process has ended, so that nothing waits for their threads.

    The destructor of ``ProcessGroupGloo`` waits until its collectives end. Those of other backends do not, and run as usual.
    """
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():  # there is no public list
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "gloo":
                # a reference that the interpreter does not know, and so cannot give up
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def wait_until_idle(seconds: float = 5.0) -> None:
    """Waits until gloo's threads have released the tensors of their last collectives. They may lack a core for it.

    A thread may also sleep because it waits for the interpreter's lock. So the threads must be seen asleep twice, and the lock
    is given away between the two looks.
    """
    if not _TASKS.exists():
        time.sleep(0.2)
        return
    end, seen = time.monotonic() + seconds, 0
    while seen < 2 and time.monotonic() < end:
        seen = seen + 1 if "R" not in thread_states() else 0
        time.sleep(0.01)


def thread_states() -> list[str]:
    """Returns the state of each of gloo's threads, as proc(5) has it: ``"R"`` is running, or ready to run."""
    states = []
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name.startswith("pt_gloo"):
            states.append(rest.split()[0])
    return states
