"""The time at which a bucket is reduced."""

import threading

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelModel, gather, simulate
from balanced_parallel.replicas import gradient_buckets
from balanced_parallel.replicas.gradient_sums import GradientSum

pytestmark = pytest.mark.usefixtures("buckets")


def test_bucket_is_reduced_once_every_replica_has_its_gradients(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 25 * 2**20)
    with simulate(2):
        net = nn.Sequential(nn.Linear(4, 2600), nn.Linear(2600, 2600), nn.Linear(2600, 4)).to("sim:0")  # 27 MB in the middle
        model = DataParallelModel(net)
        events = []
        compute = GradientSum.compute
        last = threading.Event()

        def watched(gradient_sum):
            sums = compute(gradient_sum)
            events.append(len(sums))
            if len(events) == 1:
                last.set()
            return sums

        monkeypatch.setattr(GradientSum, "compute", watched)

        def watch(module, inputs, output):
            """The first layer of the second replica waits until the last layers were reduced."""
            if output.device.index == 1:
                output.register_hook(lambda gradient: events.append("waited" if last.wait(20) else "in vain"))

        net[0].register_forward_hook(watch)
        gather(model(torch.ones(4, 4))).sum().backward()
        assert events[0] == 3
        assert "in vain" not in events
