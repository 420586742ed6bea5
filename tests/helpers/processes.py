"""Processes that start with torch imported. Importing it in each of them takes longer than most tests."""

import contextlib
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")  # its server has run nothing: its copies have no threads and no devices
PRELOADED = ["torch", "torch.distributed.optim", "torch.distributed.checkpoint.state_dict", "torch._dynamo", "balanced_parallel"]
PROCESSES.set_forkserver_preload([*PRELOADED, "safetensors.torch", "sklearn.datasets", "pytest", "hypothesis"])


def run_script(script, *arguments, cwd=None, timeout=200, **environment):
    """Runs a script, or a module given by its name, as ``python`` does. Returns a ``subprocess.CompletedProcess`` with its text.

    Raises:
        AssertionError: the script did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("output", "errors")]
        environment = {**os.environ, **environment}
        process = PROCESSES.Process(target=_main, args=(script, list(map(str, arguments)), cwd, environment, paths))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
        output, errors = (Path(path).read_text() if os.path.exists(path) else "" for path in paths)
        assert process.exitcode is not None, f"{script} did not end in {timeout} s:\n{output}\n{errors}"
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, output, errors)


def enter_environment(environment):
    """Takes over all environment variables, and the settings that torch reads from them when it is imported."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.set_debug_level_from_env()


def _main(script, arguments, cwd, environment, paths):
    gc.freeze()  # a collection visits, and so copies, no object of the server
    enter_environment(environment)
    for stream, path in zip((1, 2), paths, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    with contextlib.chdir(cwd or os.getcwd()):
        sys.argv = [str(script), *arguments]
        if isinstance(script, Path):
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
