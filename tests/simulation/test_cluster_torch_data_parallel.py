"""``nn.DataParallel`` on simulated devices."""

import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import simulate


def test_nn_data_parallel_has_the_gradients_of_the_plain_program():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 3))
    inputs, targets = torch.randn(10, 6), torch.randint(3, (10,))
    F.cross_entropy(net(inputs), targets).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with simulate(4) as cluster:
        model = nn.DataParallel(net.to("sim:0"))
        output = model(inputs)
        assert output.device == torch.device("sim:0")
        F.cross_entropy(output, targets.to("sim:0")).backward()
        for parameter, other in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), other, rtol=1e-5, atol=1e-6)
        assert cluster.categories(1)["parameters"] >= sum(parameter.nbytes for parameter in net.parameters())


def test_nn_data_parallel_runs_in_clusters_of_different_sizes():
    """torch caches a list of streams with the length of the first cluster."""
    net = nn.Linear(2, 2)
    for devices in (2, 4, 3):
        with simulate(devices):
            assert nn.DataParallel(net.to("sim:0"))(torch.ones(8, 2)).shape == (8, 2)
        net.cpu()
    assert nn.parallel._functions._streams is None
