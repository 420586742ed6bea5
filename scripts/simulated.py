"""The main job on simulated GPUs: what nn.DataParallel would have used for the same steps, and a picture of both."""

import copy
from pathlib import Path
from typing import Any

import torch
from tasks import Task
from torch import Tensor, nn

from balanced_parallel import Precision, simulate
from balanced_parallel.simulation import Cluster

Parts = list[dict[str, int]]  # bytes at the peak by category, per device
STEPS = 2  # the second has everything: optimizer state exists


def parts_of(cluster: Cluster) -> Parts:
    return [cluster.categories(index) for index in range(len(cluster.devices))]


class Autocast(nn.Module):
    """Autocast inside the forward, where torch's documentation wants it under ``nn.DataParallel``: its threads know no other."""

    def __init__(self, module: nn.Module, precision: str) -> None:
        super().__init__()
        self.module = module
        self.precision = Precision(precision)

    def forward(self, inputs: Tensor) -> Any:
        with self.precision.autocast([inputs.device]):
            return self.module(inputs)


def torch_data_parallel_parts(task: Task, devices: int, batch_size: int, micro_batch_size: int | None, precision: str) -> Parts:
    """Two steps of ``nn.DataParallel`` as its documentation shows it, on devices without a limit.

    Args:
        task: its module is copied.
        batch_size: rows per update over all devices.
        micro_batch_size: rows per device in one forward; the loss of each is weighted by its rows, by hand.
        precision: of autocast; the gradient scaler, which needs no memory to speak of, is left out.
    """
    inputs, targets = task.train.__getitems__(list(range(min(batch_size, len(task.train)))))
    rows = len(inputs) if micro_batch_size is None else micro_batch_size * devices
    with simulate(devices) as cluster:
        model = nn.DataParallel(Autocast(copy.deepcopy(task.module), precision).to("sim:0"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
        for _ in range(STEPS):
            cluster.reset_peak()
            for some, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
                output = model(some)
                with Precision(precision).autocast([output.device]):
                    loss = nn.functional.cross_entropy(output, wanted.to("sim:0"))
                (loss * (len(some) / len(inputs))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parts_of(cluster)


def draw_peaks(path: Path, title: str, capacities: list[int | None], bars: dict[str, Parts]) -> None:
    """A bar per device, stacked by category, one group of bars for each entry of ``bars``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(bars), sharey=True, figsize=(5 * len(bars), 4.5), layout="constrained", squeeze=False)
    for axis, (name, parts) in zip(axes[0], bars.items(), strict=True):
        places = range(len(parts))
        bottom = [0.0] * len(parts)
        for category in parts[0]:
            heights = [part[category] / 2**20 for part in parts]
            axis.bar(places, heights, bottom=bottom, label=category)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, capacity in zip(places, capacities, strict=True):
            if capacity is not None and capacity / 2**20 < 2 * max(bottom):  # a line far above would flatten the bars
                axis.hlines(capacity / 2**20, place - 0.45, place + 0.45, color="black", linestyle="dashed")
        axis.bar_label(axis.containers[-1], [f"{total:.1f}" for total in bottom], padding=2)
        axis.margins(y=0.1)
        axis.set_xticks(places, [f"sim:{place}" for place in places])
        axis.set_title(name)
    axes[0][0].set_ylabel("MiB at the peak")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
