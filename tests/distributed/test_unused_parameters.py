"""Parameters that a rank does not use: any rank, in any step, also frozen ones."""

import torch
from helpers.ddp import WAYS, Chosen, Partly, cut_over_ranks, make_update
from helpers.problems import CLASSES, assert_same_gradients, class_targets, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, parallelize


class Changing(nn.Module):
    """Uses its second layer for a while."""

    uses_second = True

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden


def check_unused(rank):
    net = Changing()
    model, criterion = parallelize(net, nn.MSELoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=1)
    for number in range(4):
        net.uses_second = number == 1 or (number == 2 and rank == 0)
        step(torch.randn(3, 4), torch.randn(3, 6))
        assert net.first.weight.grad.any()
        assert (net.second.weight.grad is not None) == (number in (1, 2))
    return True


def test_unused_parameters_have_no_gradient_after_an_accumulation():
    assert run_ranks(2, check_unused) == [True, True]


def check_chosen(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    halves = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    for way in WAYS:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        for chosen in [(0, 0), (0, 0), (1, 2), (None, 1), (0, 1), (None, None), (2, 2)]:
            plain.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for plain.chosen, (some, wanted) in zip(chosen, halves, strict=True):
                total = total + nn.functional.cross_entropy(plain(some), wanted, reduction="sum")
            (total / 6).backward()
            model.module.chosen = chosen[rank]
            torch.testing.assert_close(update(*halves[rank]), (total / 6).detach(), rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_unused_parameters_may_differ_between_ranks_and_steps():
    assert run_ranks(2, check_chosen) == [True, True]


def test_unused_parameters_may_differ_with_torch_distributed_debug(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")  # its errors then have names too, which may be numbers
    assert run_ranks(2, check_chosen, fresh=True) == [True, True]


def check_two_losses(rank):
    """A loss of the user's own beside the criterion's, over parameters that the criterion's leaves out, as it does others."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    model, criterion = parallelize(Chosen(), nn.CrossEntropyLoss())
    for _ in range(3):
        model.zero_grad()
        loss = criterion(model(inputs), targets) + model.module.branches[1].weight.sum()
        loss.backward()
        assert model.module.first.weight.grad.any()
        torch.testing.assert_close(model.module.branches[1].weight.grad, torch.ones(CLASSES, CLASSES, dtype=torch.float64))
    return True


def test_second_loss_may_use_parameters_that_the_criterion_does_not_use():
    assert run_ranks(2, check_two_losses) == [True, True]


def check_gradients_alone(rank):
    model, criterion = parallelize(Chosen(), nn.CrossEntropyLoss())
    inputs, targets = torch.randn(2, 4, dtype=torch.float64), class_targets(2)
    for _ in range(3):
        criterion(model(inputs), targets).backward()
        kept = model.module.first.weight.grad.add_(rank).clone()  # what ranks do not share shows whether it was reduced
        gradient, *_ = torch.autograd.grad(criterion(model(inputs), targets), model.module.first.weight)
        assert gradient.any()
        assert torch.equal(model.module.first.weight.grad, kept)
        model.zero_grad()
    return True


def test_autograd_grad_does_not_reduce_gradients():
    assert run_ranks(2, check_gradients_alone) == [True, True]


def check_frozen(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    for way in WAYS:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        for frozen in (False, True, True, False):
            plain.zero_grad()
            for net in (plain, model.module):
                net.first.requires_grad_(not frozen)
            nn.functional.cross_entropy(plain(inputs), targets).backward()
            update(inputs[mine], targets[mine])
            assert_same_gradients(gradients(model.module), gradients(plain))
            assert [p.requires_grad for p in model.module.first.parameters()] == [not frozen] * 2
    return True


def test_layers_may_be_frozen_and_unfrozen():
    assert run_ranks(2, check_frozen) == [True, True]


def check_overlapped(rank):
    """step(...) reduces in its last backward: parameters that this rank did not use are another's to decide."""
    torch.set_default_dtype(torch.float64)
    plain = Partly()
    inputs, targets = torch.randn(5, 4), class_targets(5)
    for sizes in ([2, 3], [5, 0], [3, 2]):
        plain.zero_grad()
        total = sum(
            torch.nn.functional.cross_entropy(plain(some), labels, reduction="sum")
            for some, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True)
            if len(some)
        )
        (total / 5).backward()
        model, criterion = parallelize(Partly(), torch.nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(3):  # the reducer rebuilds its buckets after the first
            loss = step(cut_over_ranks(inputs, sizes, rank), cut_over_ranks(targets, sizes, rank))
            torch.testing.assert_close(loss, (total / 5).detach(), rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_parameters_without_a_gradient_on_any_rank_keep_none():
    assert run_ranks(2, check_overlapped) == [True, True]
