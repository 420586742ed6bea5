"""Synchronisation over ranks: loss and gradients of the plain program, in as few collectives as by hand.

Ranks whose backward reaches parameters without giving them a gradient. The reducer of DDP counts these as used.

Parameters that a rank does not use: any rank, in any step, also frozen ones.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.ddp import WAYS, Changing, Chosen, Partly, cut_over_ranks, make_update
from helpers.problems import (
    CLASSES,
    LOSSES,
    Calls,
    OnTop,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
    make_targets,
    plain_program,
)
from helpers.ranks import run_ranks
from helpers.slow import slow
from torch import nn
from torch.autograd.graph import get_gradient_edge

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, convert_sync_batchnorm, parallelize
from balanced_parallel.strategies import ranks


def check_strangers(rank):
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), class_targets(4)
    for way in WAYS:
        module = Chosen()
        module.first.requires_grad_(False)
        _, update = make_update(way, module, nn.CrossEntropyLoss())
        update(inputs, targets)
        module.first.requires_grad_(True)
        with pytest.raises(ValueError, match=r"first\.weight requires a gradient.*call parallelize again"):
            update(inputs, targets)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    model, criterion = parallelize(
        Chosen(),
        lambda output, target: nn.functional.cross_entropy(output * scale, target),
        weight=lambda output, target: len(target),
    )
    step = TrainStep(model, criterion, torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    with pytest.raises(ValueError, match=r"shape \(\).*make it part of the module or of the criterion"):
        step(inputs, targets)
    return True


def test_gradients_of_unregistered_parameters_raise_an_error():
    assert run_ranks(2, check_strangers) == [True, True]


def check_order(rank):
    events, start_copy = [], ranks.start_copy

    def noted(tensor):
        events.append("start")
        wait = start_copy(tensor)
        return lambda: (events.append("wait"), wait())[1]

    ranks.start_copy = noted
    try:
        net = build_net()
        net[2].register_forward_hook(lambda *of: of[2].register_hook(lambda gradient: events.append("backward")) and None)
        model, criterion = parallelize(net, nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
        step(torch.randn(4, 4), class_targets(4))
    finally:
        ranks.start_copy = start_copy
    return events


def test_loss_is_on_its_way_to_the_host_before_the_last_backward():
    assert run_ranks(2, check_order) == [["backward", "start", "backward", "wait"]] * 2


def check_losses(rank, sizes):
    """Plain loops and windows, for every loss; sizes are the ranks' rows."""
    torch.set_default_dtype(torch.float64)
    rows = sum(sizes)
    checked = 0
    for name, (make_criterion, kind) in LOSSES.items():
        torch.manual_seed(0)
        criterion, inputs = make_criterion(), torch.randn(rows, 4)
        targets = make_targets(kind, rows, ignored=sizes[0])  # with class targets, the first rank counts nothing
        plain = OnTop(name)
        loss, expected = plain_program(plain, criterion, inputs, targets)
        my_inputs = cut_over_ranks(inputs, sizes, rank)
        my_targets = tuple(cut_over_ranks(target, sizes, rank) for target in targets)

        model, parallel = parallelize(OnTop(name), criterion)
        found = parallel(model(my_inputs), *my_targets)
        found.backward()
        torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(model.module, criterion), expected)

        for micro_batch_size in (None, 2):
            criterion = make_criterion()
            model, parallel = parallelize(OnTop(name), criterion)
            optimizer = torch.optim.SGD([*model.parameters(), *parallel.parameters()], lr=0.1)
            step = TrainStep(model, parallel, optimizer, micro_batch_size=micro_batch_size)
            torch.testing.assert_close(step(my_inputs, my_targets), loss, rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module, criterion), expected)
        checked += 1
    return checked


@pytest.mark.parametrize("sizes", [slow([4, 5]), slow([1, 6]), [5, 0, 2]])
def test_ranks_equal_the_plain_program(sizes):
    assert run_ranks(len(sizes), check_losses, sizes) == [len(LOSSES)] * len(sizes)


def check_windows(rank):
    """Windows of different lengths on each rank, three in a row: one rank has no rows at all in the second."""
    torch.set_default_dtype(torch.float64)
    windows = [[[3, 1], [4]], [[], [2, 2, 3]], [[1], [1, 1]]]  # window -> rank -> rows of its micro-batches
    plain = Partly()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    model, criterion = parallelize(Partly(), torch.nn.CrossEntropyLoss())
    model.load_state_dict({"module." + name: tensor for name, tensor in plain.state_dict().items()})
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), max_grad_norm=0.3)
    for number, window in enumerate(windows):
        sizes = [size for mine in window for size in mine]
        torch.manual_seed(number)
        inputs, targets = torch.randn(sum(sizes), 4), class_targets(sum(sizes), ignored=1)
        optimizer.zero_grad()
        total = sum(
            torch.nn.functional.cross_entropy(plain(some), labels, reduction="sum")
            for some, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True)
        )
        loss = total / (targets != -100).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert norm > 0.3
        optimizer.step()

        start = sum(len(mine) for mine in window[:rank])
        for piece in range(start, start + len(window[rank])):
            step.add(inputs.split(sizes)[piece], targets.split(sizes)[piece])
        torch.testing.assert_close(step.apply(), loss.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(model.module), gradients(plain))
        assert model.module.never.weight.grad is None
        for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return True


def check_two_optimizers(rank):
    """The gradients of all parameters are the true ones, whichever optimizer has them."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 4), class_targets(7)
    plain = build_net()
    _, expected = plain_program(plain, torch.nn.CrossEntropyLoss(), inputs, targets)
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, torch.optim.SGD(list(model.parameters())[1:], lr=0.1), micro_batch_size=2)
    for _ in range(3):  # the reducer makes its buckets anew after the first
        model.module.load_state_dict(build_net().state_dict())
        step(inputs.split([4, 3])[rank], targets.split([4, 3])[rank])
        assert_same_gradients(gradients(model.module), expected)
    return True


def test_gradients_of_parameters_without_an_optimizer_are_exact():
    assert run_ranks(2, check_two_optimizers) == [True, True]


def test_uneven_accumulation_and_a_rank_without_rows_equal_the_plain_program():
    assert run_ranks(2, check_windows) == [True, True]


def check_nothing_counted(rank):
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = step(torch.randn(3, 4), torch.full((3,), -100))
        empty = step(torch.randn(0, 4), torch.zeros(0, dtype=torch.long))
    assert loss.isnan()
    assert empty.isnan()
    assert sum("nothing is updated" in str(warning.message) for warning in caught) == 2
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    with pytest.raises(TypeError, match=r"2 ranks are running.*use parallelize"):
        TrainStep(DataParallelModel(build_net(), ["cpu"]), criterion, optimizer)
    return True


def test_zero_weight_on_all_ranks_skips_the_update():
    assert run_ranks(2, check_nothing_counted) == [True, True]


def check_half(rank):
    """One decision for all ranks to skip a step, and one scale, though only one rank overflows, or has rows at all."""
    model, criterion = parallelize(build_net(), torch.nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, criterion, optimizer, precision="fp16")
    step(torch.randn(3 * rank, 4), torch.rand(3 * rank, 5))
    assert all(parameter.grad.abs().max() < 10 for parameter in model.parameters())  # unscaled on both
    scaler = step.precision.scaler
    scale = scaler.get_scale()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(torch.randn(2, 4), torch.full((2, 5), torch.inf if rank == 0 else 1.0))
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    step(torch.randn(2 * rank, 4), torch.rand(2 * rank, 5))
    assert not torch.equal(before[0], next(model.parameters()))
    return [scaler.get_scale(), next(model.parameters()).sum().item()]


def test_gradient_scaler_is_equal_on_all_ranks():
    first, second = run_ranks(2, check_half)
    assert first == second


def check_parameter_of_nobody(rank):
    """The criterion is a function that learns a parameter of its own, which no reducer knows. One rank: nothing to reduce."""
    torch.set_default_dtype(torch.float64)
    inputs, targets = torch.randn(7, 4), torch.rand(7, 5)

    def trained(make):
        scale = torch.nn.Parameter(torch.tensor(2.0))
        net = build_net()
        make(net, scale, lambda output, target: (output * scale - target).pow(2).mean())
        return [parameter.detach() for parameter in (*net.parameters(), scale)]

    def plain(net, scale, criterion):
        optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
        criterion(net(inputs), targets).backward()
        optimizer.step()

    def ours(net, scale, criterion):
        model, parallel = parallelize(net, criterion, weight=lambda output, target: len(target))
        step = TrainStep(model, parallel, torch.optim.SGD([*net.parameters(), scale], lr=0.1), micro_batch_size=3)
        step(inputs, targets)

    for one, other in zip(trained(ours), trained(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_parameter_captured_by_the_criterion_gets_an_exact_gradient():
    run_ranks(1, check_parameter_of_nobody)


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
        self.layer, self.scale = nn.Linear(4, 6).double(), nn.Parameter(torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, inputs):
        hidden = self.layer(inputs)
        return hidden * self.scale if self.learns else Ungraded.apply(hidden, self.scale)


def check_reached_without_a_gradient(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    for way in WAYS:
        plain, (model, update) = Scaled(), make_update(way, Scaled(), nn.MSELoss())
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
    return True


def test_parameters_that_are_reached_without_a_gradient_have_none():
    assert run_ranks(2, check_reached_without_a_gradient) == [True, True]


def check_failing_backward(rank, place, frozen):
    """The first backward fails on one rank, before it has reached a parameter, at one of them, or behind it."""
    plain, net = build_net(), build_net()
    model, criterion = parallelize(net, nn.CrossEntropyLoss())
    for module in (plain, net):
        module[0].weight.requires_grad_(not frozen)
    fails = rank == 0

    def fail(*_):
        nonlocal fails
        if fails:
            fails = False
            raise ValueError("this rank fails")

    if place == "accumulation":
        get_gradient_edge(net[0].bias).node.register_prehook(fail)
    elif place == "module":
        net[1].register_full_backward_hook(fail)
    else:
        net.register_forward_hook(lambda *of: of[2].requires_grad and of[2].register_hook(fail) and None)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    inputs, targets = torch.randn(5, 4), class_targets(5)
    with pytest.raises((ValueError, RuntimeError), match="this rank fails" if rank == 0 else "1 of 2 ranks failed"):
        step(inputs, targets)
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    for _ in range(3):
        torch.testing.assert_close(step(inputs, targets), loss)  # the same rows on both ranks
        assert_same_gradients(gradients(net), expected, 1e-6)
    return True


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("place", ["output", "module", "accumulation"])
def test_first_backward_may_fail_anywhere(place, frozen):
    assert run_ranks(2, check_failing_backward, place, frozen) == [True, True]


def check_hooks(rank):
    inputs, targets = torch.randn(5, 4), class_targets(5)
    for way in WAYS:
        model, update = make_update(way, build_net(), nn.CrossEntropyLoss())
        for _ in range(2):
            update(inputs, targets)
        assert all(parameter._backward_hooks is None for parameter in model.parameters())
        assert all(parameter._post_accumulate_grad_hooks is None for parameter in model.parameters())
    return True


def test_parameters_have_no_hooks():
    """A hook that is removed leaves an empty dictionary, which each backward asks: it would take 4 % of a small one."""
    assert run_ranks(2, check_hooks) == [True, True]


def check_history(rank):
    """Gradients are divided as they are made, by about what the window before weighed. That must not show in any bit."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 4), class_targets(32, 7)
    model, criterion = parallelize(build_net().float(), torch.nn.CrossEntropyLoss())
    found = []
    for before, rows in ((None, 11), (3, 11), (11, 11), (20, 11), (None, 16), (16, 16)):
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=4)
        if before is not None:
            step(inputs[-before:], targets[-before:])
        with Calls(torch.ops.aten._foreach_mul_.Scalar) as multiplications:
            step(inputs[-rows:], targets[-rows:])
        found.append((gradients(model.module), multiplications.seen))
    assert all(torch.equal(one, other) for some, _ in found[1:4] for one, other in zip(found[0][0], some, strict=True))
    assert all(map(torch.equal, found[4][0], found[5][0]))
    assert [seen for _, seen in found] == [1, 1, 1, 1, 1, 0]  # nothing is left to divide where both weigh the same power of two
    return True


def test_gradients_do_not_depend_on_the_previous_update():
    assert run_ranks(2, check_history) == [True, True]


UPDATES = 3  # from the second one on, gradients lie in the buckets of the reducer


def make_step(net, criterion):
    model, criterion = parallelize(net.double(), criterion)
    return TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=2)


def batch_norm(rank):
    torch.manual_seed(0)
    net = convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)))
    step = make_step(net, nn.CrossEntropyLoss())
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    mine = slice(0, 4) if rank == 0 else slice(0, 0)
    for _ in range(UPDATES):
        step(inputs[mine], targets[mine])
    found = gradients(net)
    for gradient in found:
        other = gradient.clone()
        dist.broadcast(other, 0)
        assert torch.equal(gradient, other)
    plain = nn.Sequential(*net)
    plain[1].__class__ = nn.BatchNorm1d
    plain.zero_grad()
    for rows in (slice(0, 2), slice(2, 4)):
        (F.cross_entropy(plain(inputs[rows]), targets[rows]) / 2).backward()
    assert_same_gradients(found, gradients(plain))


def ignored_rows(rank):
    torch.manual_seed(0)
    net, plain = build_net().double(), build_net().double()
    plain.load_state_dict(net.state_dict())
    criterion = DataParallelCriterion(F.cross_entropy, weight=lambda output, target: (target != -100).sum())
    step = make_step(net, criterion)
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, -100, -100, -100, -100])
    mine = slice(0, 4) if rank == 0 else slice(4, 8)
    for _ in range(UPDATES):
        step(inputs[mine], targets[mine])
    F.cross_entropy(plain(inputs), targets).backward()
    assert_same_gradients(gradients(net), gradients(plain))


@pytest.mark.parametrize("check", [batch_norm, ignored_rows])
def test_a_rank_that_counts_nothing_takes_part_in_the_reduction(check):
    run_ranks(2, check)


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
