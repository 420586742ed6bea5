"""A training step of several ranks waits for no device, on simulated devices with gloo."""

import pytest
import torch
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, parallelize, simulate


def check_waits(rank, place, class_weights, precision):
    weights = torch.linspace(0.5, 2.0, 5) if class_weights else None
    with simulate(2) as cluster:
        device = cluster.devices[rank]
        model, criterion = parallelize(build_net(), nn.CrossEntropyLoss(weights))
        optimizer = torch.optim.AdamW(model.parameters())
        step = TrainStep(model, criterion, optimizer, micro_batch_size=2, precision=precision, max_grad_norm=0.1)
        inputs, targets = torch.randn(5 - 2 * rank, 4).pin_memory(), class_targets(5 - 2 * rank, ignored=1).pin_memory()
        if place == "device":
            inputs, targets = inputs.to(device), targets.to(device)
        step(inputs, targets)
        before = len(cluster.waits)
        for _ in range(2):
            loss = step(inputs, targets)
        assert loss.isfinite()
        return [str(wait) for wait in cluster.waits[before:-1]]


@pytest.mark.parametrize("class_weights", [False, True])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_ranks_wait_for_no_device_but_for_the_scaler(precision, place, class_weights):
    for waits in run_ranks(2, check_waits, place, class_weights, precision):
        assert ["item" in wait and "update.py" in wait for wait in waits] == [True, True] * (precision == "fp16")
