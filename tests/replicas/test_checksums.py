"""Writes to parameters that Python does not see."""

import pytest
import torch
from helpers.problems import build_net
from helpers.replicas import assert_follows, settled, write_unseen
from torch import nn

from balanced_parallel import DataParallelModel, simulate
from balanced_parallel.replicas.checksums import CHUNK, _differing

pytestmark = pytest.mark.usefixtures("buckets")


def test_unrecorded_writes_are_copied_with_a_warning():
    with simulate(3):
        net = build_net()
        model, x = settled(net)  # its second forward is compared
        for parameter in net.parameters():
            write_unseen(parameter, 3)
        with pytest.warns(UserWarning, match=r"4 parameters were written to without torch's version counter"):
            for _ in range(2):
                model(x)
        for factor in (0.5, -1, 3):
            for parameter in net.parameters():
                write_unseen(parameter, factor)
            assert_follows(model, net, x)


def test_comparison_moves_only_checksums():
    with simulate(2) as cluster:
        model = DataParallelModel(nn.Linear(512, 512).to("sim:0"))
        x = torch.ones(2, 512)
        for _ in range(9):
            before = cluster.moved
            model(x)
            size = (cluster.moved - before)["sim:0", "sim:1"]
        assert size < 3000


def test_checksum_depends_on_every_bit_and_position():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool):
        tensor = torch.arange(6).to(dtype).reshape(2, 3)
        tensor[1, 1] = 0
        copies = [tensor.clone() for _ in range(4)]
        copies[1][1, 2] = 0
        copies[2] = copies[2].flip(0) if dtype is not torch.bool else ~copies[2]
        found = _differing([tensor] * 4, copies)
        assert found == [1, 2]
    large = torch.zeros(2 * CHUNK + 1)
    moved = large.clone()
    large[0], moved[CHUNK] = 1, 1
    assert _differing([large], [moved]) == [0]
    assert _differing([torch.empty(0)], [torch.empty(0)]) == []
