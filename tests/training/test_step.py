import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import Calls, assert_same_gradients, build_net, class_targets, gradients, plain_program
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, Precision, TrainStep

CPUS = ["cpu"] * 2


def make_step(net, criterion=None, optimizer=None, split=None, **settings):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    model = DataParallelModel(net, CPUS, split=split)
    return TrainStep(model, DataParallelCriterion(criterion or nn.CrossEntropyLoss()), optimizer, **settings)


def test_ragged_windows_some_without_a_counted_target(double):
    net, x, target = build_net(), torch.randn(11, 4), class_targets(11, 5)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    step = make_step(net)
    for rows in (slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 9), slice(9, 11)):
        step.add(x[rows], target[rows])
    torch.testing.assert_close(step.apply(), loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x[:4], target[2:6])
    torch.testing.assert_close(step(x[:4], target[2:6]), loss, rtol=1e-10, atol=1e-10)  # nothing is left of the first window
    assert_same_gradients(gradients(net), expected)


def test_clipping_uses_the_norm_of_the_true_gradient(double):
    net, x, target = build_net(), torch.randn(9, 4), class_targets(9)
    plain_program(net, nn.CrossEntropyLoss(), x, target)
    F.cross_entropy(net(x), target).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    expected = gradients(net)
    make_step(net, micro_batch_size=2, max_grad_norm=0.01)(x, target)
    assert_same_gradients(gradients(net), expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parameters_of_another_optimizer_have_their_true_gradients_too(precision):
    net, x, target = build_net(), torch.randn(9, 4), class_targets(9)
    _, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    first, *others = net.parameters()
    other = torch.optim.SGD([first], lr=0.1)
    step = make_step(net, optimizer=torch.optim.SGD(others, lr=0.1), micro_batch_size=2, precision=precision)
    step(x, target)
    error = 1e-6 if precision == "fp32" else 1e-2
    torch.testing.assert_close(first.grad, expected[0], rtol=error, atol=error)
    other.step()


def test_the_scheduler_steps_once_per_update(double):
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = make_step(net, optimizer=optimizer, scheduler=scheduler, micro_batch_size=1)
    for _ in range(3):
        step(torch.randn(5, 4), class_targets(5))
    assert scheduler.get_last_lr() == [0.125]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_window_that_counts_nothing_changes_nothing(rows):
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = make_step(net, optimizer=optimizer, scheduler=scheduler, precision="fp16")
    step(torch.randn(3, 4), class_targets(3))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    state, scale = str(optimizer.state_dict()), step.precision.scaler.state_dict()
    with pytest.warns(UserWarning, match="nothing is updated, and its loss is nan") as caught:
        loss = step(torch.randn(rows, 4), torch.full((rows,), -100))
    assert loss.isnan()
    assert caught[0].filename == __file__
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert (str(optimizer.state_dict()), step.precision.scaler.state_dict()) == (state, scale)
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize(
    ("rows", "micro_batch_size", "split", "expected"),
    [
        (9, None, None, [[5, 4]]),
        (9, 2, None, [[2, 1], [2, 1], [2, 1]]),
        (4, 2, None, [[2, 2]]),
        (9, 1, None, [[1, 1], [1, 1], [1, 1], [1, 1], [1]]),
        (8, 3, [3, 1], [[3, 1], [3, 1]]),
    ],
)
def test_no_device_gets_more_rows_than_fit(rows, micro_batch_size, split, expected):
    seen = []
    net = build_net()
    step = make_step(net, split=split, micro_batch_size=micro_batch_size)
    step.model.register_forward_hook(lambda model, inputs, outputs: seen.append([len(output) for output in outputs]))
    step(torch.randn(rows, 4), class_targets(rows))
    assert seen == expected


def test_tuples_and_mappings_are_spread():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build_net()

        def forward(self, one, two):
            return self.net(one + two)

    x, target, mask = torch.randn(5, 4), torch.rand(5, 5), torch.ones(5, 1)
    for inputs in ((x, x), {"one": x, "two": x}):
        net = Two()
        step = make_step(net, lambda out, target, mask: F.mse_loss(out * mask, target * mask), micro_batch_size=1)
        with pytest.warns(UserWarning, match="weighted by rows"):
            loss = step(inputs, (target, mask))
        torch.testing.assert_close(loss, F.mse_loss(Two()(x, x), target).detach())


def test_a_sum_is_added_up_and_not_divided(double):
    net, x, target = build_net(), torch.randn(7, 4), class_targets(7, 2)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(reduction="sum"), x, target)
    step = make_step(net, nn.CrossEntropyLoss(reduction="sum"), micro_batch_size=1)
    torch.testing.assert_close(step(x, target), loss)
    assert_same_gradients(gradients(net), expected)


def test_bfloat16_and_float16_follow_single_precision():
    torch.manual_seed(3)
    x, target = torch.randn(16, 4), class_targets(16)
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        step = make_step(build_net(), micro_batch_size=3, precision=precision)
        losses[precision] = torch.stack([step(x, target) for _ in range(20)])
        assert step.precision.name == precision
    assert losses["fp32"][-1] < losses["fp32"][0]
    torch.testing.assert_close(losses["bf16"], losses["fp32"], rtol=0.03, atol=0.03)
    torch.testing.assert_close(losses["fp16"], losses["fp32"], rtol=0.01, atol=0.01)


def test_float16_overflows_only_where_the_plain_program_does():
    """With a scale of 2**16, gradients of the sum of many terms would be past 65504: the window is divided as it accumulates."""
    net = build_net()
    x, target = torch.randn(512, 4), class_targets(512)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(x), target)
    (loss * 2.0**16).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(net))
    step = make_step(net, precision="fp16", micro_batch_size=32)
    step(x, target)
    assert step.precision.scaler.get_scale() == 2.0**16


def test_float16_window_that_starts_small():
    """Nobody knows after the first row that 500 will follow: what has been accumulated is divided further."""
    net = build_net()
    x, target = torch.randn(512, 4), class_targets(512)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    step = make_step(net, precision="fp16")
    for rows in (slice(0, 1), slice(1, 12), slice(12, 500), slice(500, 512)):
        step.add(x[rows], target[rows])
    torch.testing.assert_close(step.apply(), loss, rtol=1e-2, atol=0)
    assert step.precision.scaler.get_scale() == 2.0**16  # no overflow
    assert_same_gradients(gradients(net), expected, 5e-3)


def test_an_overflow_skips_the_step_and_the_scheduler():
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = make_step(net, nn.MSELoss(), optimizer, scheduler=scheduler, precision="fp16")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    step(torch.randn(4, 4), torch.full((4, 5), torch.inf))
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert step.precision.scaler.get_scale() == 2.0**15
    assert scheduler.get_last_lr() == [0.1]


def weighted_by_hand(criterion):
    return DataParallelCriterion(criterion, weight=lambda output, target: (target != criterion.ignore_index).sum())


@pytest.mark.parametrize(
    ("make_criterion", "times"),
    [
        (lambda: nn.CrossEntropyLoss(ignore_index=2), 1),
        (lambda: functools.partial(F.cross_entropy, ignore_index=2, label_smoothing=0.1), 1),
        (lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5), ignore_index=2), 6),
        (lambda: weighted_by_hand(nn.CrossEntropyLoss(ignore_index=2)), 7),  # once to see whether it counts several things
    ],
)
def test_targets_that_say_what_they_weigh_are_counted_once_per_batch(double, make_criterion, times):
    net, x, target, criterion = build_net(), torch.randn(11, 4), class_targets(11, ignored=0), make_criterion()
    wrapped = criterion if isinstance(criterion, DataParallelCriterion) else DataParallelCriterion(criterion)
    loss, expected = plain_program(net, wrapped.module, x, target)
    step = TrainStep(DataParallelModel(net, CPUS), wrapped, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=2)
    with Calls(torch.ops.aten.ne.Scalar) as comparisons:
        found = step(x, target)
    torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected)
    assert comparisons.seen == times  # else for each micro-batch and each replica
    with Calls(torch.ops.aten.ne.Scalar) as comparisons:
        step(x, target)
    assert comparisons.seen == min(times, 6)
    step.add(x[:7], target[:7])
    step.add(x[7:], target[7:])
    torch.testing.assert_close(step.apply(), loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected)


@pytest.mark.parametrize(
    ("criterion", "micro_batch_size", "times"),
    [
        (nn.CrossEntropyLoss(), 2, 0),
        (nn.MSELoss(), None, 0),
        (nn.MSELoss(), 1, 1),  # 11 rows are 2, 2, 2, 2, 2 and 1, and the first does not show it
        (nn.MSELoss(reduction="sum"), None, 0),
        (nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5)), 2, 1),
    ],
)
def test_gradients_are_divided_afterwards_only_where_their_weight_was_not_foreseen(double, criterion, micro_batch_size, times):
    net, x = build_net(), torch.randn(11, 4)
    target = torch.rand(11, 5) if isinstance(criterion, nn.MSELoss) else class_targets(11, 3)
    loss, expected = plain_program(net, criterion.double(), x, target)
    step = make_step(net, criterion, micro_batch_size=micro_batch_size)
    with Calls(torch.ops.aten._foreach_mul_.Scalar) as divisions:
        found = step(x, target)
    torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected)
    assert divisions.seen == times


def test_on_one_device_it_is_the_plain_program_bit_for_bit():
    torch.manual_seed(0)
    net, x, target = build_net().float(), torch.randn(11, 4), class_targets(11, 3)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    model = DataParallelModel(net, ["cpu"])
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), lr=0.0))
    assert torch.equal(step(x, target), loss)
    assert all(map(torch.equal, gradients(net), expected))


def test_a_failed_micro_batch_drops_its_window(double):
    net, x, target = build_net(), torch.randn(5, 4), class_targets(5)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    step = make_step(net)
    step.add(torch.randn(2, 4), class_targets(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step.add(torch.randn(2, 9), class_targets(2))
    torch.testing.assert_close(step(x, target), loss)
    assert_same_gradients(gradients(net), expected)


def test_a_replica_whose_rows_use_no_parameter(double):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build_net()

        def forward(self, x):
            return self.net(x) if x[0, 0] == 0 else torch.ones(len(x), 5)

    net, target = Sometimes(), class_targets(9)
    x = torch.cat([torch.zeros(3, 4), torch.ones(6, 4)])
    loss = (F.cross_entropy(net(x[:3]), target[:3], reduction="sum") + 6 * torch.tensor(5.0).log()) / 9
    loss.backward()
    expected = gradients(net)
    torch.testing.assert_close(make_step(net, split=[1, 2])(x, target), loss.detach())
    assert_same_gradients(gradients(net), expected)


def test_unused_parameters_keep_no_gradient():
    net = nn.ModuleDict({"used": build_net(), "unused": nn.Linear(2, 2)})
    net.forward = lambda x: net["used"](x)
    model = DataParallelModel(net, ["cpu"])
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.AdamW(net.parameters(), weight_decay=0.5))
    before = net["unused"].weight.detach().clone()
    step(torch.randn(4, 4), class_targets(4))
    assert torch.equal(net["unused"].weight, before)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0, expected a positive number of rows per device, or None"),
        ({"micro_batch_size": "auto"}, ValueError, "micro_batch_size='auto', expected"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm=-1.0, expected"),
        ({"precision": "int8"}, ValueError, "precision='int8', expected one of 'fp32', 'bf16', 'fp16'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        make_step(build_net(), **settings)


def test_bad_parts():
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="the model is a Sequential, expected a DataParallelModel"):
        TrainStep(net, DataParallelCriterion(F.mse_loss), optimizer)
    with pytest.raises(TypeError, match="the criterion is a MSELoss, expected a DataParallelCriterion"):
        TrainStep(DataParallelModel(net, CPUS), nn.MSELoss(), optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric"):
        make_step(net, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="inputs have 4 .*|the targets have 5 rows, but the inputs have 4"):
        make_step(net)(torch.randn(4, 4), class_targets(5))
    with pytest.raises(ValueError, match="reduction='none', expected a scalar loss"):
        make_step(net, nn.MSELoss(reduction="none"))(torch.randn(4, 4), torch.rand(4, 5))


def test_a_scaler_only_where_it_belongs():
    with pytest.raises(ValueError, match="precision 'bf16' was given a gradient scaler, expected none"):
        Precision("bf16", torch.amp.GradScaler("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = make_step(build_net(), precision=Precision("fp16", scaler))
    step(torch.randn(4, 4), class_targets(4))
    assert step.precision.scaler is scaler


class Prompted(torch.nn.Module):
    """A buffer that learns, which no optimizer has."""

    def __init__(self):
        super().__init__()
        self.net = build_net()
        self.register_buffer("prompt", torch.ones(4).requires_grad_())

    def forward(self, x):
        return self.net(x * self.prompt)


def test_the_gradient_of_a_buffer_is_that_of_the_window(double):
    module, x, target = Prompted(), torch.randn(11, 4), class_targets(11, 3)
    F.cross_entropy(module(x), target).backward()
    expected, module.prompt.grad = module.prompt.grad.clone(), None
    step = make_step(
        module, nn.CrossEntropyLoss(torch.ones(5)), torch.optim.SGD(module.net.parameters(), lr=0.0), micro_batch_size=2
    )
    for _ in range(2):
        step(x, target)
        torch.testing.assert_close(module.prompt.grad, expected)
