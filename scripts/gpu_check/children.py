"""Python processes that a check starts: with settings that are read at the start, and one per rank."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent  # Python runs its __main__.py
GRACE = 15.0  # seconds for torchrun to end its processes


def run_child(flags: Sequence[str], environment: Mapping[str, str] | None = None, ranks: int = 0, timeout: float = 100.0) -> Any:
    """Runs gpu_check.py in a new process, and returns the last line of its output that is JSON.

    Args:
        flags: of the command line.
        environment: variables beside those of this process.
        ranks: processes that torchrun starts; 0 starts one without torchrun.
        timeout: seconds.

    Raises:
        RuntimeError: the process failed, or did not end in time. The message has the end of its errors.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, str(SCRIPT), *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its processes; killed at once, it would leave them running
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise RuntimeError(f"gpu_check.py {' '.join(flags)} did not end in {timeout:.0f} s") from None
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not answers:
        raise RuntimeError(f"gpu_check.py {' '.join(flags)} ended with code {process.returncode}: {_cause(errors)[:250]}")
    return json.loads(answers[-1])


def _cause(errors: str) -> str:
    """Returns the line of the first exception or signal, else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no output"]
    causes = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception): \S|.*Signal \d", line)]
    return (causes or lines[-1:])[0]
