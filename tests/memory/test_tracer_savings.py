"""Savings in estimates and plans: simulated devices measure the bytes that were predicted."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from helpers.memory_problems import peak_of_updates
from helpers.optimizers import sgd
from helpers.releases import released_at_once
from helpers.slow import slow
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    memory,
    savings,
    simulate,
)
from balanced_parallel.memory import MemoryPlan
from balanced_parallel.memory.candidates import Option
from balanced_parallel.memory.estimation import make_request
from balanced_parallel.memory.problem import Problem
from balanced_parallel.memory.trace.tracer import run_traces


def build():
    """Layers whose activations keep their input, unless they are in place."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Linear(128, 256), nn.LeakyReLU(), nn.Linear(256, 128), nn.LeakyReLU())
    ]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def batch(rows):
    torch.manual_seed(1)
    return torch.randn(rows, 128), torch.randint(10, (rows,))


def make_step(net, loss, **settings):
    model = DataParallelModel(net)
    return TrainStep(model, DataParallelCriterion(loss, **settings), sgd(model))


@functools.cache
def measure(names, devices, rows):
    with simulate(devices) as cluster:
        net = build()
        if "checkpoint_activations" in names:
            savings.checkpoint_activations(net)
        step = make_step(net, nn.CrossEntropyLoss())
        with (
            savings.offload_activations()
            if "offload_activations" in names
            else contextlib.nullcontext()
        ):
            return max(peak_of_updates(cluster, step, *batch(rows)))


@functools.cache
def predict(names, devices, rows):
    settings = {
        "optimizer": torch.optim.SGD,
        "layout": "replicas",
        "devices": devices,
        "device_kind": "sim",
    }
    return max(
        memory.estimate(
            build(), nn.CrossEntropyLoss(), *batch(rows), savings=names, **settings
        ).allocated
    )


NAMES = "checkpoint_activations", "offload_activations"


@released_at_once
@pytest.mark.parametrize(("names", "devices"), [(NAMES, 2), slow(NAMES[:1], 1), slow(NAMES[1:], 2)])
@pytest.mark.usefixtures("one_trace")
def test_saved_bytes_are_predicted(names, devices):
    rows = 4096 if "offload_activations" in names else 1024  # tensors below 1 MiB are not offloaded
    found = predict(names, devices, rows)
    expected = measure(names, devices, rows)
    assert found == pytest.approx(expected, rel=0.02)
    plain = predict((), devices, rows)
    measured = measure((), devices, rows)
    assert plain - found == pytest.approx(measured - expected, rel=0.02)
    assert found < 0.8 * plain


def language_model():
    """Logits of 4,096 words are larger than all else."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 4096}
    config = transformers.GPT2Config(
        **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def own_loss(output, labels):
    return output.loss


@pytest.mark.usefixtures("one_trace")
def test_a_head_without_logits_is_predicted():
    peaks = []
    labels = torch.ones(8, 64, dtype=torch.int64)
    batch = {"input_ids": labels, "labels": labels}
    settings = {"optimizer": torch.optim.SGD, "device_kind": "sim", "keeps_gradients": False}
    for names in ((), ("replace_lm_head",)):
        report = memory.estimate(
            language_model(), own_loss, batch, labels, savings=names, **settings
        )
        with simulate(1) as cluster:
            net = language_model()
            if names:
                savings.replace_lm_head(net)
            peaks += peak_of_updates(
                cluster, make_step(net, own_loss, weight="rows"), batch, labels
            )
        assert report.allocated[0] == pytest.approx(peaks[-1], rel=0.02)
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.slow
def test_a_plan_leaves_logits_out_where_less_does_not_fit():
    labels = torch.ones(4, 64, dtype=torch.int64)
    settings = {
        "batch_size": 1,
        "capacity": "3MiB",
        "optimizer": torch.optim.SGD,
        "device_kind": "sim",
    }
    plan = memory.plan(
        language_model(), own_loss, {"input_ids": labels, "labels": labels}, labels, **settings
    )
    assert plan.chosen.name == "loss without logits"
    assert plan.chosen.exact
    assert plan.chosen.recomputed == 0
    assert MemoryPlan.from_json(plan.to_json()) == plan
    with simulate(1, plan.capacity[0]):
        settings_of_step = {"optimizer": torch.optim.SGD, "weight": "rows", "lr": 0.1}
        *_, step = plan.apply(language_model(), own_loss, **settings_of_step)
        assert step({"input_ids": labels[:1], "labels": labels[:1]}, labels[:1]).isfinite()
    settings["capacity"] = "1GiB"
    plan = memory.plan(
        language_model(), own_loss, {"input_ids": labels, "labels": labels}, labels, **settings
    )
    assert plan.chosen.name == "replicas"


NET = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("devices", [1, slow(2)])
def test_nothing_is_offloaded_from_a_cpu(devices):
    settings = {"layout": "replicas", "devices": devices, "device_kind": "cpu"}
    estimates = [
        memory.estimate(
            NET,
            nn.MSELoss(),
            torch.zeros(512, 1024),
            torch.zeros(512, 8),
            savings=names,
            **settings,
        ).allocated
        for names in ((), "offload_activations", "offload_optimizer")
    ]
    assert estimates[1:] == estimates[:1] * 2


def sequences(rows):
    """Rows of 4,096 positions, of which two do not fit."""
    torch.manual_seed(1)
    return torch.randn(rows, 4096, 128), torch.randn(rows, 4096, 10)


@pytest.mark.slow
def test_plans_offload_where_less_does_not_fit():
    capacity = "30MiB"
    settings = {
        "batch_size": 2,
        "optimizer": torch.optim.SGD,
        "device_kind": "sim",
        "capacity": capacity,
    }
    plan = memory.plan(build(), nn.MSELoss(), *sequences(2), **settings)
    assert plan.chosen.name == "offloaded activations"
    assert plan.chosen.exact
    assert plan.choices[1].name == "replicas"
    assert MemoryPlan.from_json(plan.to_json()) == plan
    with simulate(1, capacity) as cluster:
        *_, step = plan.apply(build(), nn.MSELoss(), optimizer=torch.optim.SGD, lr=0.1)
        for _ in range(2):
            cluster.reset_peak()
            before = cluster.moved
            step(*sequences(2))
        assert max(cluster.peak) == pytest.approx(plan.chosen.allocated[0], rel=0.02)
        moved = cluster.moved["sim:0", "cpu"] - before["sim:0", "cpu"]
        assert "surround: Savings.around_update" in repr(step)
        assert 2 * moved == pytest.approx(plan.chosen.host_traffic, rel=0.02)


def test_what_a_plan_offloads_is_the_same_for_all_rows_of_its_traces():
    """Two rows of the feature map have less than the least bytes of a copy, four have more."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 3, padding=1))
    images = torch.zeros(4, 3, 96, 96)
    request = make_request(
        Problem(net, nn.MSELoss(), images, images),
        layout="replicas",
        device_kind="h200",
        savings=["offload_activations"],
    )
    lines = Option((), request, (2**40,), 64).lines(2)
    assert lines.is_affine


@pytest.mark.parametrize(("most", "chunk"), [(None, 256), (100, 100), (300, 256)])
def test_a_chunk_has_no_more_rows_than_the_largest_batch(most, chunk):
    hidden = torch.zeros(4, 8, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    problem = Problem(nn.Identity(), savings.LinearCrossEntropy(8, 600), hidden, target)
    request = make_request(problem, device_kind="sim")
    for trace in run_traces(
        [(dataclasses.replace(request, update_rows=most), rows) for rows in (2, 50)]
    ):
        assert (
            max(block.size for block in trace.blocks if block.operator.startswith("aten.new_empty"))
            == chunk * 600 * 4
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"layout": "replicas", "balanced_optimizer": True}, "is an object of type BalancedOptimi"),
        ({"layout": "fsdp"}, "the parameters are shards of FSDP2"),
    ],
)
def test_an_optimizer_that_cannot_be_offloaded_is_an_error(settings, expected):
    batch = torch.zeros(4, 4), torch.zeros(4, 4)
    settings |= {"devices": 2, "device_kind": "sim", "savings": "offload_optimizer"}
    with pytest.raises(TypeError, match=expected):
        memory.estimate(nn.Linear(4, 4), nn.MSELoss(), *batch, **settings)
