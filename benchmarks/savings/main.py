"""Memory and time of each saving

One training step of a language model (the second, when optimizer state exists) and the evaluation of four batches, plain and with
one saving at a time. Peaks are those of a simulated GPU. Times are ratios to the plain program, in one CPU thread, both in
turns. Errors are those of losses and parameters in float64. Run without arguments, it measures everything and writes the README
beside it.
"""

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from balanced_parallel import savings, simulate

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "estimate")]
import programs  # noqa: E402
from allocator import AllocatorProfile  # noqa: E402
from programs import EVALUATION, QUICK, TRAINING, Change, Program, Size, build, changed, run  # noqa: E402
from reports import environment, introduction, ratio_of_times, table, write_page  # noqa: E402

SIZES = {
    "activations take most of the memory": programs.MANY_ROWS,
    "parameters take most of the memory": programs.MANY_PARAMETERS,
}
MIB = 2**20
ROUNDS = 10
CLOCK = time.process_time  # other programs disturb it less


def peak(size: Size, loop: str, *changes: Change) -> int:
    """Returns the peak of a simulated device, in bytes."""
    with simulate(1) as cluster:
        run(changed(build(size), changes), loop, cluster.devices, cluster.reset_peak)
        return cluster.peak[0]


def error(loop: str, *changes: Change, ranks: bool = False) -> float:
    """Returns the largest relative error of losses and parameters in float64, with dropout and uneven labels.

    Args:
        loop: ``"training"`` or ``"evaluation"``.
        changes: the savings.
        ranks: runs on the ranks of torchrun, instead of two replicas.
    """
    results = []
    for some in ((), changes):
        program = changed(build(QUICK, torch.float64), some)
        losses = run(program, loop, None if ranks else [torch.device("cpu")] * 2)
        parameters = [parameter for group in program.optimizer.param_groups for parameter in group["params"]]
        results.append([*losses, *(parameter.detach() for parameter in parameters)])
    pairs = zip(*results, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def time_ratio(size: Size, loop: str, *changes: Change, rounds: int = ROUNDS) -> float:
    """Returns the time of a program with savings over that of the plain one, both on one CPU."""

    def stepper(program: Program) -> Callable[[], Any]:
        def forward() -> Tensor:
            return program.criterion(program.net(program.inputs), program.targets)  # type: ignore[no-any-return]

        if loop == "training":
            return lambda: program.train(forward)
        fresh = type(program.total)

        def evaluate() -> None:
            program.total = fresh()
            program.evaluate(forward)

        return evaluate

    return ratio_of_times(stepper(changed(build(size), changes)), stepper(build(size)), rounds, CLOCK)


def head_numbers(words: int = 32768, tokens: int = 4096, width: int = 768, rounds: int = 2) -> list[list[Any]]:
    """Measures a head alone, forward and backward: its peak by the allocator of the CPU, and its time."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.nn.Parameter(torch.randn(words, width) / width**0.5)
    target = torch.randint(words, (tokens,))
    ours = savings.LinearCrossEntropy(width, words)
    ours.linear.weight = weight
    functions: dict[str, Callable[[], Tensor]] = {}
    functions["nn.Linear, nn.CrossEntropyLoss"] = lambda: F.cross_entropy(F.linear(hidden, weight), target)
    if hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        functions["F.linear_cross_entropy, chunked"] = lambda: F.linear_cross_entropy(hidden, weight, target, options=options)
    functions["savings.LinearCrossEntropy"] = lambda: ours(hidden, target)
    rows: list[list[Any]] = []
    first, *_ = functions.values()
    for name, function in functions.items():
        profile = AllocatorProfile()
        with profile.recorded():
            function().backward()
            hidden.grad = weight.grad = None
        steps = [lambda function=each: function().backward() for each in (function, first)]  # type: ignore[misc]
        rows.append([name, profile.peak, 1.0 if function is first else ratio_of_times(*steps, rounds, CLOCK)])
    return rows


def rows_of(loop: str, changes: dict[str, Change], size: Size, rounds: int) -> list[list[Any]]:
    """Measures every saving of a loop: name, peak, ratio of times, error."""
    rows: list[list[Any]] = [["none", peak(size, loop), 1.0, 0.0]]
    for name, change in changes.items():
        rows.append([name, peak(size, loop, change), time_ratio(size, loop, change, rounds=rounds), error(loop, change)])
    return rows


def pairs_of(changes: dict[str, Change], *, ranks: bool = False) -> list[list[Any]]:
    """Measures the errors of all pairs of savings in training, in both orders."""
    found = []
    for one, other in itertools.combinations(changes, 2):
        orders = (changes[one], changes[other]), (changes[other], changes[one])
        found.append([f"{one}, {other}", max(error("training", *order, ranks=ranks) for order in orders)])
    return found


def table_of(rows: list[list[Any]]) -> str:
    """Returns the table of a loop."""
    plain, shown = rows[0][1], []
    for name, most, ratio, off in rows:
        saved = round((plain - most) / MIB, 1) + 0.0  # not -0.0
        shown.append([name, f"{most / MIB:.1f}", f"{saved:.1f}", f"{most / plain:.2f}", f"{ratio:.2f}", f"{off:.0e}"])
    headers = ["saving", "peak, MiB", "saved, MiB", "peak / plain", "time / plain", "off by"]
    return table(shown, headers)


def report() -> str:
    """Measures everything and returns the text of the README."""
    lines = [introduction(__doc__), ""]
    for name, size in SIZES.items():
        shape = f"{size.layers} residual blocks of width {size.width}, {size.words} words; {size.rows} rows of {size.positions}."
        lines += [f"## Training, where {name}", "", shape, "", table_of(rows_of("training", TRAINING, size, ROUNDS)), ""]
    pairs = [[name, f"{off:.0e}"] for name, off in pairs_of(TRAINING)]
    lines += ["Pairs of savings, applied in both orders:", "", table(pairs, ["savings", "off by"]), ""]
    lines += ["## Evaluation", "", "`total += loss` over four batches of the first model.", ""]
    lines += [table_of(rows_of("evaluation", EVALUATION, programs.MANY_ROWS, ROUNDS)), ""]
    head = head_numbers()
    shown = [[name, f"{most / MIB:.0f}", f"{most / head[0][1]:.2f}", f"{ratio:.2f}"] for name, most, ratio in head]
    headers = ["", "peak, MiB", "peak / plain", "time / plain"]
    lines += ["## A head of 32,768 words", "", "Forward and backward of 4,096 tokens of width 768 on one CPU thread."]
    lines += ["Parameters and inputs are not part of the peak.", ""]
    lines += [table(shown, headers), ""]
    lines += [
        "Peak: bytes of tensors in use, each rounded up to 512, as CUDA's caching allocator counts them; for the head, of the",
        "CPU's allocator. Off by: the largest relative difference of a loss or a parameter in float64, with two replicas.",
        "offload_activations does nothing on a CPU, so this page has no time of it.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures everything and writes the README."""
    torch.set_num_threads(1)
    write_page(HERE, report(), f"{environment()}, 1 thread.")


if __name__ == "__main__":
    main()
