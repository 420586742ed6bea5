"""``TrainStep``: one effective batch, one exact update, in every precision."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import BODIES, assert_same_gradients, build_net, class_targets, gradients, plain_program
from helpers.steps import CPUS, make_step
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, Precision, TrainStep, parallelize, simulate


def test_bfloat16_and_float16_losses_are_close_to_float32():
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


def test_step_on_one_device_is_bitwise_equal_to_the_plain_program():
    torch.manual_seed(0)
    net, x, target = build_net().float(), torch.randn(11, 4), class_targets(11, 3)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    model = DataParallelModel(net, ["cpu"])
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), lr=0.0))
    assert torch.equal(step(x, target), loss)
    assert all(map(torch.equal, gradients(net), expected))


def test_replica_that_uses_no_parameter_equals_the_plain_program(double):
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
        (
            {"micro_batch_size": 0},
            ValueError,
            "micro_batch_size=0, expected a positive number of rows per device, None or 'auto'",
        ),
        ({"micro_batch_size": "automatic"}, ValueError, "micro_batch_size='automatic', expected"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm=-1.0, expected"),
        ({"precision": "int8"}, ValueError, "precision='int8', expected one of 'fp32', 'bf16', 'fp16'"),
    ],
)
def test_invalid_settings_raise_an_error(settings, error, message):
    with pytest.raises(error, match=message):
        make_step(build_net(), **settings)


def test_invalid_models_criteria_and_batches_raise_an_error():
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


def test_gradient_scaler_requires_fp16():
    with pytest.raises(ValueError, match="precision 'bf16' was given a gradient scaler, expected none"):
        Precision("bf16", torch.amp.GradScaler("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = make_step(build_net(), precision=Precision("fp16", scaler))
    step(torch.randn(4, 4), class_targets(4))
    assert step.precision.scaler is scaler


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("body", BODIES)
def test_steps_on_three_devices_give_the_parameters_of_one_device(body, precision):
    inputs, targets = torch.randn(10, 4), torch.randint(5, (10,))
    targets[:3] = -100
    start = BODIES[body]()

    def trained(count, micro_batch_size):
        with simulate(count):
            net = copy.deepcopy(start).to("sim:0")
            model, criterion = parallelize(net, nn.CrossEntropyLoss(), precision=precision)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision)
            losses = [step(inputs, targets).item() for _ in range(3)]
            return losses, [parameter.detach().cpu() for parameter in net.parameters()]

    tolerance = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}[precision]
    expected_losses, expected = trained(1, None)
    losses, found = trained(3, 2)
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("targets", [(), ((),)], ids=["omitted", "empty"])
def test_a_criterion_without_targets_is_called_with_the_output_alone(targets):
    net, inputs = nn.Linear(4, 3), torch.randn(7, 4)
    criterion = DataParallelCriterion(lambda output: output.square().mean(), weight="rows")
    step = TrainStep(DataParallelModel(net, CPUS), criterion, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=1)
    torch.testing.assert_close(step(inputs, *targets), net(inputs).square().mean().detach())
    step.add(inputs, *targets)
    torch.testing.assert_close(step.apply(), net(inputs).square().mean().detach())
