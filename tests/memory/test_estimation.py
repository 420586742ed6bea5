"""``memory.estimate``: peaks of the CPU's allocator."""

import functools

import pytest
import torch
from helpers.allocations import assert_equals_the_allocator
from helpers.memory_problems import PROBLEMS, estimated
from helpers.slow import slow_but
from torch import nn
from torch.nn import functional as F

from balanced_parallel import DataParallelCriterion, DataParallelModel, memory, simulate
from balanced_parallel.memory.report import PARTS

READING_STEP_COUNTS = ["NAdam", "RAdam", "Adafactor", "Adagrad", "Adadelta", "Adamax", "RMSprop"]
CASES = {
    "perceptron, checkpointed": {"checkpoint": True},
    "perceptron": {},
    "language model": {},
    "language model, checkpointed": {"checkpoint": True},
    "language model, accumulated": {
        "micro_batch_size": 8,
        "optimizer": functools.partial(torch.optim.SGD, momentum=0.9),
    },
} | {
    f"perceptron, {name}": {"optimizer": getattr(torch.optim, name)} for name in READING_STEP_COUNTS
}
BY_DEFAULT = [
    "perceptron, checkpointed",
    "language model, accumulated",
    "perceptron, NAdam",
    "perceptron, Adafactor",
]


@pytest.mark.parametrize("name", slow_but(list(CASES), *BY_DEFAULT))
@pytest.mark.usefixtures("one_trace")
def test_peak_equals_the_allocator(name):
    build, batch = PROBLEMS[name.partition(",")[0]]
    report = assert_equals_the_allocator(build, lambda: batch(24), **CASES[name])
    assert sum(report.parts[0].values()) == report.allocated[0] == report.reserved[0]
    assert set(report.parts[0]) == set(PARTS)
    assert report.rows * report.micro_batches == 24


@pytest.mark.usefixtures("one_trace")
def test_estimate_does_not_change_the_module_or_random_state():
    build, batch = PROBLEMS["convolutions"]
    net = build()
    inputs, targets = batch(6)
    before = {name: (value.data_ptr(), value._version) for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    memory.estimate(
        net, nn.CrossEntropyLoss(), inputs, targets, layout="replicas", devices=2, precision="bf16"
    )
    assert {
        name: (value.data_ptr(), value._version) for name, value in net.state_dict().items()
    } == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert "to" not in net.__dict__


@pytest.mark.usefixtures("one_trace")
def test_meta_and_fake_tensors_give_the_estimate_of_real_tensors():
    build, batch = PROBLEMS["convolutions"]
    expected = estimated("convolutions").allocated
    with torch.device("meta"):
        net = build()
    meta = [tensor.to("meta") for tensor in batch(6)]
    assert memory.estimate(net, F.cross_entropy, *meta).allocated == expected
    with torch._subclasses.FakeTensorMode():
        fake = batch(6)
    assert memory.estimate(build(), F.cross_entropy, *fake).allocated == expected
    assert memory.estimate(net, F.cross_entropy, {"input": meta[0]}, meta[1]).allocated == expected


def dice(scores, targets):
    weights = scores.softmax(1)[:, 0]
    return 1 - 2 * (weights * targets).sum() / (weights + targets).sum()


def with_dropout():
    """Returns a module whose dropout makes the peak of a forward in training mode."""
    return nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.5), nn.Linear(512, 10))


CRITERIA = {"coupled": DataParallelCriterion(dice, whole=True)}


def evaluated(build, criterion, inputs, targets, devices, precision):
    """Returns the peaks of simulated devices in the second of two forwards without a graph."""
    with simulate(devices) as cluster:
        # Sums of bits take 25 MiB before a forward at most, which estimates leave out.
        settings = {"device_ids": list(range(devices)), "precision": precision, "refresh": "always"}
        model = DataParallelModel(build().to("sim:0"), **settings).eval()
        if not isinstance(criterion, DataParallelCriterion):
            criterion = DataParallelCriterion(criterion, precision=precision)
        with torch.no_grad():
            for _ in range(2):
                cluster.reset_peak()
                criterion(model(inputs), targets)
        return tuple(cluster.peak)


@pytest.mark.parametrize(
    ("problem", "precision", "rows", "devices"),
    slow_but(
        [
            ("dropout", "fp32", 24, 1),
            ("language model", "bf16", 25, 3),
            ("convolutions", "fp32", 2, 3),
            ("perceptron", "bf16", 24, 1),
            ("coupled", "fp32", 24, 2),
        ],
        ("dropout", "fp32", 24, 1),
        ("language model", "bf16", 25, 3),
    ),
)
@pytest.mark.usefixtures("one_trace")
def test_an_evaluation_is_the_forward_without_a_graph(problem, precision, rows, devices):
    """To the byte on simulated devices: without dropout, gradients and an optimizer, with logits and the loss."""
    build, batch = PROBLEMS.get(problem, PROBLEMS["perceptron"])
    build = with_dropout if problem == "dropout" else build
    criterion = CRITERIA.get(problem, F.cross_entropy)
    settings = {
        "mode": "evaluate",
        "layout": "replicas",
        "devices": devices,
        "precision": precision,
        "device_kind": "sim",
    }
    report = memory.estimate(build(), criterion, *batch(rows), **settings)
    assert report.allocated == evaluated(build, criterion, *batch(rows), devices, precision)
    for parts in report.parts:
        used = {name for name, size in parts.items() if size}
        assert used <= {"parameters", "temporaries", "inputs", "rounding"}
    assert report.parts[0]["parameters"] >= sum(each.nbytes for each in build().parameters())


BAD = {
    "mode='eval', expected one of train, evaluate": {"mode": "eval"},
    "mode='evaluate' has no gradients, expected": {
        "mode": "evaluate",
        "balanced_optimizer": True,
        "layout": "ddp",
    },
    "layout='dp', expected one of": {"layout": "dp"},
    "device_kind='h900', expected one of": {"device_kind": "h900"},
    "precision='fp8'": {"precision": "fp8"},
    "devices=0": {"devices": 0},
    "devices=2 with layout='single'": {"devices": 2},
    "balanced_optimizer=True with layout='single'": {"balanced_optimizer": True},
    "micro_batch_size=-1": {"micro_batch_size": -1},
    "whole_gradients=True with layout='ddp', expected layout='fsdp'": {
        "whole_gradients": True,
        "layout": "ddp",
    },
    "savings has 'nothing', expected functions of balanced_parallel.savings: offload_opt": {
        "savings": ["nothing"]
    },
}


@pytest.mark.parametrize("said", BAD)
def test_invalid_settings_of_estimate_raise_an_error(said):
    with pytest.raises(ValueError, match=said):
        estimated("convolutions", **BAD[said])


def test_errors_of_the_module_are_raised():
    build, batch = PROBLEMS["perceptron"]
    with pytest.raises(RuntimeError, match="reduction dim"):
        memory.estimate(build(), F.cross_entropy, torch.zeros(6, 63), batch(6)[1])
    with pytest.raises(ValueError, match="no rows"):
        memory.estimate(build(), F.cross_entropy, torch.zeros(()), batch(6)[1])
    with pytest.raises(ValueError, match="rows="):
        estimated("perceptron").at(0)
