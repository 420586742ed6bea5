"""Modules with collectives of their own in their forward, under ``DistributedDataParallel``."""

import pytest
import torch
import torch.distributed as dist
from helpers.plain import Plain
from helpers.ranks import on_ranks
from helpers.steps import parallel_step
from torch import nn
from torch.testing import assert_close


class Centred(nn.Module):
    """Subtracts the mean over the rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        output = self.layer(inputs)
        total = output.sum(0)
        count = output.new_tensor(float(len(output)))
        if dist.is_initialized() and self.training:
            total, count = (
                torch.distributed.nn.functional.all_reduce(part) for part in (total, count)
            )
        return output - total / count


@on_ranks(2)
def test_own_collective_of_a_module_is_told_and_a_rank_without_rows_is_refused(rank):
    net = Centred().double()
    plain = Plain(net, nn.MSELoss())
    plain.module.eval()  # Its mean is that of its rows.
    step = parallel_step(net, nn.MSELoss(), strategy="ddp", micro_batch_size=3)
    inputs = torch.randn(6, 4).double()
    targets = torch.randn(6, 3).double()
    mine = slice(0, 3) if rank == 0 else slice(3, 6)
    with pytest.warns(
        UserWarning,
        match="the module communicates with the other ranks itself .allreduce_.*as many micro-batches",
    ):
        losses = [step(inputs[mine], targets[mine])]
    losses.append(step(inputs[mine], targets[mine]))
    for loss in losses:
        assert_close(loss, plain(inputs, targets), rtol=1e-10, atol=0)
    with pytest.raises(
        RuntimeError,
        match="this rank has no rows, and the module communicates with the other ranks itself",
    ):
        step.model(inputs[:0])
    net.eval()
    assert step.model(inputs[:0]).gather().shape == (0, 3)  # this mode has no collective
    assert step.model.meets_ranks
