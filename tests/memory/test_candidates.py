"""The search of a plan: layouts over devices and hosts, options that cannot be traced, lines that run, one page of text."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.slow import slow
from torch import nn

from balanced_parallel import memory
from balanced_parallel.memory import candidates
from balanced_parallel.memory import savings as savings_of_plans
from balanced_parallel.memory.estimation import make_request
from balanced_parallel.memory.problem import Problem
from balanced_parallel.memory.trace.stacks import find_repeated
from balanced_parallel.runtime.values import format_bytes
from balanced_parallel.savings.saving import BF16_PARAMETERS

WIDTH = 64


class Wide(nn.Module):
    """Four blocks, whose parameters and their state are most of the memory."""

    def __init__(self, factor=4, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, factor * WIDTH), nn.GELU(), nn.Linear(factor * WIDTH, WIDTH)
            )
            for _ in range(blocks)
        )

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class NeverCheckpointed(Wide):
    """A stack that reads a value if its blocks are checkpointed, which no trace knows."""

    def forward(self, hidden):
        if any(hasattr(layer, "made_from") for layer in self.layers):
            raise NotImplementedError("this block\nis not for checkpoints")
        return super().forward(hidden)


def batch(rows):
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


STATE = 16 * sum(
    parameter.numel() for parameter in Wide().parameters()
)  # parameters, gradients and AdamW's state


@functools.cache
def planned(capacity, **settings):
    optimizer = functools.partial(torch.optim.AdamW, betas=(0.9, 0.99))
    settings = {
        "batch_size": 64,
        "devices": 2,
        "device_kind": "sim",
        "optimizer": optimizer,
    } | settings
    return memory.plan(Wide(), nn.MSELoss(), *batch(4), capacity=capacity, **settings)


def run_lines(lines, rows):
    """Runs the lines of a plan. Returns the loss and the step."""
    names = {"module": Wide(), "criterion": nn.MSELoss(), "inputs": rows[0], "targets": rows[1]}
    exec("\n".join(lines), names)
    return names["loss"].item(), names["step"]


def plain_loss(rows):
    inputs, targets = batch(rows)
    return nn.functional.mse_loss(Wide()(inputs), targets).item()


@pytest.mark.slow
def test_fsdp_is_chosen_where_replicas_do_not_fit():
    plan = planned(int(0.75 * STATE))
    assert plan.chosen.layout == "fsdp"
    assert plan.chosen.exact
    assert max(plan.chosen.reserved) <= plan.capacity[0]
    assert {choice.layout for choice in plan.choices if choice.fits} == {"fsdp"}
    with pytest.raises(
        ValueError, match="strategy='fsdp' in one process, expected 'auto' or 'replicas'"
    ):
        plan.apply(Wide(), nn.MSELoss())


def run_on_rank(rank, lines, plan_text):
    inputs, targets = batch(64)
    share = slice(32 * rank, 32 * rank + 32)
    loss, step = run_lines(lines, (inputs[share], targets[share]))
    plan = memory.MemoryPlan.from_json(plan_text)
    *_, applied = plan.apply(Wide(), nn.MSELoss(), lr=1e-3)
    again = applied(inputs[share], targets[share]).item()
    return loss, again, step.micro_batch_size, applied.micro_batch_size


@pytest.mark.slow
def test_lines_of_fsdp_run_on_ranks():
    plan = planned(int(0.75 * STATE))
    assert (
        plan.lines[0]
        == "# torchrun --nproc-per-node=2 train.py; every rank passes its own rows, 64 in all"
    )
    for loss, again, *sizes in run_ranks(2, run_on_rank, plan.lines, plan.to_json()):
        assert loss == pytest.approx(plain_loss(64), rel=1e-5)
        assert again == pytest.approx(loss, rel=1e-5)
        assert sizes == [plan.micro_batch_size] * 2


def test_frozen_weights_are_no_traffic_of_an_update():
    """They were counted with each update, and shards with offloading were chosen where replicas fit."""
    net = Wide()
    net.layers[:3].requires_grad_(False)
    frozen, learned = (
        sum(each.nbytes for each in net.parameters() if each.requires_grad == is_learned)
        for is_learned in (False, True)
    )

    def traffic(layout, balanced=False, **changes):
        request = make_request(
            Problem(net, nn.MSELoss(), *batch(4)),
            layout=layout,
            devices=2,
            device_kind="a100",
            balanced_optimizer=balanced,
        )
        option = candidates.Option((), dataclasses.replace(request, **changes), (2**30,) * 2, 4)
        return option.traffic(3) + option.host_traffic_of_optimizer

    assert traffic("replicas") == traffic("ddp") == traffic("replicas", True) == 2 * learned
    assert traffic("replicas", savings=("offload_optimizer",)) == 5 * learned
    gathered = 4 * 3 * (frozen + learned) // 2
    assert traffic("fsdp") == gathered + 2 * 3 * learned // 2
    assert traffic("fsdp", True) == gathered + (2 * 3 + 6) * learned // 2


def test_several_hosts_have_ranks():
    plan = planned("1GiB", hosts=2)
    assert plan.devices == 4
    assert {choice.layout for choice in plan.choices} == {"ddp"}
    assert "64 rows per update on 2 hosts of 2 x sim" in str(plan)
    assert "--nnodes=2 --nproc-per-node=2" in plan.lines[0]
    assert 'strategy="ddp"' in "".join(plan.lines)
    assert plan.chosen.micro_batch_size == 16


@pytest.mark.slow
def test_hosts_share_the_shards_where_one_has_no_room_for_the_model():
    assert planned(int(0.5 * STATE), hosts=2).chosen.layout == "fsdp"


@pytest.mark.slow
def test_an_option_that_cannot_be_traced_is_skipped_and_named():
    settings = {"batch_size": 64, "device_kind": "sim"}
    net = NeverCheckpointed(factor=16, blocks=2)
    needs = memory.plan(net, nn.MSELoss(), *batch(4), capacity="1KiB", **settings).needs[0]
    plan = memory.plan(
        net, nn.MSELoss(), *batch(4), capacity=needs + 2**16, precision="bf16", **settings
    )
    reasons = dict(plan.skipped)
    name = "optimizer on the host, fused optimizer, checkpointed blocks"
    assert reasons[name] == "NotImplementedError: this block"
    assert f"skipped: {name}: NotImplementedError: this block" in " ".join(str(plan).split())
    assert plan.choices
    with pytest.raises(
        ValueError, match=r"replicas: RuntimeError: .*; a plan needs a module, a criterion and an "
    ):
        memory.plan(nn.Linear(3, 3), nn.MSELoss(), *batch(4), capacity="1GiB", **settings)


ON_A10 = {"device_kind": "a10", "batch_size": 20000}


@pytest.mark.parametrize(
    ("capacity", "settings"),
    [
        ("1GiB", {}),
        slow(int(0.75 * STATE), {}),
        slow("64KiB", {}),
        slow(int(0.8 * STATE) + 2**30, ON_A10),
    ],
)
def test_the_text_has_at_most_100_columns_and_begins_with_the_verdict(capacity, settings):
    plan = planned(capacity, **settings)
    assert all(max(choice.reserved) <= plan.capacity[0] for choice in plan.choices if choice.fits)
    for text in (str(plan), plan.describe(verbose=True)):
        first, _, second, *_ = text.splitlines()
        assert max(map(len, text.splitlines())) <= 100
        if plan.fits:
            assert (
                first.startswith(
                    f"fits: yes, {plan.batch_size // 2} rows per device in 1 micro-batch, "
                )
                or "micro-batches" in first
            )
            assert second.strip() == plan.lines[0]
        else:
            assert first.startswith("does not fit: needs ")
            assert "nearest that does: " in first
    assert ("not tried" in plan.describe(verbose=True)) == bool(plan.untried)
    assert "not tried" not in str(plan)


def test_options_without_a_chance_are_not_traced():
    """An option that fits at once gets no checkpoints; large tensors leave no room for an update."""
    problem = Problem(Wide(), nn.MSELoss(), *batch(4))
    request = make_request(problem, layout="replicas", devices=2, device_kind="a100")
    costly, spread = savings_of_plans.OFFLOADED, savings_of_plans.SPREAD
    search = candidates.Search(request, [2**30] * 2, 64)
    plain, offloaded, balanced = search._make([(), (costly,), (spread, costly)])
    assert search._has_a_chance(offloaded)
    search.choices[plain] = SimpleNamespace(micro_batches=1)
    assert not search._has_a_chance(offloaded)
    assert search._has_a_chance(balanced)
    small = candidates.Search(request, [STATE] * 2, 64)
    first, last = small._make([(), (savings_of_plans.SHARDS,)])
    assert not small._has_a_chance(first)
    assert small._has_a_chance(last)
    assert "optimizer state take" in small.skipped["replicas"]
    alone = dataclasses.replace(request, devices=1)
    one = candidates.Search(alone, [2 * STATE], 64)
    assert not one._has_a_chance(*one._make([()]))  # The context of an A100 needs some.


def test_parameters_in_bf16_take_half_the_bytes():
    """They counted as float32: options that fit were left out, and the traffic was twice as large."""
    request = make_request(
        Problem(Wide(), nn.MSELoss(), *batch(4)),
        layout="fsdp",
        devices=2,
        device_kind="a100",
        precision="bf16",
    )
    halves = dataclasses.replace(request, savings=(BF16_PARAMETERS.name,))
    plain, half = (candidates.Option((), each, (2**30,) * 2, 4) for each in (request, halves))
    assert [plain.held, half.held] == pytest.approx([STATE / 2, STATE / 4], rel=1e-3)
    assert half.gradients == plain.gradients // 2
    assert plain.traffic(1) - half.traffic(1) == half.gradients


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("layout", ["replicas", "fsdp"])
def test_traces_of_several_micro_batches_bound_one(layout, optimizer):
    """Plans leave out traces of a batch at once that would not fit, and must not leave out others."""
    request = make_request(
        Problem(Wide(), nn.MSELoss(), *batch(4)),
        layout=layout,
        devices=2,
        device_kind="a100",
        optimizer=optimizer,
    )
    option = candidates.Option((), request, (2**30,) * 2, 4)
    for rows in (2, 64):
        least, most = (
            getattr(option.lines(count), name)(0, rows * option.step)
            for count, name in ((2, "at_least_at_once"), (1, "at_least"))
        )
        assert 0.9 * most < least <= most


def test_blocks_with_small_gradients_are_traced_by_few_of_them():
    """All blocks of a model with adapters were traced, and a plan had no verdict within 6 minutes."""
    net = Wide(blocks=8).requires_grad_(False)
    for layer in net.layers:
        layer[0].bias.requires_grad_(True)
    request = make_request(
        Problem(net, nn.MSELoss(), *batch(4)),
        layout="replicas",
        devices=2,
        device_kind="sim",
        balanced_optimizer=True,
    )
    assert find_repeated(request) is None
    exact, few = (candidates.Option((), request, (2**22,) * 2, 4) for _ in range(2))
    assert few.choose(few).fits
    assert few.request.bucket_bytes == 0
    assert few.limits == [limit - 2 * few.gradients for limit in exact.limits]
    assert few.needs() <= exact.needs() <= few.needs() + 2 * few.gradients


@pytest.mark.slow
def test_the_number_of_devices_is_solved_for():
    small = functools.partial(planned, int(0.2 * STATE), precision="fp16")
    plan = small()
    count = plan.needs[1]
    assert (
        f"does not fit: needs {format_bytes(plan.needs[0])} for one row per device" in plan.verdict
    )
    assert f"nearest that does: {count} devices of" in plan.verdict
    assert small(devices=count, batch_size=count).fits
    assert not small(devices=count - 1, batch_size=count - 1).fits
