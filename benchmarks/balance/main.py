"""Does every device carry the same, and how much passes through the hottest one?

One Adam step (the second, when optimizer state exists) on simulated GPUs, in five ways: on one device, with torch's
``nn.DataParallel``, with the loss computed per replica (the rule of PyTorch-Encoding and of most gists: torch's replicas, each
with its own loss, averaged on the first device), and with balanced_parallel, without and with its optimizer. Run without
arguments, it measures everything and writes the README beside it.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, simulate
from balanced_parallel.simulation import Cluster

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reports import environment, introduction, table, write_page  # noqa: E402

DEVICES = (2, 4, 8)
MIB = 2**20


class LanguageModel(nn.Module):
    """A model whose logits over a large vocabulary, [rows, words, positions], take most of the memory."""

    def __init__(self, words: int = 8192, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.hidden, self.output = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits of ``tokens`` [rows, positions]."""
        logits: Tensor = self.output(F.gelu(self.hidden(self.embedding(tokens))))
        return logits.transpose(1, 2)


class Segmenter(nn.Sequential):
    """A class for every pixel: [rows, classes, height, width]."""

    def __init__(self, classes: int = 21, width: int = 96) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(3):
            layers += [nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        super().__init__(*layers, nn.ReLU(), nn.Conv2d(width, classes, 1))


@dataclass(frozen=True)
class Problem:
    """A module with a batch."""

    name: str
    description: str
    module: nn.Module
    inputs: Tensor
    targets: Tensor


def language_problem(words: int = 8192) -> Problem:
    """Returns a language model with a large vocabulary."""
    torch.manual_seed(0)
    tokens = torch.randint(words, (32, 33))
    description = f"embedding {words} x 64, one hidden layer, {words} logits per word; 32 rows of 32 words"
    return Problem("large-vocabulary language model", description, LanguageModel(words), tokens[:, :-1], tokens[:, 1:])


def segmentation_problem() -> Problem:
    """Returns a convolutional network with a class per pixel."""
    torch.manual_seed(0)
    images, classes = torch.randn(16, 3, 24, 24), torch.randint(21, (16, 24, 24))
    description = "5 convolutions of width 96, 21 classes per pixel; 16 images of 24 x 24"
    return Problem("dense-prediction convnet", description, Segmenter(), images, classes)


def one_device(module: nn.Module, inputs: Tensor, targets: Tensor, devices: list[torch.device]) -> Tensor:
    """Computes the loss on the first device."""
    return F.cross_entropy(module(inputs.to(devices[0])), targets.to(devices[0]))


def torch_data_parallel(module: nn.Module, inputs: Tensor, targets: Tensor, devices: list[torch.device]) -> Tensor:
    """Computes the loss of outputs that ``nn.DataParallel`` gathers on the first device."""
    return F.cross_entropy(nn.DataParallel(module, devices)(inputs), targets.to(devices[0]))


def loss_per_replica(module: nn.Module, inputs: Tensor, targets: Tensor, devices: list[torch.device]) -> Tensor:
    """Averages the losses of the replicas of ``nn.DataParallel`` on the first device."""
    model = nn.DataParallel(module, devices)
    pieces, _ = model.scatter((inputs,), {}, model.device_ids)
    outputs = model.parallel_apply(model.replicate(module, model.device_ids), pieces, [{}] * len(devices))
    wanted = targets.chunk(len(devices))
    losses = [F.cross_entropy(output, target.to(output.device)) for output, target in zip(outputs, wanted, strict=True)]
    return torch.stack([loss.to(devices[0]) for loss in losses]).mean()


def ours(model: nn.Module, inputs: Tensor, targets: Tensor, devices: list[torch.device]) -> Tensor:
    """Computes the loss with a :class:`DataParallelCriterion`."""
    loss: Tensor = DataParallelCriterion(nn.CrossEntropyLoss())(model(inputs), targets)
    return loss


Way = Callable[[nn.Module, Tensor, Tensor, list[torch.device]], Tensor]
WAYS: dict[str, Way] = {
    "one device": one_device,
    "nn.DataParallel": torch_data_parallel,
    "loss per replica": loss_per_replica,
    "balanced_parallel": ours,
    "+ BalancedOptimizer": ours,
}


@dataclass(frozen=True)
class Measurement:
    """Results of one step: for each device its peak and the bytes moved to and from it, and the error of the parameters.

    Attributes:
        copies: source and target of each copy between devices, in order.
    """

    peak: list[int]
    through: list[int]
    copies: list[tuple[str, str]]
    error: float


def train(name: str, problem: Problem, cluster: Cluster) -> tuple[Measurement, list[Tensor]]:
    """Runs two Adam steps. Returns the measurement of the second, and the parameters."""
    module = copy.deepcopy(problem.module).to(cluster.devices[0])
    optimizer: torch.optim.Optimizer = torch.optim.Adam(module.parameters())
    model: nn.Module = module
    if WAYS[name] is ours:
        model = DataParallelModel(module, cluster.devices)
        if name != "balanced_parallel":
            optimizer = BalancedOptimizer(model, torch.optim.Adam)
    for _ in range(2):
        cluster.reset_peak()
        before, number = cluster.moved, len(cluster.copies)
        loss = WAYS[name](model, problem.inputs, problem.targets, cluster.devices)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    moved = cluster.moved - before
    through = [sum(count for ends, count in moved.items() if str(device) in ends) for device in cluster.devices]
    copies = [ends for ends in cluster.copies[number:] if "cpu" not in ends]
    return Measurement(cluster.peak, through, copies, 0.0), [parameter.detach().cpu() for parameter in module.parameters()]


def measure(name: str, problem: Problem, devices: int, expected: list[Tensor]) -> Measurement:
    """Measures one way of training, and its error in float64."""
    devices = 1 if name == "one device" else devices
    with simulate(devices) as cluster:
        found, _ = train(name, problem, cluster)
    with simulate(devices) as cluster:  # in float32, Adam turns a rounding error of the gradient into a whole step
        _, parameters = train(name, in_double(problem), cluster)
    pairs = zip(parameters, expected, strict=True)
    return Measurement(found.peak, found.through, found.copies, max(float((one - other).abs().max()) for one, other in pairs))


def longest_chain(copies: list[tuple[str, str]]) -> int:
    """Returns how many copies must wait for each other: a device takes part in one copy at a time."""
    busy: dict[str, int] = {}
    for source, target in copies:
        busy[source] = busy[target] = max(busy.get(source, 0), busy.get(target, 0)) + 1
    return max(busy.values(), default=0)


def in_double(problem: Problem) -> Problem:
    """Returns a copy of a problem in float64."""
    inputs = problem.inputs.double() if problem.inputs.is_floating_point() else problem.inputs
    return Problem(problem.name, problem.description, copy.deepcopy(problem.module).double(), inputs, problem.targets)


def plain_parameters(problem: Problem) -> list[Tensor]:
    """Returns the parameters after two steps of the plain program on the CPU, in float64."""
    problem = in_double(problem)
    module = problem.module
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(module(problem.inputs), problem.targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def shown(counts: list[int]) -> str:
    """Formats bytes as MiB. Equal neighbours are joined: ``36.3, 3 x 26.2``."""
    texts = [f"{count / MIB:.1f}" for count in counts]
    runs: list[list[Any]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1][1] += 1
        else:
            runs.append([text, 1])
    return ", ".join(text if times == 1 else f"{times} x {text}" for text, times in runs)


def table_of(problem: Problem) -> str:
    """Returns the table of all measurements of one problem."""
    parameters = sum(parameter.nbytes for parameter in problem.module.parameters())
    expected = plain_parameters(problem)
    rows = []
    for devices in DEVICES:
        for name in WAYS:
            if name == "one device" and devices != DEVICES[0]:
                continue
            found = measure(name, problem, devices, expected)
            ratio = max(found.peak) * len(found.peak) / sum(found.peak)
            through = max(found.through)
            row = [len(found.peak), name, shown(found.peak), f"{ratio:.2f}", f"{sum(found.peak) / MIB:.1f}"]
            traffic = [f"{through / MIB:.1f}", f"{through / parameters:.1f}", len(found.copies), longest_chain(found.copies)]
            rows.append([*row, *traffic, f"{found.error:.0e}"])
    headers = ["devices", "", "peak, MiB", "hottest / mean", "sum, MiB", "through the hottest, MiB", "in parameters' bytes"]
    return table(rows, [*headers, "copies", "longest chain", "off by"])


def report(problems: list[Problem]) -> str:
    """Returns the text of the README."""
    lines = [introduction(__doc__), ""]
    for problem in problems:
        size = sum(parameter.nbytes for parameter in problem.module.parameters())
        lines += [f"## {problem.name.capitalize()}", "", f"{problem.description}; parameters {size / MIB:.2f} MiB.", ""]
        lines += [table_of(problem), ""]
    lines += [
        "Peak: bytes of tensors in use, each rounded up to 512, as CUDA's caching allocator counts them. Through the hottest:",
        "bytes copied to and from the device with the most traffic in one step, the batch from the host included. Copies: those",
        "between devices in one step. Longest chain: those that wait for each other if a device takes part in one at a time, as",
        "with torch's copies between GPUs. NCCL has schedules of its own. Off by: the largest difference of a parameter from the",
        "plain program's after the same two steps in float64.",
        "",
        "What this shows is arithmetic, placement, bytes and traffic. It says nothing about time.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures everything and writes the README."""
    write_page(HERE, report([language_problem(), segmentation_problem()]), f"simulated devices on {environment()}.")


if __name__ == "__main__":
    main()
