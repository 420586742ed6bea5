"""Complex parameters and outputs: training equals the plain program, and a complex loss is refused."""

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import balanced_or_plain
from helpers.ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    verify,
    weighted_mean,
)

CPUS = ["cpu"] * 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, inputs):
        return inputs.to(torch.complex128) @ self.weight * self.phase.conj()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def real_loss(output, target):
    return (output.abs() - target).square().mean()


def complex_loss(output, target):
    return (output - target).square().mean()


def make_batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


def assert_equal_updates(
    net,
    model,
    criterion,
    rows,
    balanced=False,
    micro_batch_size=None,
):
    """Compares three clipped updates with the plain program, on all rows."""
    plain = make_net()
    inputs, targets = make_batch()
    optimizer = balanced_or_plain(model, torch.optim.Adam, balanced, lr=0.001)
    expected = torch.optim.Adam(plain.parameters(), lr=0.001)
    step = TrainStep(
        model, criterion, optimizer, micro_batch_size=micro_batch_size, max_grad_norm=0.1
    )
    for _ in range(3):
        loss = real_loss(plain(inputs), targets)
        expected.zero_grad()
        loss.backward()
        # Optimizers of torch refuse gradients that are conjugated lazily.
        for parameter in plain.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.resolve_conj()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        expected.step()
        assert_close(step(inputs[rows], targets[rows]), loss)
        assert_close(step.grad_norm, norm)
    found = [whole(one) for one in net.parameters()]
    assert_close(found, list(plain.parameters()))
    if balanced:
        assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("balanced", [False, True])
def test_replicas(balanced, micro_batch_size):
    net = make_net()
    model = DataParallelModel(net, CPUS)
    criterion = DataParallelCriterion(real_loss, weight="rows")
    assert_equal_updates(net, model, criterion, slice(None), balanced, micro_batch_size)


@pytest.mark.parametrize(("strategy", "balanced"), [("ddp", False), ("ddp", True), ("fsdp", False)])
@on_ranks(2)
def test_a_rank_without_rows(rank, strategy, balanced):
    """Checks the zero of such a rank. It was complex or without a graph, and the ranks waited for different collectives."""
    net = make_net()
    model, criterion = parallelize(net, real_loss, ["cpu"], strategy=strategy, weight="rows")
    assert_equal_updates(
        net, model, criterion, slice(0, 7) if rank == 0 else slice(0, 0), balanced=balanced
    )


def statistics(output, target):
    return (output * target).sum()


LOSSES = [
    pytest.param(complex_loss, {"weight": "rows"}, id="mean"),
    pytest.param(complex_loss, {"reduction": "sum"}, id="sum"),
    pytest.param(complex_loss, {"whole": True}, id="whole"),
    pytest.param(nn.PoissonNLLLoss(), {}, id="torch"),
    pytest.param(AdditiveLoss(statistics, lambda total: total * 2), {}, id="additive"),
]
MESSAGE = r"the loss is complex \(complex128\), expected a real scalar: return its absolute value or its real part"


@pytest.mark.parametrize(("loss", "settings"), LOSSES)
def test_complex_losses_are_refused(loss, settings):
    """A mean was trained on in silence."""
    net = make_net()
    inputs, targets = make_batch()
    model = DataParallelModel(net, CPUS)
    criterion = DataParallelCriterion(loss, **settings)
    with pytest.raises(TypeError, match=MESSAGE):
        criterion(model(inputs), targets)
    for micro_batch_size in (None, 1):
        step = TrainStep(
            model, criterion, torch.optim.SGD(net.parameters()), micro_batch_size=micro_batch_size
        )
        with pytest.raises(TypeError, match=MESSAGE):
            step(inputs, targets)


def test_weighted_means_of_complex_losses_and_zeros_of_shards_without_rows():
    """A shard without rows is not called, and has a real zero."""
    with pytest.raises(TypeError, match=MESSAGE):
        weighted_mean([torch.zeros((), dtype=torch.complex128)], [1])
    inputs, targets = make_batch()
    outputs = DataParallelModel(make_net(), CPUS)(inputs[:2])
    loss = DataParallelCriterion(F.l1_loss)(outputs, targets[:2])
    assert_close(loss, F.l1_loss(outputs.gather(), targets[:2]))


def test_verify_compares_both_parts():
    """The imaginary part was not compared."""
    inputs, targets = make_batch()
    criterion = DataParallelCriterion(real_loss, weight="rows")
    assert verify(make_net(), criterion, inputs, targets, device_ids=CPUS).equal
