"""Loss and gradient of the first update of a Trainer, as multiples of those of plain PyTorch with the whole batch on one device.

Small models of transformers with random weights, on ragged rows. An update has 8 rows: four micro-batches of 2 rows on one
device, or two on each of two simulated GPUs. Run without arguments, it writes the README beside it.
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, logging

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
from helpers.trainers import MODELS, make_arguments, make_model, make_rows, pad, train, train_plainly  # noqa: E402
from reports import environment, table  # noqa: E402

from balanced_parallel import simulate  # noqa: E402
from balanced_parallel.integrations.transformers import BalancedTrainer  # noqa: E402

ROWS = 8
HEADS = [head for head in MODELS if head != "routers"]


class TwoDevices(TrainingArguments):
    """Arguments of a Trainer that sees two simulated GPUs."""

    @property
    def device(self) -> torch.device:
        """The first of the two."""
        super().device  # noqa: B018 - sets up the rest
        return torch.device("sim:0")

    @property
    def n_gpu(self) -> int:
        """The number of devices."""
        return 2


def run(kind: type[Trainer], head: str, accumulation: int, **settings: Any) -> tuple[float, float]:
    """Returns loss and norm of the gradient of the first update."""
    arguments = make_arguments(gradient_accumulation_steps=accumulation)
    if kind is Trainer and accumulation == 2:
        arguments.__class__ = TwoDevices
    rows = make_rows(head, ROWS)
    result: tuple[float, float] = train(kind(make_model(head), arguments, train_dataset=rows, data_collator=pad, **settings))[0]
    return result


def measure(head: str) -> list[tuple[float, float]]:
    """Returns ratios of loss and gradient: of Trainer and BalancedTrainer, on one device and on two."""
    with contextlib.redirect_stdout(io.StringIO()):
        [plain] = train_plainly(make_model(head), make_rows(head, ROWS), ROWS)
        numbers = [run(Trainer, head, 4), run(BalancedTrainer, head, 4, device_ids=["cpu"])]
        with simulate(2):
            numbers += [run(Trainer, head, 2), run(BalancedTrainer, head, 2, device_ids=[0, 1])]
    return [(loss / plain[0], norm / plain[1]) for loss, norm in numbers]


def table_of_heads() -> str:
    """Returns the measurements as a table."""
    rows = []
    for head in HEADS:
        alone, ours_alone, parallel, ours = measure(head)
        ratios = [*ours_alone, *ours]
        assert all(abs(ratio - 1) < 1e-4 for ratio in ratios), (head, ratios)
        wrong = [f"{loss:.2f} x, {norm:.2f} x" for loss, norm in (alone, parallel)]
        rows.append([f"`{MODELS[head][0]}` ({MODELS[head][3]})", *wrong, "1.00 x, 1.00 x"])
    return table(rows, ["model class", "Trainer, accumulation", "Trainer, `nn.DataParallel`", "`BalancedTrainer`, both"])


PAGE = """# Are the loss and the gradient of a Trainer those of plain PyTorch?

Of the first update, as multiples of those of plain PyTorch with the whole batch of 8 ragged rows on one device: the logged loss
and the norm of the gradient. Small models with random weights, without dropout. Four micro-batches of 2 rows on one device
(accumulation), or two on each of two simulated GPUs (`nn.DataParallel`).

{table}

`BalancedTrainer` differs from plain PyTorch by less than 1e-4 in all of them, in float32.

Environment: {environment}, CPU.

To reproduce (it writes this file):

```bash
.venv/bin/pip install -c constraints.txt -e '.[test]'
.venv/bin/python benchmarks/trainer/main.py
```
"""


def main() -> None:
    """Writes the page."""
    logging.set_verbosity_error()
    page = PAGE.format(table=table_of_heads(), environment=environment("transformers", "accelerate"))
    (HERE / "README.md").write_text(page)


if __name__ == "__main__":
    main()
