"""Checks that need a GPU. Run them on a machine that has one, and keep the output under benchmarks/.

python scripts/gpu_check.py                 on all GPUs, or the one listed twice: streams, autocast, fp16 scaling, allocator peaks
python scripts/gpu_check.py --simulate      the same cases on two simulated devices, as a test of the script
python scripts/gpu_check.py memory          predicted and used memory of seven models, also with --simulate
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
from tabulate import tabulate
from torch import Tensor, nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, Precision, TrainStep, memory, simulate

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Returns small networks by name, each with a batch of inputs."""
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
        "several buckets": (nn.Sequential(nn.Linear(64, 2600), nn.Linear(2600, 2600), nn.Linear(2600, 10)), torch.randn(37, 64)),
        "attention": (nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 8, 10)), torch.randn(37, 8, 64)),
    }


def train(net: nn.Module, inputs: Tensor, devices: list[Any], precision: str, micro_batch_size: int | None) -> list[float]:
    """Returns the losses of four steps. One label in three is ignored."""
    targets = torch.arange(len(inputs)) % 10
    targets[::3] = -100
    model = DataParallelModel(copy.deepcopy(net), devices, precision=precision)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), precision=precision)
    optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision, max_grad_norm=1.0)
    return [step(inputs, targets).item() for _ in range(4)]


def check_equality(devices: list[Any]) -> bool:
    """Compares steps on ``devices`` with the same steps on the first of them, in every precision."""
    fine = True
    for name, (net, inputs) in networks().items():
        for precision, tolerance in TOLERANCE.items():
            expected = train(net, inputs, devices[:1], precision, None)
            found = train(net, inputs, devices, precision, 5)
            error = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
            fine &= error <= tolerance
            print(f"{name:15} {precision}  relative error of the loss {error:.1e}  {'ok' if error <= tolerance else 'TOO FAR'}")
    return fine


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Returns the median time of ten calls, each with a wait for the device."""
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
    """Times one forward and backward of a transformer of 241 modules, with this library and with ``nn.DataParallel``."""
    net = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(24)]).to(first)
    inputs, targets = torch.randn(8, 4, 16, device=first), torch.randn(8, 4, 16, device=first)
    ours, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
    own = seconds(lambda: criterion(ours(inputs), targets).backward(), first)
    try:
        theirs = nn.DataParallel(net, devices)
        other = seconds(lambda: nn.functional.mse_loss(theirs(inputs), targets).backward(), first)
        print(f"host overhead: {own * 1e3:.1f} ms, nn.DataParallel {other * 1e3:.1f} ms, ratio {own / other:.2f}")
    except (RuntimeError, AssertionError) as error:
        print(f"host overhead: {own * 1e3:.1f} ms; nn.DataParallel refused these devices: {str(error).splitlines()[0]}")


def models() -> dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]]:
    """Returns seven models with a batch each, large enough to make constants negligible."""
    torch.manual_seed(0)

    def encoder(dropout: float) -> nn.Module:
        layers = [nn.TransformerEncoderLayer(512, 8, 2048, dropout, batch_first=True) for _ in range(6)]
        return nn.Sequential(nn.Embedding(8192, 512), *layers, nn.Linear(512, 8192), nn.Flatten(0, 1))

    def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), norm(64), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(512, 512, num_layers=3, batch_first=True)
            self.output = nn.Linear(512, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.output(self.layers(inputs)[0][:, -1])
            return logits

    def wide() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.GELU())], nn.Linear(4096, 10))

    tokens, images, zeros = torch.randint(8192, (16, 256)), torch.randn(32, 3, 224, 224), torch.zeros(8192, dtype=torch.int64)
    return {
        "perceptron": (wide, torch.randn(8192, 4096), zeros),
        "encoder": (lambda: encoder(0.0), tokens, tokens.flatten()),
        "encoder with dropout": (lambda: encoder(0.1), tokens, tokens.flatten()),
        "batch norm": (lambda: convolutions(nn.BatchNorm2d), images, zeros[:32]),
        "group norm": (lambda: convolutions(lambda channels: nn.GroupNorm(8, channels)), images, zeros[:32]),
        "recurrent": (Recurrent, torch.randn(64, 256, 512), zeros[:64]),
        "embedding": (lambda: nn.Sequential(nn.EmbeddingBag(200_000, 256), nn.Linear(256, 10)), tokens, zeros[:16]),
    }


def compare_memory(device: torch.device, only: str | None) -> None:
    """Prints predicted, active and reserved bytes of the second of two AdamW steps."""
    module = torch.get_device_module(device)
    rows = []
    for name, (build, inputs, targets) in models().items():
        if name != (only or name) or (name == "recurrent" and device.type == "sim"):  # not estimated for simulated devices
            continue
        net = build()
        for precision in ("fp32", "bf16"):
            report = memory.estimate(net, nn.CrossEntropyLoss(), inputs, targets, precision=precision)
            constants = report.parts[0]["context"]  # outside of the allocator
            module.empty_cache()
            allocated = torch.accelerator.memory_allocated(device)
            copied = copy.deepcopy(net).to(device)
            x, y, optimizer = inputs.to(device), targets.to(device), None
            optimizer = torch.optim.AdamW(copied.parameters())
            for _ in range(2):
                torch.accelerator.reset_peak_memory_stats(device)
                optimizer.zero_grad()
                with Precision(precision).autocast([device]):
                    loss = nn.functional.cross_entropy(copied(x), y)
                loss.backward()
                optimizer.step()
                del loss
            active = torch.accelerator.max_memory_allocated(device) - allocated
            reserved = torch.accelerator.max_memory_reserved(device)
            predicted, segments = report.peak[0] - constants, report.reserved[0] - constants
            shown = [f"{predicted / active - 1:+.2%}", f"{segments / reserved - 1:+.2%}"]
            rows.append([name, precision, *(f"{count / 2**20:.1f}" for count in (predicted, active, segments, reserved)), *shown])
            del copied, optimizer, x, y
    headers = ["model", "precision", "predicted MiB", "active", "predicted reserved", "reserved", "error", "error of reserved"]
    print(tabulate(rows, headers, "github"))


def main() -> None:
    """Runs the checks that the command line selects. The exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["memory"], help="compare predicted with used memory instead")
    parser.add_argument("--only", metavar="MODEL", help="one of the models whose memory is compared")
    parser.add_argument("--simulate", action="store_true", help="on two simulated devices instead of one GPU listed twice")
    flags = parser.parse_args()
    if flags.only is not None and flags.only not in models():
        parser.error(f"--only={flags.only!r}, expected one of {', '.join(models())}")
    with simulate(2) if flags.simulate else contextlib.nullcontext():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            parser.exit(1, "gpu_check.py: there is no GPU here; --simulate runs the same cases without one\n")
        count = torch.accelerator.device_count()
        devices: list[Any] = list(range(count)) if count > 1 else [0, 0]
        first = torch.device(accelerator.type, 0)
        name = torch.get_device_module(accelerator).get_device_name(first)
        print(f"{name}, devices {devices}, torch {torch.__version__}, Python {platform.python_version()}")
        if flags.what == "memory":
            compare_memory(first, flags.only)
            return
        fine = check_equality(devices)
        compare_with_torch(devices, first)
        print(f"peak {torch.accelerator.max_memory_allocated(first) / 2**20:.1f} MiB")
    if not fine:
        parser.exit(1)


if __name__ == "__main__":
    main()
