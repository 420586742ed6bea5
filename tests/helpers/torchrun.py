"""torchrun whose ranks are forked: they do not import torch again, which takes longer than the training.

Runs as a script in a process of :func:`helpers.processes.run_script`, with the flags of torchrun.
"""

import atexit
import os
import runpy
import sys
import traceback
import uuid
from pathlib import Path

from helpers.processes import enter_environment, run_script


def run_torchrun(*arguments, timeout=200, **environment):
    """Runs a script with two forked ranks, or as many as the flags say. Returns a ``subprocess.CompletedProcess``."""
    return run_script(*ranks_of(*arguments), timeout=timeout, **environment)


def ranks_of(*arguments):
    """Returns the script and the arguments of :class:`helpers.processes.Script` with which a script runs on ranks."""
    alone = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}")
    return Path(__file__), *alone, "--nproc-per-node=2", *arguments


def launch(arguments):
    """Does the same as torchrun."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    flags = parse_args(["--start-method=fork", *arguments])
    config, _, _ = config_from_args(flags)
    elastic_launch(config, run_rank)(flags.training_script, *flags.training_script_args)


def run_rank(script, *arguments):
    """Runs the script as a rank."""
    enter_environment({"OMP_NUM_THREADS": "1", **os.environ})
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
    atexit._run_exitfuncs()  # multiprocessing does not run them


if __name__ == "__main__":
    launch(sys.argv[1:])
