"""Metrics under torchrun: with a reduction over the ranks of their own, and without."""

import re
from pathlib import Path

import pytest
import torch
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelModel, gather, parallelize

PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"
SIZES = [[3, 2], [1, 0]]  # rows of each rank in each batch


def metric_of_the_page():
    """Returns the metric that the page defines, which sums over the ranks in compute()."""
    names = {"torch": torch}
    (source,) = re.findall(r"^class Hits:.*?return whole\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(source, str(PAGE), "exec"), names)
    return names["Hits"]()


def batches():
    torch.manual_seed(0)
    net, x, targets = build_net(), torch.randn(6, 4), class_targets(6)
    predictions = net(x).argmax(1)
    return net, list(zip(x.split([5, 1]), targets.split([5, 1]), strict=True)), [int((predictions == targets).sum()), 6]


def classes(output):
    return output.argmax(1)


def evaluate(rank):
    net, whole, expected = batches()
    model, _ = parallelize(net, nn.CrossEntropyLoss())
    reducing, gathered, twice = metric_of_the_page(), torch.zeros(2, dtype=torch.long), metric_of_the_page()
    with torch.no_grad():
        for (x, targets), sizes in zip(whole, SIZES, strict=True):
            x, targets = x.split(sizes)[rank], targets.split(sizes)[rank]
            outputs = model(x).map(classes)
            reducing.update(outputs.on(targets.device), targets)
            predictions, labels = gather(outputs), gather([targets])
            gathered += torch.stack([(predictions == labels).sum(), torch.tensor(len(labels))])
            twice.update(predictions, labels)
    assert reducing.compute().tolist() == gathered.tolist() == expected
    assert twice.compute().tolist() == [2 * count for count in expected]  # the reason for outputs.on()


def test_metrics_count_every_row_once():
    run_ranks(2, evaluate)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_same_lines_count_every_row_in_one_process(devices):
    net, whole, expected = batches()
    model, metric = DataParallelModel(net, ["cpu"] * devices), metric_of_the_page()
    for x, targets in whole:
        metric.update(model(x).map(classes).on(targets.device), targets)
    assert metric.compute().tolist() == expected
