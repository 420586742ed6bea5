"""What only a GPU can show: run this where there is one, and keep what it prints under benchmarks/.

python scripts/gpu_check.py                 on the GPU, listed twice: streams, autocast, fp16 scaling, real allocator peaks
python scripts/gpu_check.py --simulate      the same cases on two simulated devices, to see that the script works
"""

import argparse
import contextlib
import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, simulate

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    conv = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ]
    return {
        "mlp": (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)), torch.randn(37, 64)),
        "conv": (nn.Sequential(*conv), torch.randn(37, 3, 16, 16)),
        "attention": (nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 8, 10)), torch.randn(37, 8, 64)),
    }


def train(net: nn.Module, inputs: Tensor, devices: list[Any], precision: str, micro_batch_size: int | None) -> list[float]:
    """The losses of four steps, labels partly ignored."""
    targets = torch.arange(len(inputs)) % 10
    targets[::3] = -100
    model = DataParallelModel(copy.deepcopy(net), devices, precision=precision)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), precision=precision)
    optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision, max_grad_norm=1.0)
    return [step(inputs, targets).item() for _ in range(4)]


def check_equality(devices: list[Any]) -> bool:
    """Steps on ``devices`` beside the same steps on the first of them, in every precision."""
    fine = True
    for name, (net, inputs) in networks().items():
        for precision, tolerance in TOLERANCE.items():
            expected = train(net, inputs, devices[:1], precision, None)
            found = train(net, inputs, devices, precision, 5)
            error = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
            fine &= error <= tolerance
            print(f"{name:10} {precision}  relative error of the loss {error:.1e}  {'ok' if error <= tolerance else 'TOO FAR'}")
    return fine


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    function()
    torch.accelerator.synchronize(device)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        function()
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compare_with_torch(devices: list[Any], first: torch.device) -> None:
    """One forward and backward of a transformer of 241 modules, by these replicas and by nn.DataParallel's."""
    net = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(24)]).to(first)
    inputs, targets = torch.randn(8, 4, 16, device=first), torch.randn(8, 4, 16, device=first)
    ours, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
    mine = seconds(lambda: criterion(ours(inputs), targets).backward(), first)
    try:
        theirs = nn.DataParallel(net, devices)
        other = seconds(lambda: nn.functional.mse_loss(theirs(inputs), targets).backward(), first)
        print(f"host overhead: {mine * 1e3:.1f} ms, nn.DataParallel {other * 1e3:.1f} ms, ratio {mine / other:.2f}")
    except (RuntimeError, AssertionError) as error:
        print(f"host overhead: {mine * 1e3:.1f} ms; nn.DataParallel refused these devices: {str(error).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="on two simulated devices instead of one GPU listed twice")
    flags = parser.parse_args()
    with simulate(2) if flags.simulate else contextlib.nullcontext():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            parser.exit(1, "gpu_check.py: there is no GPU here; --simulate runs the same cases without one\n")
        devices: list[Any] = [0, 1] if flags.simulate else [0, 0]
        first = torch.device(accelerator.type, 0)
        name = torch.get_device_module(accelerator).get_device_name(first)
        print(f"{name}, devices {devices}, torch {torch.__version__}, Python {platform.python_version()}")
        fine = check_equality(devices)
        compare_with_torch(devices, first)
        print(f"peak {torch.accelerator.max_memory_allocated(first) / 2**20:.1f} MiB")
    if not fine:
        parser.exit(1)


if __name__ == "__main__":
    main()
