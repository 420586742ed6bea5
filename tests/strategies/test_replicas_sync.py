"""Bytes that an update moves between the devices of one process, and optimizers that it refuses."""

import torch
from helpers.traffic import traffic
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    simulate,
)


def test_a_training_step_moves_only_the_batch_parameters_gradients_and_scalars():
    """Outputs (6 MB) stay on their devices."""
    with simulate(3) as cluster:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1000)).to("sim:0")
        model = DataParallelModel(net)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = torch.optim.Adam(net.parameters())
        size = sum(parameter.nbytes for parameter in net.parameters())
        inputs = torch.randn(1500, 32)
        targets = torch.randint(1000, (1500,))
        for _ in range(2):
            before = cluster.moved
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        from_host, between = traffic(cluster, before)
        assert from_host == {("cpu", f"sim:{index}"): 500 * (32 * 4 + 8) for index in range(3)}
        scalars = 64
        # Parameters go from device to device, gradients to the first.
        for source, target in ((0, 1), (1, 2), (1, 0), (2, 0)):
            assert size <= between.pop((f"sim:{source}", f"sim:{target}")) <= size + scalars
        assert sum(between.values()) <= scalars
