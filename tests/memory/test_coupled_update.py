"""Estimates and plans of losses whose rows depend on each other, compared with simulated devices."""

import pytest
import torch
import torch.nn.functional as F
from helpers.slow import slow_but
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, DiceLoss, TrainStep, memory, simulate

ROWS, WIDTH = 192, 64


def contrast(output, target):
    logits = F.normalize(output, dim=1) @ F.normalize(output, dim=1).t()
    return F.cross_entropy(logits, target)


CRITERIA = {"all outputs": lambda: DataParallelCriterion(contrast, whole=True), "sums": DiceLoss}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Tanh(), nn.Softplus()] * 10, nn.Linear(WIDTH, WIDTH))


def batch(rows=ROWS):
    return torch.ones(rows, WIDTH), torch.arange(rows) % WIDTH


def simulated_peak(criterion, devices, size, rows=ROWS):
    with simulate(devices) as cluster:
        model = DataParallelModel(build())
        criterion = criterion if isinstance(criterion, DataParallelCriterion) else DataParallelCriterion(criterion)
        step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), micro_batch_size=size)
        for _ in range(2):
            cluster.reset_peak()
            step(*batch(rows))
        return cluster.peak


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(
    ("kind", "size"), slow_but([(kind, size) for kind in CRITERIA for size in (None, 4)], ("all outputs", 4), ("sums", 4))
)
def test_estimates_equal_the_simulated_peak(kind, size):
    settings = {"layout": "replicas", "devices": 3, "device_kind": "sim"}
    report = memory.estimate(build(), CRITERIA[kind](), *batch(), micro_batch_size=size, **settings)
    assert report.peak == pytest.approx(simulated_peak(CRITERIA[kind](), 3, size), rel=0.02)


def test_a_plan_knows_the_second_forward_and_the_outputs_of_all_rows():
    criterion = CRITERIA["all outputs"]
    at_once = simulated_peak(criterion(), 2, None)
    capacity = int(0.9 * at_once[0])
    plan = memory.plan(build(), criterion(), *batch(8), capacity=capacity, batch_size=ROWS, devices=2, device_kind="sim")
    plain = next(choice for choice in plan.choices if choice.name == "replicas")
    assert plain.micro_batches == 2
    assert plain.recomputed == pytest.approx(1 / 7)  # a second forward of 8,192 multiplications per row, beside 57,344
    found = simulated_peak(criterion(), 2, plain.micro_batch_size)
    assert plain.peak == pytest.approx(found, rel=0.02)
    assert max(found) <= capacity


def test_fit_knows_the_outputs_of_all_rows():
    criterion = CRITERIA["all outputs"]
    capacity = int(0.8 * simulated_peak(criterion(), 2, None)[0])
    with simulate(2):
        model = DataParallelModel(build())
        step = TrainStep(model, criterion(), torch.optim.AdamW(model.parameters()))
        report = memory.fit(step, *batch(), capacity=capacity)
    assert step.micro_batch_size <= ROWS // 4
    assert report.peak == pytest.approx(simulated_peak(criterion(), 2, step.micro_batch_size), rel=0.02)
