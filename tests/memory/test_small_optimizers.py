"""Optimizers with less state: alternatives in a plan that are shown, and never chosen."""

import copy
import functools
import importlib.util

import pytest
import torch
from helpers.memory_problems import PROBLEMS
from torch import nn

from balanced_parallel import memory, simulate
from balanced_parallel.memory import MemoryPlan
from balanced_parallel.memory.small_optimizers import smaller_optimizers
from balanced_parallel.memory.trace.optimizer_choice import OptimizerChoice


def make_plan(capacity, **settings):
    build, batch = PROBLEMS["perceptron"]
    return memory.plan(build(), nn.CrossEntropyLoss(), *batch(8), batch_size=6, capacity=capacity, device_kind="sim", **settings)


@pytest.mark.slow
def test_an_optimizer_with_less_state_is_shown_but_not_chosen():
    plan = make_plan("240KiB", precision="bf16")  # fewer options
    assert not plan.fits
    first, *_, last = plan.choices
    assert first.optimizer is None
    assert (last.optimizer, last.exact) in (("Adafactor", False), ("AdamW8bit", False))
    (sgd,) = [choice for choice in plan.choices if choice.optimizer == "SGD"]
    assert sgd.fits
    assert sgd.peak[0] <= 240 * 1024
    assert "another optimizer" in str(plan)
    assert plan.advice.endswith("; with optimizer=SGD it fits, which makes another result")
    with pytest.raises(ValueError, match="nothing fits"):
        plan.apply(nn.Linear(2, 2), nn.MSELoss())
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert make_plan("240KiB", optimizer=torch.optim.SGD).fits


@pytest.mark.parametrize(
    ("given", "smaller"),
    [
        (torch.optim.AdamW, ["SGD", "Adafactor"]),
        (functools.partial(torch.optim.SGD, momentum=0.9), ["SGD", "Adafactor"]),
        (torch.optim.Adafactor, ["SGD"]),
        (torch.optim.SGD, []),
    ],
)
def test_only_optimizers_with_less_state_are_alternatives(given, smaller):
    names = [choice.name for choice in smaller_optimizers(OptimizerChoice(given, foreach=True))]
    assert [name for name in names if name != "AdamW8bit"] == smaller


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.AdamW])
@pytest.mark.usefixtures("one_trace")
def test_each_is_predicted_as_simulated_devices_measure_it(make):
    net, batch = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)), (torch.zeros(16, 128), torch.zeros(16, 128))
    report = memory.estimate(net, nn.MSELoss(), *batch, device_kind="sim", optimizer=make)
    with simulate(1) as cluster:
        model = copy.deepcopy(net).to("sim:0")
        inputs, targets = (tensor.to("sim:0") for tensor in batch)
        optimizer = make(model.parameters())
        for _ in range(2):
            cluster.reset_peak()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        assert report.peak[0] == pytest.approx(cluster.peak[0], rel=0.02)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_the_state_of_8_bit_adamw_is_counted_in_its_bytes():
    net, batch = nn.Linear(256, 256), (torch.zeros(16, 256), torch.zeros(16, 256))
    eight_bits = [choice.make for choice in smaller_optimizers(OptimizerChoice(torch.optim.AdamW, True))][-1]
    parts = [memory.estimate(net, nn.MSELoss(), *batch, optimizer=make).parts[0] for make in (torch.optim.AdamW, eight_bits)]
    assert parts[1]["optimizer state"] < 0.3 * parts[0]["optimizer state"]
