"""Gradient of the first update of a LightningModule, beside that of plain PyTorch with the whole batch on one device.

Small modules on rows with ignored labels, in float64: 12 rows as one batch, or as two. Run without arguments, it writes the
README beside it.
"""

import sys
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
from helpers.lightning_modules import Classifier, SeveralMeans, fit, load  # noqa: E402
from reports import environment, table, write_page  # noqa: E402

from balanced_parallel.integrations.lightning import BalancedStrategy  # noqa: E402

NAMES = {Classifier: "class weights and ignored labels", SeveralMeans: "the same, and means of two other counts"}


def plain_gradient(kind: type[Classifier]) -> torch.Tensor:
    """Returns the gradient of a loop of plain PyTorch."""
    module = kind()
    batch = next(iter(load(12)))
    module.loss(batch, module(batch)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def error(kind: type[Classifier], strategy: object, batches: int) -> str:
    """Returns the relative error of the gradient of a fit."""
    module, expected = kind(), plain_gradient(kind)
    fit(module, strategy, batches, max_steps=1)
    distance = float((module.gradients[0] - expected).norm() / expected.norm())
    return "below 1e-15" if distance < 1e-15 else f"{distance:.2f}"


PAGE = """# Is the gradient of a LightningModule that of plain PyTorch?

Relative error of the gradient of the first update, in float64, beside plain PyTorch with 12 rows on one device. Some labels are
ignored. Lightning has two batches of 6 rows (`accumulate_grad_batches=2`).

{table}
"""


def main() -> None:
    """Writes the page."""
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    columns = [lambda: "auto", lambda: BalancedStrategy(["cpu"]), lambda: BalancedStrategy(["cpu"] * 3)]
    rows = [[name, *(error(kind, make(), 2) for make in columns)] for kind, name in NAMES.items()]
    headers = ["loss", "Lightning", "`BalancedStrategy`, one device", "`BalancedStrategy`, three devices"]
    write_page(HERE, PAGE.format(table=table(rows, headers)), f"{environment('lightning')}, CPU.", "libraries")


if __name__ == "__main__":
    main()
