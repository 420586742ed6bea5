"""A language model, its training step and its evaluation, and the savings that change them."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, parallelize, savings


@dataclass(frozen=True)
class Size:
    """Sizes of the language model and of its batch."""

    words: int = 8192
    width: int = 128
    layers: int = 6
    rows: int = 16
    positions: int = 128


MANY_ROWS, MANY_PARAMETERS = Size(), Size(words=1024, width=512, layers=12, rows=4, positions=8)
QUICK = Size(words=512, width=32, layers=3, rows=8, positions=32)


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.dropout = nn.LeakyReLU(), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes hidden states, [rows, positions, width]."""
        update: Tensor = self.dropout(self.leave(self.activation(self.enter(self.norm(hidden)))))
        return hidden + update


class LanguageModel(nn.Module):
    """Logits of the next word at each position, [rows, words, positions]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.head: nn.Linear | None = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns hidden states if there is no head."""
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.head is None else self.head(hidden).transpose(1, 2)


@dataclass
class Program:
    """A program that a saving may change.

    Attributes:
        net, criterion, optimizer: of the program.
        inputs, targets: its batch.
        surroundings: context managers around forward and backward.
        total: sums the losses of an evaluation.
    """

    net: LanguageModel
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor
    surroundings: list[Callable[[], contextlib.AbstractContextManager[None]]] = field(default_factory=list)
    total: Any = 0.0

    def train(self, forward: Callable[[], Tensor]) -> Tensor:
        """Runs one step."""
        self.optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            for surrounding in self.surroundings:
                stack.enter_context(surrounding())
            loss = forward()
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, forward: Callable[[], Tensor]) -> Tensor:
        """Returns the mean loss of four batches."""
        self.net.eval()
        with contextlib.ExitStack() as stack:
            for surrounding in self.surroundings:
                stack.enter_context(surrounding())
            for _ in range(4):
                self.total = self.total + forward() / 4
        return self.total.detach()


def build(size: Size, dtype: torch.dtype = torch.float32) -> Program:
    """Returns the plain program."""
    torch.manual_seed(0)
    net = LanguageModel(size).to(dtype)
    tokens = torch.randint(size.words, (size.rows, size.positions + 1))
    targets = tokens[:, 1:].clone()
    targets[: size.rows // 2, 5:] = -100  # padding, uneven over the devices
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Program(net, nn.CrossEntropyLoss(), optimizer, tokens[:, :-1].contiguous(), targets)


def checkpoint(program: Program) -> None:
    """Recomputes every block."""
    savings.checkpoint_activations(program.net)


def offload(program: Program) -> None:
    """Moves activations to the host."""
    program.surroundings.append(lambda: savings.offload_activations(min_bytes="64KiB"))


def linear_cross_entropy(program: Program) -> None:
    """Moves the head from the model to the criterion."""
    head = program.net.head
    assert head is not None
    program.criterion = savings.LinearCrossEntropy(head.in_features, head.out_features).to(head.weight.dtype)
    program.criterion.linear.weight, program.net.head = head.weight, None


def inference(program: Program) -> None:
    """Evaluates without a graph."""
    program.surroundings.append(lambda: savings.inference(program.net))


Change = Callable[[Program], None]
TRAINING: dict[str, Change] = {
    "checkpoint_activations": checkpoint,
    "offload_activations": offload,
    "LinearCrossEntropy": linear_cross_entropy,
}
EVALUATION: dict[str, Change] = {"inference": inference}


def run(
    program: Program, loop: str, devices: list[torch.device] | None, before_last: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Runs two steps or one evaluation on several devices, or under torchrun. Returns the losses."""
    inputs, targets = program.inputs, program.targets
    if devices is None:
        model, criterion = parallelize(program.net, program.criterion)
        cut = 3 * len(inputs) // 8
        rows = slice(0, cut) if dist.get_rank() == 0 else slice(cut, None)
        inputs, targets = inputs[rows], targets[rows]
    else:
        model, criterion = DataParallelModel(program.net, devices), DataParallelCriterion(program.criterion)

    def forward() -> Tensor:
        loss: Tensor = criterion(model(inputs), targets)
        return loss

    torch.manual_seed(1)
    if loop == "evaluation":
        return [program.evaluate(forward)]
    losses = [program.train(forward)]
    before_last()
    return [*losses, program.train(forward)]


def changed(program: Program, changes: Iterable[Change]) -> Program:
    """Applies savings to a program."""
    for change in changes:
        change(program)
    return program
