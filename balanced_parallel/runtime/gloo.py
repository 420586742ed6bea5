"""Threads of gloo at the end of a process. Because of them, an exit can hang or crash.

- The destructor of a process group waits for its threads. A thread waits for its collective, which never comes to its end if
  another rank has failed.
- A thread that releases the tensors of the last collective while the interpreter shuts down aborts the process ("terminate
  called without an active exception"). torch cannot wait for the release, https://github.com/pytorch/pytorch/issues/190489.
"""

import ctypes
import time
from pathlib import Path

import torch.distributed as dist

__all__: list[str] = []

_TASKS = Path("/proc/self/task")  # Linux alone has it


def keep_backends() -> None:
    """Keeps gloo's backends of all running process groups until the process has ended. Their destructor does not run.

    Destructors of other backends do not wait, and run as usual.
    """
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():  # there is no public list
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "gloo":
                # a reference that the interpreter does not know, and so cannot give up
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def wait_until_idle(seconds: float = 5.0) -> None:
    """Waits until gloo's threads have released the tensors of their last collectives, which takes long on a busy machine.

    A sleeping thread may still wait for the interpreter's lock. So the threads must sleep twice in a row. The lock is free in
    between.
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
