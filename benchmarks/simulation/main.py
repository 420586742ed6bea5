"""Time of simulated GPUs, compared with the same replicas on the plain CPU

The text task of scripts/train.py: one TrainStep over 24 rows in N replicas, on ``["cpu"] * N`` and on N simulated devices,
the two taking turns in one process. Run without arguments, it measures and writes the README beside it.
"""

import argparse
import copy
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

from balanced_parallel import TrainStep, parallelize, simulate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))
from tasks import text_task  # noqa: E402

ROWS, ROUNDS = 24, 7


def seconds(module: nn.Module, devices: list[str], batch: tuple[Tensor, Tensor]) -> float:
    """Returns the median of three steps, after one that is not counted."""
    module = copy.deepcopy(module)
    model, criterion = parallelize(module, nn.CrossEntropyLoss(), devices)
    step = TrainStep(model, criterion, torch.optim.AdamW(module.parameters()))
    step(*batch)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        step(*batch).item()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def ratios(replicas: int, rounds: int = ROUNDS) -> list[float]:
    """Returns the time on simulated devices over the time on the CPU, for each round."""
    task = text_task(None, None)
    batch = task.train.__getitems__(list(range(ROWS)))
    found = []
    for _ in range(rounds):
        plain = seconds(task.module, ["cpu"] * replicas, batch)
        with simulate(replicas):
            found.append(seconds(task.module, [f"sim:{index}" for index in range(replicas)], batch) / plain)
    return found


def main() -> None:
    """Measures the ratios and writes the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = []
    for replicas in (1, 4, 8):
        found = sorted(ratios(replicas))
        rows.append([replicas, *(f"{value:.2f}" for value in (statistics.median(found), found[0], found[-1]))])
    table = tabulate(rows, ["replicas", "ratio (median)", "least", "most"], tablefmt="github", disable_numparse=True)
    title, rest = (__doc__ or "").split("\n\n", 1)
    text = f"""# {title}

{rest.split("Run without")[0].strip()}

{table}

{ROUNDS} rounds each. Environment: {platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()},
torch {torch.__version__}. To reproduce (it writes this file):

```bash
.venv/bin/python benchmarks/simulation/main.py
```
"""
    (HERE / "README.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
