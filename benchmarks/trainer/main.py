"""Loss and gradient of the first update of a Trainer, as multiples of those of plain PyTorch with the whole batch on one device.

Those of trainers of TRL and sentence-transformers are multiples of the trainer's own with the whole batch in one forward.

Small models of transformers with random weights, on ragged rows. An update has 8 rows: four micro-batches of 2 rows on one
device, or two on each of two simulated GPUs. Run without arguments, it writes the README beside it.
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, logging

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
from helpers.trainers import MODELS, make_arguments, make_model, make_rows, pad, train, train_plainly  # noqa: E402
from integrations.test_transformers_trl import run as train_library  # noqa: E402
from reports import environment, table, write_page  # noqa: E402

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


TRAINERS = {  # a case of tests/integrations/test_transformers_trl.py
    "SFTTrainer": "sft",
    "SFTTrainer, adapter": "sft of an adapter",
    "DPOTrainer": "dpo",
    "DPOTrainer, adapter": "dpo of an adapter",
    "RewardTrainer": "reward",
    "GRPOTrainer, `dapo`": "dapo",
    "GRPOTrainer, `bnpo`": "bnpo",
    "SentenceTransformerTrainer, `CosineSimilarityLoss`": "cosines",
}


def table_of_trainers() -> str:
    """Returns the second update of trainers of other libraries, which draw no gradient in the first one of GRPO."""
    rows = []
    for name, case in TRAINERS.items():
        with contextlib.redirect_stdout(io.StringIO()):
            expected, alone, ours, parallel = (
                train_library(case, evaluates=False, **settings)[0][1]
                for settings in (
                    {"is_exact": False, "per_device_train_batch_size": 6},
                    {"is_exact": False, "gradient_accumulation_steps": 3},
                    {"gradient_accumulation_steps": 3},
                    {"devices": ["cpu"] * 3},
                )
            )
        ratios = [[number / other for number, other in zip(each, expected, strict=True)] for each in (alone, ours, parallel)]
        assert all(abs(ratio - 1) < 1e-3 for each in ratios[1:] for ratio in each), (name, ratios)
        refused = "not measured" if name.startswith("Sentence") else "refused"
        rows.append([name, f"{ratios[0][1]:.3f} x", refused, "1.000 x"])
    return table(rows, ["trainer", "accumulation", "several devices of one process", "`BalancedTrainer` before it, both"])


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

## Trainers of other libraries

Norm of the gradient in the second update, as a multiple of the trainer's own with all 6 rows in one forward on one device: three
micro-batches of 2 rows, or 2 rows on each of three devices, which those of TRL refuse without `BalancedTrainer`.

{trainers}
"""


def main() -> None:
    """Writes the page."""
    logging.set_verbosity_error()
    libraries = "transformers", "accelerate", "trl", "peft", "sentence-transformers"
    page = PAGE.format(table=table_of_heads(), trainers=table_of_trainers())
    page = re.sub(r" +\|", " |", re.sub(r"-+\|", "---|", page))
    write_page(HERE, page, f"{environment(*libraries)}, CPU.", "test,libraries")


if __name__ == "__main__":
    main()
