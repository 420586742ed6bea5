"""``step(..., return_outputs=True)``: the outputs of a batch, for metrics."""

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, parallelize, simulate


def make_step(net, criterion=None, devices=("cpu",) * 3, **settings):
    model = DataParallelModel(net, list(devices))
    criterion = criterion or DataParallelCriterion(nn.CrossEntropyLoss())
    return TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "sizes"),
    [
        (11, None, (4, 4, 3)),
        (11, 2, (2, 2, 2, 2, 2, 1)),
        (7, 1, (1, 1, 1, 1, 1, 1, 1)),
        (2, None, (1, 1)),
    ],
)
def test_return_outputs_has_the_outputs_before_the_update(double, rows, micro_batch_size, sizes):
    net, inputs, targets = build_net(), torch.randn(rows, 4), class_targets(rows)
    expected = net(inputs).detach()
    loss, outputs = make_step(net, micro_batch_size=micro_batch_size)(inputs, targets, return_outputs=True)
    torch.testing.assert_close(loss, F.cross_entropy(expected, targets), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gather(outputs), expected, rtol=1e-10, atol=1e-10)
    assert outputs.sizes == sizes
    assert [len(output) for output in outputs] == list(sizes)
    assert not any(output.requires_grad for output in outputs)
    again = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, targets)  # it takes them as it takes the model's own
    torch.testing.assert_close(again, loss, rtol=1e-10, atol=1e-10)


def test_outputs_stay_on_their_devices():
    with simulate(devices=3):
        net, inputs, targets = build_net(), torch.randn(11, 4), class_targets(11)
        expected = net(inputs).detach()
        _, outputs = make_step(net, devices=range(3), micro_batch_size=2)(inputs, targets, return_outputs=True)
        assert [str(output.device) for output in outputs] == ["sim:0", "sim:1", "sim:2"] * 2
        torch.testing.assert_close(gather(outputs, "cpu"), expected)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    parts: dict
    names: tuple


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, inputs):
        logits = self.net(inputs)
        return Output(logits, {"square": logits**2}, ("a", None))


def test_outputs_keep_their_structure(double):
    net, inputs, targets = Structured(), torch.randn(7, 4), class_targets(7)
    expected = net(inputs).parts["square"].detach()
    criterion = DataParallelCriterion(lambda output, target: F.cross_entropy(output.logits, target), weight=lambda o, t: len(t))
    _, outputs = make_step(net, criterion, micro_batch_size=1)(inputs, targets, return_outputs=True)
    assert all(isinstance(output, Output) and output.names == ("a", None) for output in outputs)
    square = gather([output.parts["square"] for output in outputs])
    torch.testing.assert_close(square, expected, rtol=1e-10, atol=1e-10)
    assert not square.requires_grad


def test_an_empty_batch_has_no_outputs():
    step = make_step(build_net(), micro_batch_size=2)
    with pytest.warns(UserWarning, match="nothing is updated"):
        loss, outputs = step(torch.randn(0, 4), class_targets(0), return_outputs=True)
    assert loss.isnan()
    assert (outputs, outputs.sizes) == ([], ())


@pytest.mark.parametrize("is_asked", [False, True])
def test_outputs_are_kept_only_with_return_outputs(is_asked):
    net, alive = build_net(), []
    step, seen = make_step(net, micro_batch_size=1), []

    def note(model, inputs, outputs):
        seen.extend(weakref.ref(output.untyped_storage()) for output in outputs)

    step.model.register_forward_hook(note)
    net[0].weight.register_hook(lambda gradient: alive.append(sum(reference() is not None for reference in seen)))
    step(torch.randn(7, 4), class_targets(7), **({"return_outputs": True} if is_asked else {}))
    assert len(seen) == 7
    assert is_asked == (max(alive) == 7)
    assert is_asked or max(alive) == 0


def check_ranks(rank):
    torch.set_default_dtype(torch.float64)
    inputs, targets = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), class_targets(6)
    net = build_net()
    expected = net(inputs).detach()
    model, criterion = parallelize(net, nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=2)
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    loss, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    torch.testing.assert_close(loss, F.cross_entropy(expected, targets), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(list(outputs)), expected[mine], rtol=1e-10, atol=1e-10)
    assert outputs.sizes == ((1,), (2, 2, 1))[rank]
    torch.testing.assert_close(gather(outputs), expected, rtol=1e-10, atol=1e-10)
    mine = slice(0, 0) if rank == 0 else slice(0, 6)
    loss, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    assert len(outputs) == 3 * rank
    torch.testing.assert_close(loss, F.cross_entropy(expected, targets), rtol=1e-10, atol=1e-10)
    return True


def test_return_outputs_has_the_rows_of_each_rank():
    assert run_ranks(2, check_ranks) == [True, True]
