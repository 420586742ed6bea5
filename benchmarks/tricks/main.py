"""Do the known tricks against running out of memory save memory, and do the claims about them hold?

Each trick is traced for three models by ``memory.estimate``, as ``python -m balanced_parallel tricks`` does. Claims are measured
on simulated devices, and times on this CPU. Run without arguments, it writes the README beside it.
"""

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import trick_claims
from trick_models import Problem, problems

from balanced_parallel.memory.fitting import Trick, TrickTable, measure_tricks
from balanced_parallel.runtime.values import format_bytes

PAGE = Path(__file__).parent / "README.md"

INTRODUCTION = """# Tricks

The savings that `memory.plan` knows, measured one by one for three models. For your own model:

```bash
.venv/bin/python -m balanced_parallel tricks --problem my_file.py:build --batch-size 64
```

The table shows what each saves at the peak of a training step on one device (float32, AdamW), and what it costs. Bytes
come from traces, which agree with the bytes that [simulated devices](../../docs/simulation.md) measure. A negative number is a
loss. Tricks do not add up: each is measured alone. How to use the savings of this library: [savings](../../docs/savings.md);
which of them a batch needs: [memory](../../docs/memory.md).
"""


def trick_table(found: Sequence[tuple[Problem, TrickTable]]) -> str:
    """Returns one table with a column per model."""
    tables = [{trick.name: trick for trick in table.tricks} for _, table in found]
    rows = []
    for name in tables[0]:
        tricks = [table[name] for table in tables]
        cells = [_cell(trick, table) for trick, (_, table) in zip(tricks, found, strict=True)]
        costs = [trick.cost.partition(";")[0] for trick in tricks if not trick.cost.startswith("not for")]
        rows.append([name, *cells, costs[0] if costs else "-"])
    headers = ["trick", *(f"{problem.name}, of {format_bytes(table.peak)}" for problem, table in found), "cost"]
    return tabulate(rows, headers, "github", disable_numparse=True)


def _cell(trick: Trick, table: TrickTable) -> str:
    return "-" if trick.saves is None else f"{format_bytes(trick.saves)} ({trick.saves / table.peak:.0%})"


def claim_table(claims: Sequence[trick_claims.Claim]) -> str:
    """Returns the table of claims."""
    rows = [[claim.text, claim.verdict, claim.measured] for claim in claims]
    return tabulate(rows, ["claim", "verdict", "measured"], "github", disable_numparse=True)


def page(given: list[Problem]) -> str:
    """Measures everything and returns the text of the page."""
    found = []
    for problem in given:
        batch = problem.inputs, problem.targets
        settings = {"optimizer": torch.optim.AdamW, "device_kind": "sim"}
        found.append((problem, measure_tricks(problem.module, nn.CrossEntropyLoss(), *batch, **settings)))
    memory = [
        trick_claims.activations_without_parameters(),
        trick_claims.doubling_in_backward([(one.name, one.module, one.inputs, one.targets) for one in given]),
        trick_claims.emptying_the_cache(),
        trick_claims.running_loss(),
        trick_claims.multiples_of_eight(),
    ]
    speed = [trick_claims.workers(), trick_claims.channels_last(), trick_claims.fused_optimizers(), *trick_claims.SAID]
    models = "\n".join(f"- {problem.name}: {problem.description}." for problem in given)
    lines = [INTRODUCTION, "## What each trick saves\n", models, "", trick_table(found), "", NOTES]
    lines += ["## Claims about memory\n", claim_table(memory), "", "## Claims about speed\n"]
    lines += ["Times are ratios on one CPU; a GPU may differ.\n", claim_table(speed), ""]
    lines += [
        f"Environment: simulated devices on {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}.",
        "To reproduce (it writes this file):",
        "",
        "```bash",
        ".venv/bin/python benchmarks/tricks/main.py",
        "```",
        "",
    ]
    return "\n".join(lines)


NOTES = """\
- `TrainStep(micro_batch_size=...)` runs micro-batches with the loss and the gradients of the whole batch. `memory.fit` sets
  their size.
- A saving that acts on activations does nothing where the optimizer's update is the peak, and the reverse.
"""


def main() -> None:
    """Measures everything and writes the page."""
    text = page(problems())
    PAGE.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
