"""Plans: they fit devices of their capacity, one more row does not, and the result stays exact.

Progress of a plan: lines on a terminal, none elsewhere.

Optimizers with less state: alternatives in a plan that are shown, and never chosen.
"""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import sys

import pytest
import torch
from helpers.memory_problems import PROBLEMS, VOCABULARY, conv_net, tokens
from helpers.releases import released_at_once
from helpers.slow import slow
from torch import nn

from balanced_parallel import DataParallelCriterion, convert_sync_batchnorm, memory, simulate
from balanced_parallel.__main__ import main
from balanced_parallel.memory import MemoryPlan, candidates, estimation
from balanced_parallel.memory.candidates import row_of
from balanced_parallel.memory.problem import Problem
from balanced_parallel.memory.savings import savings_of, with_savings
from balanced_parallel.runtime.values import format_bytes
from balanced_parallel.savings.checkpointing import Checkpointed


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


@released_at_once
@pytest.mark.parametrize("capacity", [slow("3MiB"), "1300KiB"])
def test_plan_fits_its_capacity_and_fewer_micro_batches_do_not(capacity):
    plan = make_plan(capacity, 3, 60)
    assert plan.fits
    peaks = run(plan, 60)
    assert peaks is not None
    assert max(peaks) == pytest.approx(max(plan.chosen.allocated), rel=0.005)
    rows = -(-60 // (3 * (plan.chosen.micro_batches - 1)))  # of each device, in one micro-batch less
    assert plan.micro_batch_size < rows
    assert run(plan, 60, more=rows - plan.micro_batch_size) is None


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
    assert plenty.chosen.savings == ()
    assert plenty.chosen.recomputed == 0
    assert not plenty.chosen.changes_result
    names = [choice.name for choice in plenty.choices]
    assert names == ["replicas"]  # it is fast, so nothing else is traced
    costs = [choice.cost for choice in plenty.choices if choice.fits]
    assert costs == sorted(costs)
    assert plenty.untried[:5] == (
        "BalancedOptimizer",
        "FSDP2",
        "fused optimizer",
        "BalancedOptimizer, fused optimizer",
        "FSDP2, fused optimizer",
    )
    assert "FSDP2, fused optimizer, checkpointed blocks, offloaded activations, bf16, bf16 parameters" in plenty.untried
    assert "not tried" not in str(plenty)
    assert "each saving): BalancedOptimizer; FSDP2; fused optimizer;" in " ".join(plenty.describe(verbose=True).split())


def test_plan_runs_few_traces(monkeypatch):
    traced = []
    run = candidates.try_traces
    monkeypatch.setattr(candidates, "try_traces", lambda jobs: traced.extend(jobs) or run(jobs))
    monkeypatch.setattr(estimation, "run_traces", None)  # the report needs none
    assert make_plan("1GiB", 2, 24).report is not None
    assert [request.micro_batches for request, _ in traced] == [2, 2, 1, 1]  # two numbers of rows each
    traced.clear()
    assert make_plan("1500KiB", 2, 60).chosen.micro_batches > 1
    assert [request.micro_batches for request, _ in traced] == [2, 2]
    assert not any(request.savings for request, _ in traced)


def test_checkpointing_is_chosen_only_if_nothing_else_fits():
    plan = make_plan(505 * 1024, 1, 6, optimizer=torch.optim.SGD)
    assert plan.fits
    assert plan.chosen.savings == ("checkpoint_activations",)
    assert not plan.choices[-1].fits
    assert 0 < plan.chosen.recomputed < 0.5
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
    assert str(plan).startswith("does not fit: needs ")
    with pytest.raises(ValueError, match="does not fit: needs .* for one row per device, nearest that does: larger devices"):
        plan.apply(LanguageModel(), nn.CrossEntropyLoss())
    assert plan.needs[1] is None  # the parameters alone are more


@pytest.mark.slow
def test_plan_that_does_not_fit_reports_the_needed_devices():
    settings = ONE_BLOCK
    capacity = make_plan("200KiB", 4, 24, **settings).needs[0]
    plan = make_plan(capacity, 2, 24, **settings)
    assert not plan.fits
    assert plan.needs[1] == 4
    assert "nearest that does: 4 devices" in plan.verdict
    assert make_plan(capacity, 4, 24, **settings).fits


def test_plans_are_frozen_and_serialize_to_json():
    plan = planned(("3MiB", "1500KiB"), 2, 37)
    again = MemoryPlan.from_json(plan.to_json())
    assert again == plan
    assert again.report is None
    assert plan.report.allocated == pytest.approx(plan.chosen.allocated, rel=0.02)
    equal = planned("1GiB", 2, 24)
    assert equal.report.allocated == equal.chosen.allocated
    assert equal.report.rows == 24
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch_size = 3
    for text in ("rows per update", "run twice", "exact", "fits: yes, "):
        assert text in str(again)


def test_plan_of_a_convolutional_network_with_momentum():
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    settings = {"batch_size": 40, "devices": 2, "device_kind": "h200", "optimizer": momentum}
    plan = memory.plan(
        conv_net(), nn.CrossEntropyLoss(), torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64), **settings
    )
    assert plan.fits
    assert plan.capacity == (279 * 2**29,) * 2


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
    assert result in row_of(plan.chosen)
    assert ("convert_sync_batchnorm(module)" in str(plan)) == (statistics == "replica")
    assert ("the result is not that of the whole batch" in str(plan)) == (statistics is not None)
    assert MemoryPlan.from_json(plan.to_json()).chosen.statistics == statistics


@released_at_once
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
        assert max(cluster.peak) == pytest.approx(max(plan.chosen.allocated), rel=0.05)


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


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def mean_of_counted(output, targets, mask):
    return ((output.logsumexp(1) - output.gather(1, targets[:, None])[:, 0]) * mask).sum() / mask.sum()


def test_wrapped_criterion_is_planned_and_applied_as_it_is():
    inputs, targets, mask = torch.randn(6, 64), torch.randint(10, (6,)), torch.tensor([1.0, 0, 1, 1, 1, 0])
    wrapped = DataParallelCriterion(mean_of_counted, weight=lambda output, targets, mask: mask.sum())
    make = functools.partial(memory.plan, inputs=inputs, targets=(targets, mask), batch_size=6, devices=2, device_kind="sim")
    plans = [make(small_net(), one, capacity="1GiB") for one in (wrapped, mean_of_counted)]
    assert [plan.unknown_divisor for plan in plans] == [False, True]
    assert plans[0].choices == plans[1].choices
    assert ["the divisor of the loss is not known" in str(plan) for plan in plans] == [False, True]
    *_, step = plans[0].apply(small_net(), wrapped, device_ids=["cpu"] * 2, optimizer=torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(step(inputs, (targets, mask)), mean_of_counted(small_net()(inputs), targets, mask).detach())


@released_at_once
def test_unequal_devices_are_named_one_by_one():
    inputs, targets = torch.randn(8, 64), torch.randint(10, (8,))
    settings = {"device_kind": "sim", "optimizer": torch.optim.SGD, "batch_size": 900, "devices": 3}
    plan = memory.plan(small_net(), nn.CrossEntropyLoss(), inputs, targets, capacity=["500KiB", "300KiB", "300KiB"], **settings)
    assert plan.chosen.split is not None
    assert "on 3 x sim with 500.00 KiB + 300.00 KiB + 300.00 KiB" in str(plan)
    assert "".join(row_of(plan.chosen)).count(" + ") == 2 * 3  # rows, allocated, reserved
    with simulate(3, list(plan.capacity)) as cluster:
        *_, step = plan.apply(small_net(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)
        step(torch.randn(900, 64), torch.randint(10, (900,)))
        assert cluster.peak == pytest.approx(plan.chosen.allocated, rel=0.02)


BATCH = torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)
SETTINGS = {"batch_size": 8, "device_kind": "sim", "capacity": "8KiB"}


def test_each_stage_is_logged_before_it_is_traced(caplog):
    with caplog.at_level("INFO", logger="balanced_parallel.memory"):
        plan = memory.plan(nn.Linear(16, 8), nn.CrossEntropyLoss(), *BATCH, **SETTINGS)
    assert not plan.fits
    assert caplog.messages[0] == "trying: replicas"
    steps = [message.removeprefix("trying: ").split("; ") for message in caplog.messages]
    assert {name for step in steps for name in step} >= {choice.name for choice in plan.choices}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_plan_on_a_terminal_prints_what_it_tries(tmp_path, monkeypatch, capsys, is_terminal):
    result = "nn.Linear(16, 8), nn.CrossEntropyLoss(), torch.zeros(8, 16), torch.zeros(8, dtype=int)"
    (tmp_path / "small_net.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef build():\n    return {result}\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    flags = ["--device-kind", "sim", "--memory", "8KiB"]
    assert main(["plan", "--problem", f"{tmp_path}/small_net.py:build", *flags]) == 1
    output, errors = capsys.readouterr()
    assert ("trying: replicas\n" in errors) == is_terminal
    assert "trying" not in output


def plan_optimizers(capacity, **settings):
    build, batch = PROBLEMS["perceptron"]
    return memory.plan(build(), nn.CrossEntropyLoss(), *batch(8), batch_size=6, capacity=capacity, device_kind="sim", **settings)


@pytest.mark.slow
def test_an_optimizer_with_less_state_is_shown_but_not_chosen():
    settings = {"precision": "fp16", "devices": 2}  # fewer options; one device may have its optimizer on the host
    plan = plan_optimizers("150KiB", **settings)
    assert not plan.fits
    first, *_, last = plan.choices
    assert first.optimizer is None
    assert (last.optimizer, last.exact) == ("Adafactor", False)
    (sgd,) = [choice for choice in plan.choices if choice.optimizer == "SGD"]
    assert sgd.fits
    assert sgd.allocated[0] <= 150 * 1024
    assert "another optimizer" in str(plan)
    assert plan.verdict.endswith("; or optimizer=SGD, which makes another result")
    with pytest.raises(ValueError, match="does not fit"):
        plan.apply(nn.Linear(2, 2), nn.MSELoss())
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert plan_optimizers("150KiB", optimizer=torch.optim.SGD, **settings).fits


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
    problem = Problem(nn.Linear(2, 2), nn.MSELoss(), torch.zeros(2, 2), torch.zeros(2, 2))
    request = estimation.make_request(problem, optimizer=given)
    names = [planned.saving.option for planned in savings_of("optimizer") if with_savings(request, [planned])]
    assert names == smaller


@released_at_once
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
        assert report.allocated[0] == pytest.approx(cluster.peak[0], rel=0.02)


@pytest.mark.parametrize(
    ("make", "balanced"), [(torch.optim.Muon, True), slow(torch.optim.Adafactor, True), (torch.optim.SGD, False)]
)
def test_matrices_of_shards_are_updated_whole(make, balanced):
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    batch = torch.zeros(4, 256), torch.zeros(4, 256)
    settings = {"batch_size": 4, "devices": 2, "hosts": 1, "device_kind": "sim", "optimizer": make}
    plan = memory.plan(net, nn.MSELoss(), *batch, capacity="5MiB", **settings)
    name = "FSDP2, BalancedOptimizer" if balanced else "FSDP2"
    (sharded,) = [choice for choice in plan.choices if choice.name == name] or [None]
    assert sharded is not None, [choice.name for choice in plan.choices]
    assert sharded.balanced_optimizer == balanced


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_the_state_of_8_bit_adamw_is_counted_in_its_bytes():
    net, batch = nn.Linear(256, 256), (torch.zeros(16, 256), torch.zeros(16, 256))
    kinds = torch.optim.AdamW, importlib.import_module("torchao.optim").AdamW8bit
    parts = [memory.estimate(net, nn.MSELoss(), *batch, optimizer=make).parts[0] for make in kinds]
    assert parts[1]["optimizer state"] < 0.3 * parts[0]["optimizer state"]


@pytest.mark.parametrize(
    ("make", "setting"), [(torch.optim.AdamW, "fused=True"), (functools.partial(torch.optim.NAdam, lr=0.01), "foreach=False")]
)
def test_an_optimizer_without_temporaries_comes_before_one_on_the_host(make, setting):
    """Plans name a fused optimizer, whose update takes the bytes of all parameters less, and say how it is made."""
    with torch.device("meta"):
        net, rows = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), torch.zeros(2, 256)
    settings = {"optimizer": make, "device_kind": "sim"}
    plain, fused = (
        memory.estimate(net, nn.MSELoss(), rows, rows, savings=savings, **settings).nvidia_smi[0] for savings in ((), [setting])
    )
    assert plain - fused > 0.6 * sum(each.nbytes for each in net.parameters())
    capacity = (plain + fused) // 2
    plan = memory.plan(net, nn.MSELoss(), rows, rows, batch_size=2, capacity=capacity, **settings)
    assert plan.chosen.savings == (setting,)
    assert plan.chosen.exact
    assert plan.chosen.micro_batches == 1
    assert not any("host" in choice.name for choice in plan.choices)
    assert any(line.startswith("optimizer = ") and line.endswith(f"{setting})") for line in plan.lines)
    with simulate(1, plan.capacity[0]) as cluster:
        names = {"module": net, "criterion": nn.MSELoss(), "inputs": torch.ones(2, 256), "targets": torch.ones(2, 256)}
        exec("\n".join(plan.lines), names)  # also for a module on meta
        cluster.reset_peak()
        names["step"](torch.ones(2, 256), torch.ones(2, 256))
        assert cluster.peak[0] == pytest.approx(plan.chosen.allocated[0], rel=0.02)
    with simulate(1, plan.capacity[0]):
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        *_, step = plan.apply(net, nn.MSELoss(), optimizer=getattr(make, "func", make), lr=0.01)
        for _ in range(2):
            assert step(torch.ones(2, 256), torch.ones(2, 256)).isfinite()


def test_settings_of_the_user_stay():
    for make in (
        functools.partial(torch.optim.AdamW, foreach=True),
        torch.optim.SGD,
        lambda parameters: torch.optim.AdamW(parameters),
    ):
        plan = make_plan("1GiB", 1, 24, optimizer=make)
        assert not any("fused" in name or "at a time" in name for name in plan.untried)


def test_a_plan_says_what_is_left_and_first_if_that_is_little():
    plenty = planned("1GiB", 2, 24)
    reserved = max(plenty.chosen.reserved)
    used = f"12 rows per device in 1 micro-batch, {format_bytes(reserved)} of "
    assert plenty.verdict == f"fits: yes, {used}1.00 GiB, {format_bytes(2**30 - reserved)} left"
    tight = dataclasses.replace(plenty, capacity=(reserved + 1024,) * 2)
    assert tight.verdict.startswith(f"fits: yes, with only 1.00 KiB left, {used}")
