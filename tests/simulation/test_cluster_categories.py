"""Categories of memory at the peak."""

import torch
from torch import nn

from balanced_parallel import simulate


def adam_step(cluster, net, rows=64):
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        cluster.reset_peak()
        inputs = torch.randn(rows, 64).to("sim:0")
        net(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_categories_of_the_peak_add_up_to_it():
    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 8)).to("sim:0")
        size = sum(-(-parameter.nbytes // 512) * 512 for parameter in net.parameters())
        adam_step(cluster, net, rows=2)
        parts = cluster.categories(0)
        assert list(parts) == [
            "parameters",
            "gradients",
            "optimizer state",
            "inputs",
            "activations",
            "temporaries",
        ]
        assert sum(parts.values()) == cluster.peak[0]
        assert (parts["parameters"], parts["inputs"]) == (size, 2 * 64 * 4)
        assert parts["gradients"] == size
        assert (
            2 * size <= parts["optimizer state"] <= 2 * size + 4 * 512
        )  # Each parameter has a step count.
        adam_step(cluster, net, rows=8192)
        parts = cluster.categories(0)  # now the peak is in the backward
        assert parts["activations"] >= 8192 * 1024 * 4
        assert parts["temporaries"] >= 8192 * 1024 * 4  # the gradient of an activation
        assert (parts["parameters"], parts["inputs"]) == (size, 8192 * 64 * 4)


def test_categories_without_an_optimizer_have_gradients_and_frozen_parameters():
    with simulate(1) as cluster:
        net = (
            nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512))
            .requires_grad_(False)
            .to("sim:0")
        )
        head = nn.Linear(512, 2048, bias=False).to("sim:0")
        inputs = torch.ones(2, 512).to("sim:0")
        head(net(inputs)).sum().backward()
        parts = cluster.categories(0)
        assert parts["parameters"] >= 512 * 512 * 4 + 512 * 2048 * 4
        assert parts["gradients"] == 512 * 2048 * 4
        assert parts["inputs"] == inputs.nbytes


def test_categories_of_the_peak_survive_many_later_allocations():
    with simulate(1) as cluster:
        net = nn.Linear(64, 64).to("sim:0")
        adam_step(cluster, net)
        inputs = torch.randn(4096, 64).to("sim:0")
        net(inputs).sum().backward()
        expected = cluster.categories(0)
        peak = cluster.peak
        del inputs
        small = torch.ones(4, device="sim:0")
        for _ in range(70_000):  # longer than the ledger's log
            small + small
        assert (cluster.peak, cluster.categories(0)) == (peak, expected)


def test_recomputed_activations_have_the_category_activations():
    from torch.utils.checkpoint import checkpoint

    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 4)).to("sim:0")
        checkpoint(
            net, torch.ones(512, 64, requires_grad=True).to("sim:0"), use_reentrant=False
        ).sum().backward()
        assert cluster.categories(0)["activations"] >= 512 * 2048 * 4
