"""Plans: they fit devices of their capacity, one more row does not, and the result stays exact."""

import dataclasses
import functools
import itertools

import pytest
import torch
from helpers.memory_problems import VOCABULARY, conv_net, tokens
from helpers.slow import slow
from torch import nn

from balanced_parallel import convert_sync_batchnorm, memory, simulate
from balanced_parallel.memory import MemoryPlan, candidates, estimation, planning
from balanced_parallel.savings.activation_checkpointing import Checkpointed


class LanguageModel(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(blocks)])
        self.output = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.layers(self.embedding(tokens))).transpose(1, 2)


KINDS = {"device_kind": "sim", "optimizer": torch.optim.AdamW}


@functools.cache
def planned(capacity, devices, batch_size):
    return make_plan(capacity, devices, batch_size)


def make_plan(capacity, devices, batch_size, blocks=2, **settings):
    settings = KINDS | settings
    return memory.plan(
        LanguageModel(blocks),
        nn.CrossEntropyLoss(),
        tokens(8),
        tokens(8),
        batch_size=batch_size,
        capacity=capacity,
        devices=devices,
        **settings,
    )


def batch(rows):
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (rows, 16)), torch.randint(VOCABULARY, (rows, 16))


def run(plan, rows, more=0, steps=2):
    """Runs the steps of a plan on simulated devices of its capacity. Returns their peaks, or None if memory ran out.

    Args:
        more: rows per micro-batch beyond the plan.
    """
    with simulate(plan.devices, list(plan.capacity)) as cluster:
        _, _, _, step = plan.apply(LanguageModel(), nn.CrossEntropyLoss(), lr=1e-3)
        step.micro_batch_size += more
        try:
            for _ in range(steps):
                step(*batch(rows))
        except torch.OutOfMemoryError:
            return None
        return cluster.peak


@pytest.mark.parametrize("capacity", [slow("3MiB"), "1300KiB"])
def test_plan_fits_its_capacity_and_one_more_row_does_not(capacity):
    plan = make_plan(capacity, 3, 60)
    assert plan.fits
    peaks = run(plan, 60)
    assert peaks is not None
    assert max(peaks) == pytest.approx(max(plan.chosen.peak), rel=0.005)
    rows = (plan.micro_batch_size + 1) * 3 * max(plan.chosen.micro_batches, 2)
    assert run(plan, rows, more=1) is None


@pytest.mark.slow
def test_unequal_devices_get_unequal_rows():
    plan = planned(("3MiB", "1500KiB"), 2, 37)
    assert plan.chosen.split is not None
    assert plan.chosen.split[0] > plan.chosen.split[1]
    peaks = run(plan, 37)
    assert peaks is not None
    assert all(peak <= size for peak, size in zip(peaks, plan.capacity, strict=True))
    assert make_plan(["1GiB", "2GiB"], 2, 37).chosen.split is None  # equal rows fit


@pytest.mark.slow
def test_applied_plan_equals_the_plain_program():
    plan = make_plan("1200KiB", 2, 13)
    plain, net = LanguageModel(), LanguageModel()
    inputs, targets = batch(13)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = nn.functional.cross_entropy(plain(inputs), targets)
    expected.backward()
    optimizer.step()
    with simulate(2):
        model, _, _, step = plan.apply(net, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)
        loss = step(inputs, targets)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        found = [parameter.detach().cpu() for parameter in model.module.parameters()]
    torch.testing.assert_close(found, [parameter.detach() for parameter in plain.parameters()], rtol=1e-4, atol=1e-6)


def test_cheapest_exact_plan_is_chosen():
    plenty = planned("1GiB", 2, 24)
    assert plenty.chosen.micro_batches == 1
    assert plenty.chosen.checkpoint == ()
    assert plenty.chosen.recomputed == 0
    assert not plenty.chosen.changes_result
    names = [choice.name for choice in plenty.choices]
    assert {"replicas", "BalancedOptimizer"} <= set(names)
    costs = [choice.cost for choice in plenty.choices if choice.fits]
    assert costs == sorted(costs)
    assert plenty.untried == (
        "checkpointed blocks",
        "BalancedOptimizer, checkpointed blocks",
        "checkpointed blocks, offloaded activations",
        "BalancedOptimizer, checkpointed blocks, offloaded activations",
        "gradients released in the backward",
        "checkpointed blocks, gradients released in the backward",
        "checkpointed blocks, offloaded activations, gradients released in the backward",
        "bf16",
        "BalancedOptimizer, bf16",
        "checkpointed blocks, bf16",
        "BalancedOptimizer, checkpointed blocks, bf16",
        "checkpointed blocks, offloaded activations, bf16",
        "BalancedOptimizer, checkpointed blocks, offloaded activations, bf16",
        "gradients released in the backward, bf16",
        "checkpointed blocks, gradients released in the backward, bf16",
        "checkpointed blocks, offloaded activations, gradients released in the backward, bf16",
        "SGD, checkpointed blocks",
        "Adafactor, checkpointed blocks",
    )
    assert "less fits (`tricks` measures each): checkpointed blocks; BalancedOptimizer, checkpointed blocks; " in str(plenty)


def test_plan_runs_few_traces(monkeypatch):
    traced = []
    run = candidates.run_traces
    monkeypatch.setattr(candidates, "run_traces", lambda jobs: traced.extend(jobs) or run(jobs))
    monkeypatch.setattr(estimation, "run_traces", None)  # the report needs none
    assert make_plan("1GiB", 2, 24).report is not None
    assert len(traced) == 4  # two options with two numbers of rows, of one micro-batch each
    assert {request.micro_batches for request, _ in traced} == {1}
    traced.clear()
    assert make_plan("1500KiB", 2, 60).chosen.micro_batches > 1
    assert [request.micro_batches for request, _ in traced].count(1) <= 4
    assert not any(request.blocks for request, _ in traced)


def test_checkpointing_is_chosen_only_if_nothing_else_fits():
    plan = make_plan(505 * 1024, 1, 6, optimizer=torch.optim.SGD)
    assert plan.fits
    assert plan.chosen.checkpoint == ("layers.0", "layers.1")
    assert not plan.choices[1].fits
    assert 0 < plan.chosen.recomputed < 0.5
    assert plan.chosen.saved > 0
    with simulate(1, plan.capacity[0]):
        net = LanguageModel()
        plan.apply(net, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)[3](*batch(6))
        assert isinstance(net.layers[0], Checkpointed)


ONE_BLOCK = {"blocks": 1, "optimizer": functools.partial(torch.optim.SGD, momentum=0.9)}  # fewer options and operators


@pytest.mark.slow
def test_plan_that_does_not_fit_reports_the_needed_capacity():
    plan = make_plan("100KiB", 2, 24, **ONE_BLOCK)
    assert not plan.fits
    assert any(choice.precision == "bf16" and choice.changes_result for choice in plan.choices)
    assert "nothing fits" in str(plan)
    with pytest.raises(ValueError, match="nothing fits: one row per device needs devices of"):
        plan.apply(LanguageModel(), nn.CrossEntropyLoss())
    assert plan.needs[1] is None  # the parameters alone are more


@pytest.mark.slow
def test_plan_that_does_not_fit_reports_the_needed_devices(monkeypatch):
    stages = planning.stages_of
    monkeypatch.setattr(planning, "stages_of", lambda *given: itertools.islice(stages(*given), 1))  # the others need less
    settings = ONE_BLOCK
    capacity = make_plan("200KiB", 3, 24, **settings).needs[0]
    plan = make_plan(capacity, 2, 24, **settings)
    assert not plan.fits
    assert plan.needs[1] == 3
    assert "or 3 devices" in plan.advice
    assert make_plan(capacity, 3, 24, **settings).fits


def test_plans_are_frozen_and_serialize_to_json():
    plan = planned(("3MiB", "1500KiB"), 2, 37)
    again = MemoryPlan.from_json(plan.to_json())
    assert again == plan
    assert again.report is None
    assert plan.report.peak == pytest.approx(plan.chosen.peak, rel=0.02)
    equal = planned("1GiB", 2, 24)
    assert equal.report.peak == equal.chosen.peak
    assert equal.report.rows == 24
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch_size = 3
    for text in ("rows per update", "recomputed", "exact", "chosen:"):
        assert text in str(again)


def test_plan_of_a_convolutional_network_with_momentum():
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    settings = {"batch_size": 40, "devices": 2, "device_kind": "h200", "optimizer": momentum}
    plan = memory.plan(
        conv_net(), nn.CrossEntropyLoss(), torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64), **settings
    )
    assert plan.fits
    assert plan.capacity == (139 * 2**30,) * 2


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("convert", "devices", "capacity", "statistics", "result"),
    [
        (False, 2, "1MiB", "replica", "batch norm by replica"),
        (False, 1, "1MiB", None, "exact"),
        (False, 1, "64KiB", "micro-batch", "batch norm by micro-batch"),
        (True, 2, "1MiB", None, "exact"),
        (True, 2, "64KiB", "micro-batch", "batch norm by micro-batch"),
    ],
)
def test_batch_norm_over_part_of_the_rows_is_not_reported_as_exact(convert, devices, capacity, statistics, result):
    net = convert_sync_batchnorm(Normalised()) if convert else Normalised()
    settings = {"batch_size": 640, "capacity": capacity, "devices": devices, **KINDS}
    plan = memory.plan(net, nn.CrossEntropyLoss(), torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), **settings)
    assert plan.fits
    assert (plan.chosen.micro_batches > 1) == (capacity == "64KiB")
    assert plan.chosen.statistics == statistics
    assert plan.chosen.exact == (statistics is None)
    assert result in str(plan)
    assert ("convert_sync_batchnorm(module)" in str(plan)) == (statistics == "replica")
    assert ("the result is not that of the whole batch" in str(plan)) == (statistics is not None)
    assert MemoryPlan.from_json(plan.to_json()).chosen.statistics == statistics


def test_plan_with_rows_in_dimension_1():
    settings = {"batch_size": 12, "capacity": "1MiB", "devices": 2, "dim": 1, **KINDS}
    loss = nn.MSELoss()
    plan = memory.plan(nn.Sequential(nn.Linear(64, 256)), loss, torch.zeros(3, 2, 64), torch.zeros(3, 2, 256), **settings)
    assert plan.fits
    assert plan.micro_batch_size == 6
    assert MemoryPlan.from_json(plan.to_json()).dim == 1
    with simulate(2) as cluster:
        _, _, _, step = plan.apply(nn.Sequential(nn.Linear(64, 256)), loss, lr=0.0)
        for _ in range(2):
            step(torch.randn(3, 12, 64), torch.randn(3, 12, 256))
        assert max(cluster.peak) == pytest.approx(max(plan.chosen.peak), rel=0.05)


BAD = {
    "batch_size=0": {"batch_size": 0},
    "devices=0": {"devices": 0},
    "capacity has 2 sizes for 3 devices": {"capacity": ["1GiB", "2GiB"]},
    "'7 bananas' is not a memory size": {"capacity": "7 bananas"},
    "device_kind='sim', which has none": {"capacity": None},
    "precision='fp7'": {"precision": "fp7"},
}


@pytest.mark.parametrize("said", BAD)
def test_invalid_settings_of_plan_raise_an_error(said):
    settings = {"capacity": "1GiB", "devices": 3, "batch_size": 6} | BAD[said]
    with pytest.raises(ValueError, match=said):
        make_plan(**settings)


def test_apply_with_other_devices_raises_an_error():
    with pytest.raises(ValueError, match="expected the 2 that were planned for"):
        planned("1GiB", 2, 24).apply(LanguageModel(), nn.CrossEntropyLoss(), device_ids=["cpu"])
