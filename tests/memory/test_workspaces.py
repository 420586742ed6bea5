"""Memory that operators allocate for themselves."""

import pytest
import torch
from helpers.allocations import used
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory
from balanced_parallel.memory.operators.workspaces import Call, Like, scratch_of


def test_scratch_of_a_matrix_product_is_zero():
    like = Like((256, 256), (256, 1), torch.float32)
    assert scratch_of(Call(0, "cpu", "aten.mm.default", (like, like), (), like.bytes)) == 0
    twice = Call(0, "cpu", "aten.mm.default", (Like((512, 256), (256, 1), torch.float32), like))
    assert Call(0, "cpu", "aten.mm.default", (like, like)).between(twice, 1, 2).args[0].shape == (384, 256)


BORROWERS = {
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "instance norm": lambda: nn.InstanceNorm2d(16, affine=True),
    "group norm": lambda: nn.GroupNorm(4, 16),
    "mish": nn.Mish,
    "unfold": lambda: nn.Sequential(nn.Unfold(3), nn.Unflatten(1, (16, 9)), nn.Flatten(1, 2), nn.Unflatten(1, (16, 9))),
}


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss])
@pytest.mark.usefixtures("one_trace")
def test_scalar_loss_that_keeps_its_elements_equals_the_allocator(loss):
    """The peak is in the backward, where the loss is alive and the outputs are not."""

    def build():
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 32))

    def batch():
        return torch.zeros(400, 16), torch.zeros(400, 32)

    found = used(build, batch, torch.optim.SGD, criterion=loss)
    report = memory.estimate(build(), loss, *batch(), optimizer=torch.optim.SGD, device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.002 * found


@pytest.mark.usefixtures("one_trace")
def test_scratch_memory_below_many_small_operators_is_found():
    """The update has the highest levels of memory, and operators with numbers of 12 bytes."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pair, self.last = nn.Linear(32, 32), nn.Bilinear(32, 32, 16), nn.Linear(256, 10)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.last(self.pair(hidden, hidden).flatten(1))

    def batch():
        return torch.zeros(8, 16, 32), torch.zeros(8, dtype=torch.int64)

    found = used(Pair, batch, torch.optim.AdamW)
    report = memory.estimate(Pair(), F.cross_entropy, *batch(), device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.002 * found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BORROWERS)
@pytest.mark.usefixtures("one_trace")
def test_temporary_memory_of_operators_equals_the_allocator(name, precision):
    """Copies of what is not contiguous, or not of the type that is computed in."""

    def build():
        torch.manual_seed(0)
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10)
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), BORROWERS[name](), *ends)
        net(batch()[0])
        return net

    def batch():
        return torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)

    found = used(build, batch, torch.optim.AdamW, precision)
    report = memory.estimate(build(), F.cross_entropy, *batch(), precision=precision, device_kind="cpu")
    assert abs(report.peak[0] - found) <= 0.002 * found
