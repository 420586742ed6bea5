"""Plans: they fit devices of their capacity, one more row does not, and the result stays exact.

Progress of a plan: a line for each option, on a terminal and elsewhere.

Optimizers with less state: alternatives in a plan that are shown, and never chosen.
"""

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
from unittest.mock import Mock

import pytest
import torch
from helpers.memory_problems import PROBLEMS, WordModel, peak_of_updates, tokens, words
from helpers.releases import released_at_once
from helpers.slow import slow, slow_but
from torch import nn

from balanced_parallel import DataParallelCriterion, convert_sync_batchnorm, memory, simulate
from balanced_parallel.__main__ import main
from balanced_parallel.memory import MemoryPlan
from balanced_parallel.memory.candidates import Option, Search, row_of
from balanced_parallel.memory.trace import tracer
from balanced_parallel.runtime.values import format_bytes
from balanced_parallel.savings.checkpointing import Checkpointed

KINDS = {"device_kind": "sim", "optimizer": torch.optim.AdamW}


def make_plan(capacity, devices, batch_size, blocks=2, **settings):
    settings = (
        KINDS | settings | {"capacity": capacity, "devices": devices, "batch_size": batch_size}
    )
    return memory.plan(WordModel(blocks), nn.CrossEntropyLoss(), tokens(8), tokens(8), **settings)


planned = functools.cache(make_plan)


def run(plan, rows, micro_batch_size):
    """Runs two steps of a plan on simulated devices of its capacity. Returns their peaks."""
    with simulate(plan.devices, list(plan.capacity)) as cluster:
        *_, step = plan.apply(WordModel(), nn.CrossEntropyLoss(), lr=1e-3)
        step.micro_batch_size = micro_batch_size
        return peak_of_updates(cluster, step, *words(rows))


@released_at_once
@pytest.mark.parametrize("capacity", [slow("3MiB"), "1300KiB"])
def test_plan_fits_its_capacity_and_fewer_micro_batches_do_not(capacity):
    plan = make_plan(capacity, 3, 60)
    assert max(run(plan, 60, plan.micro_batch_size)) == pytest.approx(
        max(plan.chosen.allocated), rel=0.005
    )
    rows = -(-60 // (3 * (plan.chosen.micro_batches - 1)))
    assert plan.micro_batch_size < rows
    with pytest.raises(torch.OutOfMemoryError):
        run(plan, 60, rows)


def test_cheapest_exact_plan_is_chosen():
    plenty = planned("1GiB", 2, 24)
    (chosen,) = plenty.choices  # it is fast, so nothing else is traced
    assert (chosen.name, chosen.micro_batches, chosen.savings, chosen.recomputed) == (
        "replicas",
        1,
        (),
        0,
    )
    assert not chosen.changes_result
    assert plenty.untried[:4] == (
        "BalancedOptimizer",
        "FSDP2",
        "fused optimizer",
        "BalancedOptimizer, fused optimizer",
    )
    assert (
        "FSDP2, fused optimizer, checkpointed blocks, offloaded activations, bf16, bf16 parameters"
        in plenty.untried
    )
    assert "not tried" not in str(plenty)
    assert "each saving): BalancedOptimizer; FSDP2; fused optimizer;" in " ".join(
        plenty.describe(verbose=True).split()
    )


@pytest.mark.slow
def test_checkpointing_is_chosen_only_if_nothing_else_fits():
    plan = make_plan(505 * 1024, 1, 6, optimizer=torch.optim.SGD)
    assert plan.chosen.savings == ("checkpoint_activations",)
    assert not plan.choices[-1].fits
    assert 0 < plan.chosen.recomputed < 0.5
    with simulate(1, plan.capacity[0]):
        net = WordModel()
        plan.apply(net, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)[3](*words(6))
        assert isinstance(net.layers[0], Checkpointed)


ONE_BLOCK = {
    "blocks": 1,
    "optimizer": functools.partial(torch.optim.SGD, momentum=0.9),
}  # fewer options and operators


@pytest.mark.slow
def test_plan_that_does_not_fit_reports_the_needed_capacity():
    plan = make_plan("100KiB", 2, 24, **ONE_BLOCK)
    assert not plan.fits
    assert any(choice.precision == "bf16" and choice.changes_result for choice in plan.choices)
    assert str(plan).startswith("does not fit: needs ")
    with pytest.raises(
        ValueError,
        match="does not fit: needs .* for one row per device, nearest that does: larger devices",
    ):
        plan.apply(WordModel(), nn.CrossEntropyLoss())
    assert plan.needs[1] is None  # the parameters alone are more


def test_plans_are_frozen_and_serialize_to_json(unequal):
    again = MemoryPlan.from_json(unequal.to_json())
    assert again == unequal
    assert again.report is None
    assert unequal.report.allocated == pytest.approx(unequal.chosen.allocated, rel=0.02)
    equal = planned("1GiB", 2, 24)
    assert equal.report.allocated == equal.chosen.allocated
    assert equal.report.rows == 24
    with pytest.raises(dataclasses.FrozenInstanceError):
        equal.batch_size = 3
    for text in ("rows per update", "flops", "host", "exact", "fits: yes, "):
        assert text in str(again)


@pytest.mark.parametrize(
    ("convert", "devices", "capacity", "statistics", "result"),
    [
        (False, 2, "1MiB", "replica", "batch norm by replica"),
        slow(False, 1, "1MiB", None, "exact"),
        slow(False, 1, "64KiB", "micro-batch", "batch norm by micro-batch"),
        (True, 2, "1MiB", None, "exact"),
        (True, 2, "64KiB", "micro-batch", "batch norm by micro-batch"),
    ],
)
def test_batch_norm_over_part_of_the_rows_is_not_reported_as_exact(
    convert, devices, capacity, statistics, result
):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net = convert_sync_batchnorm(net) if convert else net
    settings = {"batch_size": 640, "capacity": capacity, "devices": devices, **KINDS}
    plan = memory.plan(
        net, nn.CrossEntropyLoss(), torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), **settings
    )
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
    plan = memory.plan(
        nn.Sequential(nn.Linear(64, 256)),
        loss,
        torch.zeros(3, 2, 64),
        torch.zeros(3, 2, 256),
        **settings,
    )
    assert plan.micro_batch_size == 6
    assert MemoryPlan.from_json(plan.to_json()).dim == 1
    with simulate(2) as cluster:
        _, _, _, step = plan.apply(nn.Sequential(nn.Linear(64, 256)), loss, lr=0.0)
        peaks = peak_of_updates(cluster, step, torch.randn(3, 12, 64), torch.randn(3, 12, 256))
        assert max(peaks) == pytest.approx(max(plan.chosen.allocated), rel=0.05)


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


@pytest.mark.parametrize("error", [TypeError("two outputs"), ValueError("two outputs")])
def test_an_error_of_the_program_ends_the_search_at_once(caplog, error):
    """All options were tried, with the same error."""

    def loss(output, targets):
        raise error

    rows = torch.zeros(8, 64)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    with (
        caplog.at_level("INFO", logger="balanced_parallel.memory"),
        pytest.raises(ValueError, match=r"replicas: .*two outputs; a plan needs a module"),
    ):
        memory.plan(net, loss, rows, rows, batch_size=8, capacity="1GiB", device_kind="a100")
    assert len([message for message in caplog.messages if "trying" in message]) == 1


@pytest.mark.parametrize("ended", [KeyboardInterrupt, TimeoutError])
def test_a_search_that_is_stopped_ends_with_the_best_option_so_far(monkeypatch, caplog, ended):
    """Ctrl-C was a traceback, and what had been found was lost."""
    choose = Option.choose
    count = 1

    def choose_some(option, plain):
        if len(tried) == count:
            raise ended
        tried.append(option.name)
        choice = choose(option, plain)
        # As slow as recomputation, so that the search goes on.
        return dataclasses.replace(choice, traffic=2**50)

    monkeypatch.setattr(Option, "choose", choose_some)
    tried = []
    with caplog.at_level("INFO", logger="balanced_parallel.memory"):
        plan = make_plan("1GiB", 1, 24)
    assert plan.chosen.name == tried[0] == "replicas"
    assert plan.report is not None
    assert any(
        message.startswith("the best so far: replicas, 24 x 1, ") for message in caplog.messages
    )
    assert "the search was stopped: a cheaper option may fit" in caplog.messages
    tried = []
    count = 0
    with pytest.raises(ended):
        make_plan("1GiB", 1, 24)


def test_seconds_bound_a_search():
    with pytest.raises(TimeoutError, match="no option that fits was found in time"):
        make_plan("1GiB", 1, 24, seconds=0)


def test_seconds_bound_the_search_for_more_devices(monkeypatch):
    def try_last_layout(search):
        search._fits(*search._make(search._groups[0][-1:]))
        monkeypatch.setattr(tracer.Processes, "_check_time", Mock(side_effect=TimeoutError))

    monkeypatch.setattr(Search, "_trace", try_last_layout)
    plan = make_plan("20KiB", 2, 24, **ONE_BLOCK, precision="fp16")
    assert plan.needs[1] is None
    assert "nearest that does: larger devices" in plan.verdict


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def mean_of_counted(output, targets, mask):
    return (
        (output.logsumexp(1) - output.gather(1, targets[:, None])[:, 0]) * mask
    ).sum() / mask.sum()


def test_wrapped_criterion_is_planned_and_applied_as_it_is():
    inputs = torch.randn(6, 64)
    targets = torch.randint(10, (6,))
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0])
    wrapped = DataParallelCriterion(
        mean_of_counted, weight=lambda output, targets, mask: mask.sum()
    )
    make = functools.partial(
        memory.plan,
        inputs=inputs,
        targets=(targets, mask),
        batch_size=6,
        devices=2,
        device_kind="sim",
    )
    plans = [make(small_net(), one, capacity="1GiB") for one in (wrapped, mean_of_counted)]
    assert [plan.unknown_divisor for plan in plans] == [False, True]
    assert plans[0].choices == plans[1].choices
    assert ["the divisor of the loss is not known" in str(plan) for plan in plans] == [False, True]
    *_, step = plans[0].apply(
        small_net(), wrapped, device_ids=["cpu"] * 2, optimizer=torch.optim.SGD, lr=0.1
    )
    torch.testing.assert_close(
        step(inputs, (targets, mask)), mean_of_counted(small_net()(inputs), targets, mask)
    )


@pytest.fixture(scope="module")
def unequal():
    settings = {"device_kind": "sim", "optimizer": torch.optim.SGD, "batch_size": 900, "devices": 3}
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    return memory.plan(
        small_net(),
        nn.CrossEntropyLoss(),
        *batch,
        capacity=["500KiB", "300KiB", "300KiB"],
        **settings,
    )


@released_at_once
def test_unequal_devices_get_unequal_rows_and_are_named_one_by_one(unequal):
    assert unequal.chosen.split[0] > unequal.chosen.split[1] == unequal.chosen.split[2]
    assert "on 3 x sim with 500.00 KiB + 300.00 KiB + 300.00 KiB" in str(unequal)
    assert "".join(row_of(unequal.chosen)).count(" + ") == 2 * 3  # rows, allocated, reserved
    with simulate(3, list(unequal.capacity)) as cluster:
        *_, step = unequal.apply(
            small_net(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1
        )
        step(torch.randn(900, 64), torch.randint(10, (900,)))
        assert cluster.peak == pytest.approx(unequal.chosen.allocated, rel=0.02)


TRYING = r"trying: (.+)"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_plan_prints_what_it_tries_before_the_first_trace(nets, monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(Option, "choose", Mock(side_effect=ValueError("no trace")))
    with pytest.raises(SystemExit):
        main(f"plan --problem {nets('small')} --device-kind sim --memory 1GiB".split())
    output, errors = capsys.readouterr()
    assert re.search(TRYING, errors)[1] == "replicas"
    assert "trying" not in output


def plan_optimizers(capacity, **settings):
    build, batch = PROBLEMS["perceptron"]
    return memory.plan(
        build(),
        nn.CrossEntropyLoss(),
        *batch(8),
        batch_size=6,
        capacity=capacity,
        device_kind="sim",
        **settings,
    )


@pytest.mark.slow
def test_an_optimizer_with_less_state_is_shown_but_not_chosen():
    settings = {
        "precision": "fp16",
        "devices": 2,
    }  # fewer options; one device may have its optimizer on the host
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


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor])
def test_shards_with_a_balanced_optimizer_are_a_choice(make):
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    batch = torch.zeros(4, 256), torch.zeros(4, 256)
    settings = {"batch_size": 4, "devices": 2, "device_kind": "sim", "optimizer": make}
    plan = memory.plan(net, nn.MSELoss(), *batch, capacity="5MiB", **settings)
    (sharded,) = [choice for choice in plan.choices if choice.name == "FSDP2, BalancedOptimizer"]
    assert sharded.balanced_optimizer


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_the_state_of_8_bit_adamw_is_counted_in_its_bytes():
    net = nn.Linear(256, 256)
    batch = (torch.zeros(16, 256), torch.zeros(16, 256))
    kinds = torch.optim.AdamW, importlib.import_module("torchao.optim").AdamW8bit
    parts = [memory.estimate(net, nn.MSELoss(), *batch, optimizer=make).parts[0] for make in kinds]
    assert parts[1]["optimizer state"] < 0.3 * parts[0]["optimizer state"]


WITHOUT_TEMPORARIES = {
    "fused=True": torch.optim.AdamW,
    "foreach=False": functools.partial(torch.optim.NAdam, lr=0.01),
}
ROWS = torch.ones(2, 256)


def squares():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])


@functools.cache
def without_temporaries(setting):
    """Returns the plan of a module on meta that fits with the setting alone, without which updates take its bytes again."""
    settings = {"optimizer": WITHOUT_TEMPORARIES[setting], "device_kind": "sim"}
    with torch.device("meta"):
        net = squares()
        rows = torch.zeros(2, 256)
    plain, fused = (
        memory.estimate(net, nn.MSELoss(), rows, rows, savings=savings, **settings).nvidia_smi[0]
        for savings in ((), [setting])
    )
    assert plain - fused > 0.6 * sum(each.nbytes for each in net.parameters())
    settings |= {"batch_size": 2, "capacity": (plain + fused) // 2}
    return net, memory.plan(net, nn.MSELoss(), rows, rows, **settings)


SETTINGS = slow_but([*WITHOUT_TEMPORARIES], "fused=True")


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_optimizer_without_temporaries_comes_before_one_on_the_host(setting):
    _, plan = without_temporaries(setting)
    assert (plan.chosen.savings, plan.chosen.micro_batches) == ((setting,), 1)
    assert plan.chosen.exact
    assert not any("host" in choice.name for choice in plan.choices)


@pytest.mark.parametrize("setting", SETTINGS)
def test_lines_and_steps_of_a_plan_have_an_optimizer_without_temporaries(setting):
    net, plan = without_temporaries(setting)
    (line,) = [line for line in plan.lines if line.startswith("optimizer = ")]
    assert line.endswith(f"{setting})")
    with simulate(1, plan.capacity[0]) as cluster:
        names = {"module": net, "criterion": nn.MSELoss(), "inputs": ROWS, "targets": ROWS}
        exec("\n".join(plan.lines), names)
        cluster.reset_peak()
        names["step"](ROWS, ROWS)
        assert cluster.peak[0] == pytest.approx(plan.chosen.allocated[0], rel=0.02)
    with simulate(1, plan.capacity[0]):
        make = WITHOUT_TEMPORARIES[setting]
        settings = {"optimizer": getattr(make, "func", make), "lr": 0.01}
        *_, step = plan.apply(squares(), nn.MSELoss(), **settings)
        assert all(step(ROWS, ROWS).isfinite() for _ in range(2))


def test_a_plan_says_what_is_left_and_first_if_that_is_little():
    plenty = planned("1GiB", 2, 24)
    reserved = max(plenty.chosen.reserved)
    used = f"12 rows per device in 1 micro-batch, {format_bytes(reserved)} of "
    assert plenty.verdict == f"fits: yes, {used}1.00 GiB, {format_bytes(2**30 - reserved)} left"
    tight = dataclasses.replace(plenty, capacity=(reserved + 1024,) * 2)
    assert tight.verdict.startswith(f"fits: yes, with only 1.00 KiB left, {used}")
