"""Files of train.py for programs that draw curves: TensorBoard, and Weights & Biases.

``wandb-history.jsonl`` has one flat JSON object per record, with the names that W&B gives its own: ``_step``, ``_runtime`` and
``_timestamp``. Event files of TensorBoard are written by torch's own writer.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


class Charts:
    """Writes numbers by step.

    Args:
        out: the folder of ``wandb-history.jsonl`` and ``tensorboard/``.
        tensorboard: also writes event files.
    """

    def __init__(self, out: Path, tensorboard: bool) -> None:
        self.folder = str(out / "tensorboard") if tensorboard else None
        self.writer: Any = None
        self.file = (out / "wandb-history.jsonl").open("a+")
        self.started = time.time()

    def go_back(self, step: int) -> None:
        """Begins after a step. What was written behind it is removed; of event files, which only grow, TensorBoard hides it."""
        self.file.seek(0)
        lines = [line for line in self.file if line.endswith("\n") and json.loads(line)["_step"] <= step] if step else []
        self.file.truncate(0)
        self.file.writelines(lines)
        self.file.flush()
        self.started = time.time() - (json.loads(lines[-1])["_runtime"] if lines else 0.0)
        if self.folder:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=step + 1)

    def record(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of a step."""
        now = time.time()
        line = {"_step": step, "_runtime": round(now - self.started, 3), "_timestamp": round(now, 3), **values}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in values.items() if self.writer else ():
            self.writer.add_scalar(name, value, step)

    def save(self) -> None:
        """Waits until everything is on the disk: a checkpoint does not come before it."""
        os.fsync(self.file.fileno())
        if self.writer:
            self.writer.flush()

    def close(self) -> None:
        """Closes the files."""
        self.file.close()
        if self.writer:
            self.writer.close()
