"""Predicts how many rows fit into one forward on four GPUs of 24 GiB, with ``nn.DataParallel`` and with this library.

Nothing is measured on a GPU. Run without arguments, it writes README.md and the chart.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.append(str(Path(__file__).parents[1] / "estimate"))
import data_parallel  # noqa: F401 - adds the layout of nn.DataParallel
from problems import MODELS, gpt2_with_loss

from balanced_parallel import memory
from balanced_parallel.memory.devices import find_kind

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "docs" / "images" / "largest_batch.png"
GPU, DEVICES = "rtx4090", 4
WAYS: dict[str, dict[str, Any]] = {
    "nn.DataParallel": {"layout": "torch_data_parallel"},
    "three lines": {"layout": "replicas"},
    "+ BalancedOptimizer": {"layout": "replicas", "balanced_optimizer": True},
    "+ savings": {"layout": "replicas", "balanced_optimizer": True, "savings": ["checkpoint_activations"]},
}


def largest(name: str, way: str) -> int:
    """Returns the most rows over all devices in one forward and backward."""
    settings, make = dict(WAYS[way]), MODELS[name]
    if way == "+ savings" and name.startswith("GPT-2"):
        settings["savings"], make = ["replace_lm_head", "checkpoint_activations"], gpt2_with_loss
    with torch.device("meta"):
        module, criterion, inputs, targets = make()
    report = memory.estimate(module, criterion, inputs, targets, devices=DEVICES, precision="bf16", device_kind=GPU, **settings)
    rows: int = report.largest(find_kind(GPU).capacity)
    return rows


def draw(table: dict[str, dict[str, int]]) -> None:
    """Draws one panel for each model, with a bar for each way, to be read on white and on black, and on a phone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"text.color": "#757575", "axes.edgecolor": "#757575", "font.size": 11})
    matplotlib.rcParams.update({"axes.titlesize": 11, "figure.titlesize": 11})
    colours = ["#9a9a9a", "#7fb3d9", "#3b83bd", "#2465a0"]
    figure, axes = pyplot.subplots(2, len(table) // 2, figsize=(4.8, 4.8), layout="constrained")
    for axis, (name, rows) in zip(axes.flat, table.items(), strict=True):
        bars = axis.bar(range(len(rows)), rows.values(), color=colours)
        axis.bar_label(bars, padding=2)
        axis.set_title(name.replace(", ", "\n"))
        axis.set_xticks([])
        axis.set_yticks([])
        axis.margins(y=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(bars, WAYS, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Rows in one forward on 4 x 24 GiB\n(predicted, not measured on a GPU)")
    figure.savefig(CHART, dpi=120, transparent=True)
    pyplot.close(figure)


def main() -> None:
    """Writes the table and the chart."""
    table = {}
    for name in MODELS:
        table[name] = {way: largest(name, way) for way in WAYS}
        print(name, table[name], flush=True)
    draw(table)
    rows = [[name, *values.values()] for name, values in table.items()]
    page = (HERE / "page.md").read_text()
    text = tabulate(rows, ["rows in one forward", *WAYS], "github")
    (HERE / "README.md").write_text(page.replace("TABLE", text).replace("TORCH", torch.__version__))


if __name__ == "__main__":
    main()
