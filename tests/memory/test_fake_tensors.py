"""Estimates of modules and batches without memory."""

import torch
from helpers.memory_problems import PROBLEMS
from torch.nn import functional as F

from balanced_parallel import memory


def test_meta_and_fake_tensors_give_the_estimate_of_real_tensors():
    build, batch = PROBLEMS["convolutions"]
    expected = memory.estimate(build(), F.cross_entropy, *batch(6)).peak
    with torch.device("meta"):
        net = build()
    meta = [tensor.to("meta") for tensor in batch(6)]
    assert memory.estimate(net, F.cross_entropy, *meta).peak == expected
    with torch._subclasses.FakeTensorMode():
        fake = batch(6)
    assert memory.estimate(build(), F.cross_entropy, *fake).peak == expected
    assert memory.estimate(net, F.cross_entropy, {"input": meta[0]}, meta[1]).peak == expected
