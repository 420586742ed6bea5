"""Tells how bytes, copies, memory and the work of the host grow with devices and micro-batches.

Each formula stands beside counts of an update with Adam on simulated devices. Run without arguments, it measures everything and
writes the README beside it.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reports import environment, introduction, table, write_page  # noqa: E402

DEVICES, RANKS, WIDTH = (1, 2, 4, 8, 16), (1, 2, 4, 8), 256
PACKAGE = str(Path(sys.modules["balanced_parallel"].__file__ or "").parent)


def count_calls(update: Callable[[], object]) -> int:
    """Returns the calls of functions of the package in the main thread."""
    calls = Counter[str]()

    def note(frame: Any, event: str, argument: object) -> None:
        calls[event] += frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    update()
    sys.setprofile(None)
    return calls["call"]


def count(devices: int, micro_batches: int, *, is_balanced: bool) -> list[float]:
    """Returns bytes through the hottest device over those of the parameters, copies, bytes of state per device, and calls."""
    torch.manual_seed(0)
    with simulate(devices) as cluster:
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        size = sum(parameter.nbytes for parameter in net.parameters())
        model = DataParallelModel(net)
        make: Any = BalancedOptimizer if is_balanced else lambda model, kind, **settings: kind(model.parameters(), **settings)
        optimizer = make(model, torch.optim.AdamW, lr=1e-3)
        step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), optimizer, micro_batch_size=1)
        rows = torch.randn(devices * micro_batches, WIDTH)
        for _ in range(4):
            step(rows, rows)
        before, copies = Counter(cluster.moved), len(cluster.copies)
        calls = count_calls(lambda: step(rows, rows))
        traffic: Counter[str] = Counter()
        for (source, target), moved in (Counter(cluster.moved) - before).items():
            if "cpu" not in (source, target):
                traffic[source] += moved
                traffic[target] += moved
        return [max(traffic.values(), default=0) / size, len(cluster.copies) - copies, max(cluster.live) / size, calls]


def count_on_rank() -> tuple[int, int, int]:
    """Returns the ranks, the collectives of an update on this rank, and the calls of its main thread."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model, criterion = parallelize(net, nn.MSELoss(), ["cpu"])
    step = TrainStep(model, criterion, torch.optim.AdamW(net.parameters(), lr=1e-3), micro_batch_size=1)
    rows = torch.randn(2, WIDTH)
    for _ in range(4):
        step(rows, rows)
    calls = count_calls(lambda: step(rows, rows))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(rows, rows)
    collectives = sum(event.name.startswith("c10d::") for event in profile.events())
    return dist.get_world_size(), collectives, calls


def counts_of_ranks(ranks: int) -> list[int]:
    """Returns the numbers of :func:`count_on_rank` on rank 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(HERE / "main.py"), "--rank"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [*map(int, done.stdout.split()[-3:])]


def main() -> None:
    """Measures everything and writes the README."""
    torch.set_num_threads(1)
    if "--rank" in sys.argv:
        numbers = count_on_rank()
        if dist.get_rank() == 0:
            print(*numbers)
        dist.destroy_process_group()
        return
    rows = []
    for n in DEVICES:
        for is_balanced in (False, True):
            moved, copies, live, calls = count(n, 2, is_balanced=is_balanced)
            of_bytes, of_copies = (4 * (n - 1) / n, 2 * n * n) if is_balanced else (n, 4 * (n - 1))
            of_calls = 750 + 80 * n + 4.5 * n * n if is_balanced else 442 + 86 * n
            of_live = 1 + 3 / n if is_balanced else 4
            expected = (of_bytes, 4 * n + of_copies, of_calls) if n > 1 else (0, 4, calls)
            pairs = f"{moved:.2f} / {expected[0]:.2f}", f"{copies} / {expected[1]}", f"{live:.2f} / {of_live:.2f}"
            rows.append([n, "yes" if is_balanced else "no", *pairs, f"{calls} / {expected[2]:.0f}"])
    heads = ["devices", "BalancedOptimizer", "bytes through the hottest", "copies", "live bytes of the hottest", "calls"]
    of_devices = table(rows, heads)
    batches = []
    for m in (1, 2, 4, 8):
        alone, four = (count(devices, m, is_balanced=True)[3] for devices in (1, 4))
        batches.append([m, f"{alone} / {195 + 134 * m}", f"{four} / {564 + 281 * m}"])
    of_batches = table(batches, ["micro-batches", "calls, 1 device", "calls, 4 devices"])
    of_ranks = table(map(counts_of_ranks, RANKS), ["ranks", "collectives", "calls"])
    text = f"""{introduction(__doc__)}

Each cell is the count, and the formula after the stroke. Bytes are in those of the parameters, P.

{of_devices}

With n devices, m micro-batches and AdamW, for n > 1:

| | plain optimizer | `BalancedOptimizer` | what ends it |
|---|---|---|---|
| bytes through the hottest device | n P | 4 (n - 1) / n P | the link of the first device, such as its NVLink |
| copies | 2 m n + 4 (n - 1) | 2 m n + 2 n² | launches: n² small pieces of a small model |
| live bytes, without activations | 4 P | (1 + 3 / n) P | P and the activations of one micro-batch |
| calls of the main thread, m = 2 | 442 + 86 n | 750 + 80 n + 4.5 n², within 2 % | one interpreter, whose threads share its lock |

Calls grow with the micro-batches by a constant for each:

{of_batches}

## Ranks

{of_ranks}

With r ranks of DDP, each device has a process, whose calls do not grow with r. The collectives are an all-reduce for each
bucket of 25 MiB of gradients, and one gather of the numbers of the ranks, for any r and m. In a ring they are 2 (r - 1) / r P
bytes each way. Live bytes are 4 P on each rank. What ends it is the gather, which waits for all hosts.

## From which size on torchrun is the answer

One interpreter launches the kernels of all devices: n devices need n times the host's time for one. Under torchrun each has its
own. If the host takes a share s of the update of one device, as `host ... ms of ... ms` in the page of `scripts/gpu_page.py`,
replicas hide it up to n = 1 / s devices: 10 for 10 %, 4 for 25 %. From there on, and on several machines always, use torchrun.

"""
    write_page(HERE, text, f"simulated devices and gloo on {environment()}, 1 thread. Nothing here is a speed on a GPU.")


if __name__ == "__main__":
    main()
