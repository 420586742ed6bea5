"""Gain of two replicas from Python without the global lock

A small layer that is called 200 times, so the time is that of the host: two replicas with 8 rows each, over one replica with 8.
1.0 is the best, 2.0 is no gain. Simulated devices have a thread each. Replicas on the CPU run one after the other, by design.
Run with the interpreters to compare: .venv/bin/python benchmarks/free_threading/main.py .venv314/bin/python .venv314t/bin/python
"""

import platform
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from balanced_parallel import DataParallelModel, simulate

ROUNDS = 200


def ratios(devices: list[str]) -> list[str]:
    """Returns the time of both devices over that of the first: in the forward, and in the backward."""
    net = nn.Sequential(*[nn.Linear(8, 8), nn.Tanh()] * 200).to(devices[0])  # one layer
    times: list[list[tuple[float, float]]] = [[], []]
    models = [DataParallelModel(net, devices[:count]) for count in (1, 2)]
    for count, model in [*enumerate(models, 1)] * ROUNDS:
        started = time.perf_counter()
        outputs = model(torch.ones(8 * count, 8))
        middle = time.perf_counter()
        torch.autograd.backward([output.sum() for output in outputs])
        times[count - 1].append((middle - started, time.perf_counter() - middle))
        del outputs
    return [f"{min(each[part] for each in times[1]) / min(each[part] for each in times[0]):.2f}" for part in (0, 1)]


def main() -> None:
    """Measures in this interpreter, or in each one that is named, and writes the README."""
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        lock = "without" if sysconfig.get_config_var("Py_GIL_DISABLED") else "with"
        print(platform.python_version(), lock, "two CPUs", *ratios(["cpu", "cpu"]), sep=",")
        with simulate(2):
            print(platform.python_version(), lock, "two simulated devices", *ratios(["sim:0", "sim:1"]), sep=",")
        return
    output = "".join(subprocess.check_output([each, __file__], text=True) for each in sys.argv[1:])
    header = ["Python", "lock", "devices", "forward", "backward"]
    table = tabulate([line.split(",") for line in output.splitlines()], header, "github", disable_numparse=True)
    title, text, command = re.split(r"\n\n|\nRun with the interpreters to compare: ", (__doc__ or "").strip())
    environment = f"{platform.machine()}, 2 cores, 1 thread for an operator, torch {torch.__version__.partition('+')[0]}"
    note = f"Least of {ROUNDS} rounds, on a shared machine. Environment: {environment}. To reproduce (it writes this file):"
    page = f"# {title}\n\n{text}\n\n{table}\n\n{note}\n\n```bash\n{command}\n```\n"
    (Path(__file__).parent / "README.md").write_text(page)


if __name__ == "__main__":
    main()
