"""Gradients of ``DistributedDataParallel``: those of the plain program, whatever parameters each rank uses, and failures."""

import pytest
import torch
from helpers.ddp import WAYS, Chosen, make_update
from helpers.optimizers import sgd
from helpers.problems import (
    Calls,
    assert_equal,
    assert_same_gradients,
    build_net,
    class_batch,
    class_targets,
    gradients,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.steps import parallel_step
from torch import nn

from balanced_parallel import TrainStep, parallelize
from balanced_parallel.strategies import ranks

pytestmark = pytest.mark.usefixtures("double")


@on_ranks(2)
def test_gradients_of_unregistered_parameters_raise_an_error(rank):
    inputs = torch.randn(4, 4)
    targets = class_targets(4)
    for way in WAYS:
        module = Chosen()
        module.first.requires_grad_(False)
        _, update = make_update(way, module, nn.CrossEntropyLoss())
        update(inputs, targets)
        module.first.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"first\.weight came after parallelize, was frozen there"
        ):
            update(inputs, targets)
    scale = nn.Parameter(torch.ones(()))
    model, criterion = parallelize(
        Chosen(),
        lambda output, target: nn.functional.cross_entropy(output * scale, target),
        weight=lambda output, target: len(target),
    )
    step = TrainStep(model, criterion, torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    with pytest.raises(
        ValueError, match=r"shape \(\).*make it part of the module or of the criterion"
    ):
        step(inputs, targets)


@on_ranks(2)
def test_loss_is_on_its_way_to_the_host_before_the_last_backward(rank):
    events = []
    start_copy = ranks.start_copy

    def noted(tensor):
        events.append("start")
        wait = start_copy(tensor)
        return lambda: (events.append("wait"), wait())[1]

    ranks.start_copy = noted
    try:
        net = build_net()
        net[2].register_forward_hook(
            lambda *of: of[2].register_hook(lambda gradient: events.append("backward")) and None
        )
        step = parallel_step(net, micro_batch_size=2)
        step(*class_batch(4))
    finally:
        ranks.start_copy = start_copy
    assert events == ["backward", "start", "backward", "wait"]


class Ungraded(torch.autograd.Function):
    """Multiplies by a weight, which the backward gives no gradient."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(weight)
        return inputs * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class Scaled(nn.Module):
    """Reaches its scale without a gradient, on the ranks that do not learn it."""

    learns = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, inputs):
        hidden = self.layer(inputs)
        return hidden * self.scale if self.learns else Ungraded.apply(hidden, self.scale)


@on_ranks(2)
def test_parameters_that_are_reached_without_a_gradient_have_none(rank):
    torch.manual_seed(1)
    inputs = torch.randn(6, 4)
    targets = torch.randn(6, 6)
    for way in WAYS:
        plain = Scaled()
        model, update = make_update(way, Scaled(), nn.MSELoss())
        for learners in ([], [0], [], [0, 1], []):
            plain.zero_grad()
            for number in (0, 1):
                plain.learns = number in learners
                rows = slice(3 * number, 3 * number + 3)
                (nn.functional.mse_loss(plain(inputs[rows]), targets[rows]) / 2).backward()
            model.module.learns = rank in learners
            update(inputs[3 * rank : 3 * rank + 3], targets[3 * rank : 3 * rank + 3])
            assert (plain.scale.grad is None) == (not learners)
            assert_same_gradients(gradients(model.module), gradients(plain))


@on_ranks(2)
def test_gradients_do_not_depend_on_the_previous_update(rank):
    """Gradients are divided as they are made, by about what the window before weighed. That must not show in any bit."""
    inputs, targets = class_batch(32, 7)
    model, criterion = parallelize(build_net(), nn.CrossEntropyLoss())
    found = []
    for before, rows in ((None, 11), (3, 11), (11, 11), (20, 11), (None, 16), (16, 16)):
        step = TrainStep(model, criterion, sgd(model, lr=0.0), micro_batch_size=4)
        if before is not None:
            step(inputs[-before:], targets[-before:])
        with Calls(torch.ops.aten._foreach_mul_.Scalar) as multiplications:
            step(inputs[-rows:], targets[-rows:])
        found.append((gradients(model.module), multiplications.seen))
    assert all(
        torch.equal(one, other)
        for some, _ in found[1:4]
        for one, other in zip(found[0][0], some, strict=True)
    )
    assert all(map(torch.equal, found[4][0], found[5][0]))
    # Nothing is left to divide where both weigh the same power of two.
    assert [seen for _, seen in found] == [1] * 5 + [0]


def check_chosen(rank):
    torch.manual_seed(1)
    inputs = torch.randn(6, 4)
    targets = class_targets(6)
    halves = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    for way in WAYS:
        plain = Chosen()
        model, update = make_update(way, Chosen(), nn.CrossEntropyLoss())
        for chosen in [(0, 0), (0, 0), (1, 2), (None, 1), (0, 1), (None, None), (2, 2)]:
            plain.zero_grad()
            total = torch.zeros(())
            for plain.chosen, (some, wanted) in zip(chosen, halves, strict=True):
                total = total + nn.functional.cross_entropy(plain(some), wanted, reduction="sum")
            (total / 6).backward()
            model.module.chosen = chosen[rank]
            assert_equal(update(*halves[rank]), (total / 6).detach())
            assert_same_gradients(gradients(model.module), gradients(plain))


@pytest.mark.parametrize("debug", ["OFF", "INFO"])  # The errors of one have names, as numbers.
def test_unused_parameters_may_differ_between_ranks_and_steps(monkeypatch, debug):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    run_ranks(2, check_chosen, fresh=debug == "INFO")
