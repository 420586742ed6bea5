"""Processes that start with torch imported. Importing it in each of them takes longer than most tests."""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

PROCESSES = multiprocessing.get_context(
    "forkserver"
)  # The server has run nothing: copies of it have no threads and no devices.
PROCESSES.set_forkserver_preload(["helpers.preloaded"])


def start_process(function, arguments, **settings):
    """Returns a process that calls a function. Settings are those of ``multiprocessing.Process``."""
    # Python 3.11 does not hand the path to the server. Threads that wait would hold up those of other ranks.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    process = PROCESSES.Process(target=function, args=arguments, **settings)
    process.start()
    return process


class Script:
    """A script, or a module given by its name, that runs as ``python`` runs it.

    Args:
        session: makes the process the first of a session, whose processes a signal may reach together.
    """

    def __init__(self, script, *arguments, cwd=None, session=False, **environment):
        self.name = str(script)
        self.arguments = list(map(str, arguments))
        self._folder = tempfile.TemporaryDirectory()
        self._paths = [os.path.join(self._folder.name, name) for name in ("output", "errors")]
        settings = script, self.arguments, cwd, session, {**os.environ, **environment}, self._paths
        self.process = start_process(_main, settings)

    @property
    def texts(self):
        """The output and the errors that the process has written so far."""
        return [Path(path).read_text() if os.path.exists(path) else "" for path in self._paths]

    def wait(self, timeout=60):
        """Returns a ``subprocess.CompletedProcess`` with its text.

        Raises:
            AssertionError: the process did not end in time.
        """
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        texts = self.texts
        self._folder.cleanup()
        assert code is not None, "\n".join([f"{self.name} did not end in {timeout} s:", *texts])
        return subprocess.CompletedProcess([self.name, *self.arguments], code, *texts)


def run_script(script, *arguments, timeout=200, **settings):
    """Runs a script to its end. Returns a ``subprocess.CompletedProcess``."""
    return Script(script, *arguments, **settings).wait(timeout)


def enter_environment(environment):
    """Takes over all environment variables, and the settings that torch reads from them when it is imported."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.set_debug_level_from_env()


def _main(script, arguments, cwd, session, environment, paths):
    if session:
        os.setsid()
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
