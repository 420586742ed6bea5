"""A training step makes the host wait for no device. Simulated devices show each call that would."""

import contextlib
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import (
    CLASSES,
    build_net,
    class_targets,
)
from helpers.slow import slow_but
from helpers.steps import make_step as make_step_of
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    simulate,
    weighted_mean,
)

ROWS = 11


def class_weights():
    return torch.linspace(0.5, 2.0, CLASSES)


def counted(output, target):
    return (target != -100).sum()


def mean_inside(output, target):
    return F.cross_entropy(output, target)


CRITERIA = {
    "a mean inside": lambda: mean_inside,
    "cross entropy": lambda: nn.CrossEntropyLoss(),
    "class weights": lambda: nn.CrossEntropyLoss(class_weights()),
    "class weights of a function": lambda: functools.partial(
        F.cross_entropy, weight=class_weights()
    ),
    "a weight": lambda: DataParallelCriterion(
        lambda output, target: F.cross_entropy(output, target), weight=counted
    ),
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "squares": lambda: DataParallelCriterion(
        lambda output, target: output.pow(2).mean(), weight="rows"
    ),
}


def make_net(norm=False):
    net = build_net()
    if not norm:
        return net
    layers = net[0], nn.BatchNorm1d(6), nn.Dropout(0.3), *net[1:]
    return convert_sync_batchnorm(nn.Sequential(*layers))


def make_step(net, criterion, *, balanced=False, **settings):
    adam = {"kind": torch.optim.AdamW, "lr": 1e-3, "is_balanced": balanced}
    return make_step_of(net, criterion, devices=None, **adam, **settings)


def batch(place):
    inputs = torch.randn(ROWS, 4).pin_memory()
    targets = class_targets(ROWS, ignored=3).pin_memory()
    return (inputs, targets) if place == "host" else (inputs.to("sim:0"), targets.to("sim:0"))


SETTINGS = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 2},
    "added": {"rows": [3, 1, 7]},
    "clipping": {"max_grad_norm": 0.1},
    "balanced": {"balanced": True, "max_grad_norm": 0.1},
    "norm": {"norm": True},
    "auto": {"norm": True, "micro_batch_size": "auto"},
    "auto, bf16": {"norm": True, "micro_batch_size": "auto", "precision": "bf16"},
    "bf16": {"precision": "bf16", "micro_batch_size": 2},
    "fp16": {"precision": "fp16", "micro_batch_size": 2},
    "fp16, balanced": {"precision": "fp16", "micro_batch_size": 2, "balanced": True},
}
UPDATES = {"a mean inside": (5, 1)}  # before the waits are counted, and then
WAITS_OF_THE_SCALER = {"fp16": 1, "fp16, balanced": 3}  # one for each device that has gradients


def update(step, inputs, targets, rows):
    """Returns the loss of an update, whose rows come in one call or in several."""
    if len(rows) == 1:
        return step(inputs, targets)
    for part in zip(inputs.split(rows), targets.split(rows), strict=True):
        step.add(*part)
    return step.apply()


WAYS = list(itertools.product(["host", "device"], CRITERIA, SETTINGS))
# each criterion with the targets on the host and on a device, and each of these with all settings of the first criterion
IN_ALL_RUNS = [way for way in WAYS if way[1] == "cross entropy" or way[2] == "micro-batches"]


@pytest.mark.parametrize(("place", "name", "settings"), slow_but(WAYS, *IN_ALL_RUNS))
def test_a_step_waits_only_where_the_caller_reads_its_loss_and_for_the_scaler(
    place, name, settings
):
    with simulate(3) as cluster:
        options = dict(SETTINGS[settings])
        rows = options.pop("rows", [ROWS])
        step = make_step(make_net(options.pop("norm", False)), CRITERIA[name](), **options)
        inputs, targets = batch(place)
        # The criterion moves its weights. Halves are compared in the 1st, 2nd, 4th, 8th, ... computation of the loss.
        first, updates = UPDATES.get(name, (1, 4))
        for _ in range(first):
            step(inputs, targets)
        before = len(cluster.waits)
        # A mean of nothing may be nan: one look at the counts of all replicas.
        reads = name == "a weight" and place == "device"
        of_scaler = WAITS_OF_THE_SCALER.get(settings, 0)
        for _ in range(updates):  # checksums are compared in the windows 2 and 4
            with contextlib.nullcontext() if reads or of_scaler else cluster.forbidding_waits():
                loss = update(step, inputs, targets, rows)
        calls = len(rows) if len(rows) > 1 else 2 if step.micro_batch_size else 1
        waits = [(wait.kind, Path(wait.file).name) for wait in cluster.waits[before:]]
        assert waits.count(("item", "optimizers.py")) == updates * of_scaler
        assert len(waits) == updates * (of_scaler + calls * reads)
        assert loss.item() > 0
        assert cluster.waits[-1].file == __file__


def test_a_criterion_waits_nowhere():
    with simulate(3) as cluster:
        model = DataParallelModel(build_net())
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        squares = DataParallelCriterion(lambda output, values: (output - values).square().mean())
        inputs, targets = batch("host")
        values = torch.rand(ROWS, CLASSES).pin_memory()

        def backward():
            (criterion(model(inputs), targets) + squares(model(inputs), values)).backward()

        for _ in range(2):
            backward()
        with cluster.forbidding_waits():
            backward()


@pytest.mark.parametrize("weights", ["numbers", "tensors on the host", "tensors on devices"])
def test_weighted_mean_waits_once_at_most(weights):
    with simulate(3) as cluster:
        values = zip([1.0, torch.nan, 4.0], cluster.devices, strict=True)
        losses = [torch.full((), value, device=device) for value, device in values]
        counts = [2, 0, 1] if weights == "numbers" else [torch.tensor(count) for count in (2, 0, 1)]
        if weights == "tensors on devices":
            counts = [
                count.to(device) for count, device in zip(counts, cluster.devices, strict=True)
            ]
        before = len(cluster.waits)
        mean = weighted_mean(losses, counts)
        assert len(cluster.waits) - before == (weights == "tensors on devices")
        assert mean.item() == 2
