"""Unequal devices: shares by weight, by free memory, by speed, equal to the plain program in each case."""

import time

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients, plain_program
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate


def assert_equals_plain_program(model, net, x, target, expected):
    loss, wanted = expected
    found = DataParallelCriterion(nn.CrossEntropyLoss())(model(x), target)
    found.backward()
    torch.testing.assert_close(found.detach().cpu(), loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients([gradient.cpu() for gradient in gradients(net)], wanted)
    net.zero_grad()


@pytest.mark.parametrize("split", [[0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 2, 3], [3, 0.5, 1], "memory", "speed"])
def test_every_split_equals_the_plain_program(double, split):
    net, x, target = build_net(), torch.randn(13, 4), torch.randint(5, (13,))
    expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    with simulate(3, memory=["1MiB", "2MiB", "3MiB"]):
        model = DataParallelModel(net.to("sim:0"), split=split)
        for _ in range(5):
            assert_equals_plain_program(model, net, x, target, expected)


def test_split_by_memory_gives_rows_in_proportion_to_free_bytes():
    with simulate(3, memory=["40MiB", "20MiB", "20MiB"]):
        net = nn.Linear(512, 512).to("sim:0")  # one MiB per device
        allocated = torch.empty(5 * 2**20, dtype=torch.uint8, device="sim:2")
        model = DataParallelModel(net, split="memory")
        assert model.split is None
        assert model.shares.measure == "memory"
        assert [len(output) for output in model(torch.ones(74, 512))] == [39, 20, 15]
        assert "shares: 52" in repr(model)
        assert "by memory" in repr(model)
        del allocated


class Slow(nn.Module):
    """Identity that takes one millisecond per row on the first device and three on the others."""

    def forward(self, x):
        time.sleep(len(x) * (0.001 if x.device.index == 0 else 0.003))
        return x


def test_split_by_speed_gives_rows_in_proportion_to_measured_speed():
    with simulate(3):
        model = DataParallelModel(Slow(), split="speed")
        sizes = [[len(output) for output in model(torch.ones(30, 1))] for _ in range(9)]
        assert sizes[0] == sizes[1] == [10, 10, 10]
        assert sizes[-1][0] == pytest.approx(18, abs=2)
        assert sizes[-1][1] == pytest.approx(6, abs=2)
        assert model.split[0] == pytest.approx(0.6, abs=0.07)
        assert "by speed" in repr(model)


def test_split_by_speed_measures_rarely_after_the_first_forwards():
    with simulate(2):
        model = DataParallelModel(nn.Identity(), split="speed")
        seen = []
        for _ in range(40):
            model(torch.ones(4, 1))
            seen.append(model.split)
        assert len(set(seen)) <= 6  # measured in forwards 2, 4, 8, 16, 32


def test_replicas_on_one_device_share_its_memory():
    with simulate(2, memory="8MiB"):
        model = DataParallelModel(nn.Identity(), [0, 0, 1], split="memory")
        model(torch.ones(8, 1))
        assert model.split == pytest.approx((0.25, 0.25, 0.5), abs=0.01)


def test_micro_batches_with_split_by_memory_equal_the_plain_program(double):
    net, x, target = build_net(), torch.randn(40, 4), torch.randint(5, (40,))
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    with simulate(2, memory=["9MiB", "3MiB"]):
        model = DataParallelModel(net.to("sim:0"), split="memory")
        step = TrainStep(
            model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), 0.0), micro_batch_size=6
        )
        torch.testing.assert_close(step(x, target).cpu(), loss, rtol=1e-10, atol=1e-10)
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)
