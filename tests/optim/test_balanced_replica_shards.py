"""Shards of parameters: checkpoints, changes between steps, shared parameters, copies.

Gradients of sharded parameters: read, written, clipped, changed by hooks.

Equal shards of parameters.
"""

import copy
import gc
import io
import pickle

import pytest
import torch
from helpers.optimizers import (
    assert_same,
    assert_same_state,
    balanced_or_plain,
    batches,
    plain,
    sgd,
    train,
    train_plain,
)
from helpers.problems import CLASSES, assert_equal, build_net, gradients
from helpers.slow import pairs
from helpers.updates import Unrecorded, assert_same_on_devices, random_batches, values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    Precision,
    TrainStep,
    gather,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double", "buckets")


def layout(name, net):
    """A net's optimizer, and a function that trains it for two steps on."""
    if name == "plain":
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        return optimizer, lambda: train_plain(net, optimizer)
    model = DataParallelModel(net, list(range({"one": 1, "three": 3, "four": 4}[name.split()[0]])))
    optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
    return optimizer, lambda: train(model, optimizer, 2)


MOVES = [("plain", "three devices"), ("three devices", "plain"), ("three devices", "four devices")]


@pytest.mark.parametrize(("first", "second"), MOVES)
def test_checkpoint_moves_between_numbers_of_devices(first, second):
    start = build_net()
    expected, reference = plain(
        start, lambda net: torch.optim.Adam(net.parameters(), lr=0.1), steps=2
    )
    train_plain(expected, reference)
    file = io.BytesIO()
    with simulate(4):
        net = copy.deepcopy(start)
        optimizer, go_on = layout(first, net)
        go_on()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        del optimizer, go_on
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    with simulate(4):
        net = build_net()
        optimizer, go_on = layout(second, net)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        go_on()
        assert_same(net, expected)
        state = torch.utils._pytree.tree_map_only(
            torch.Tensor, torch.Tensor.cpu, optimizer.state_dict()
        )
        assert_same_state(state, reference.state_dict())


def test_parameters_changed_between_steps_keep_their_values():
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        train(model, optimizer, 1)
        changes = {
            3: lambda p: p.data.mul_(0).add_(3),
            4: lambda p: setattr(p, "data", torch.full_like(p, 4)),
        }
        for value, change in changes.items():
            optimizer.zero_grad()
            change(net[0].weight)
            with torch.no_grad():
                net[0].bias.fill_(2)
            optimizer.step()  # no gradients: nothing else changes
            assert net[0].weight.eq(value).all()
            assert net[0].bias.eq(2).all()
            train(model, optimizer, 1)
            expected = copy.deepcopy(net).cpu()
            train(model, optimizer, 2)
            reference = sgd(expected, lr=1.0)
            train_plain(expected, reference)
            assert_same(net, expected)


def test_replaced_parameters_raise_an_error():
    with simulate(2):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        for other in (model, DataParallelModel(net)):
            with pytest.raises(
                ValueError, match="parameters of the module have a BalancedOptimizer already"
            ):
                BalancedOptimizer(other, torch.optim.SGD, lr=1.0)
        net[1].note = "an attribute is not a parameter"
        train(model, optimizer, 1)
        net[0].bias = nn.Parameter(torch.zeros(6, device="sim:0"))
        for _ in range(2):
            with pytest.raises(
                RuntimeError,
                match="other parameters than when its BalancedOptimizer was made.*make a new one",
            ):
                train(model, optimizer, 1)
        del optimizer
        gc.collect()
        train(model, BalancedOptimizer(model, torch.optim.SGD, lr=1.0), 1)


def test_after_the_optimizer_is_deleted_gradients_go_to_the_parameters():
    net = build_net()
    expected, reference = plain(net, lambda net: sgd(net), 1)
    train_plain(expected, reference, 1)
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        train(model, optimizer, 1)
        copied = copy.deepcopy(model)
        del optimizer
        gc.collect()
        for module in (copied, net):
            assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
        train(model, sgd(net), 1)
        assert_same(net, expected)


class SharedHead(nn.Module):
    def __init__(self, weight, names=("weight", "own")):
        super().__init__()
        parameters = {
            "weight": weight,
            "own": nn.Parameter(torch.full((CLASSES,), 0.3, device=weight.device)),
        }
        for name in names:
            self.register_parameter(name, parameters[name])

    def forward(self, x, y):
        return ((x @ self.weight) @ self.weight.T * self.own - y).square().mean()


ORDERS = [("weight", "own"), ("own", "weight")]
WAYS = ["plain loop", "whole", "micro-batches", "fused"]


@pytest.mark.parametrize(("how", "balanced", "names"), pairs(WAYS, [False, True], ORDERS))
def test_parameter_shared_by_model_and_criterion_equals_the_plain_program(how, balanced, names):
    def trained(devices):
        net = build_net().to(devices[0])
        head = SharedHead(net[2].weight, names)
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        parameters = [*net.parameters(), head.own]
        settings = {"lr": 0.05, "fused": how == "fused" and devices[0] == "cpu"}
        kind = Unrecorded if how == "fused" and len(devices) > 1 else torch.optim.AdamW
        is_sharded = balanced and len(devices) > 1
        optimizer = (
            BalancedOptimizer(model, kind, parameters, **settings)
            if is_sharded
            else kind(parameters, **settings)
        )
        step = TrainStep(
            model, criterion, optimizer, micro_batch_size=2 if how == "micro-batches" else None
        )
        for x, y in random_batches(6):
            if how in ("plain loop", "fused"):
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
            else:
                step(x, y)
        return values_of(net, head)

    assert_same_on_devices(trained)


READS = {
    "nothing": lambda optimizer, weight: None,
    "param_groups": lambda optimizer, weight: optimizer.param_groups,
    "gradient": lambda optimizer, weight: (
        optimizer.gradient(weight) if isinstance(optimizer, BalancedOptimizer) else weight.grad
    ),
    "zeroed": lambda optimizer, weight: (
        optimizer.zero_grad()
    ),  # It is refused between add() and apply().
}


READ = [
    ("no_sync of the model", "nothing"),
    ("no_sync of the model", "zeroed"),
    ("no_sync of two models", "gradient"),
    ("train step", "param_groups"),
    ("train step", "gradient"),
]


@pytest.mark.parametrize(("how", "read"), READ)
def test_gradients_of_a_shared_parameter_that_wait_elsewhere_are_not_lost(how, read):
    """The optimizer takes ``grad`` of a parameter away, for which the gradients of other replicas may wait."""

    def trained(devices):
        net = build_net().to(devices[0])
        head = SharedHead(net[2].weight)
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        other = DataParallelModel(net, devices[::2])
        kind = torch.optim.SGD
        parameters = [*net.parameters(), head.own]
        optimizer = (
            kind(parameters, 0.05)
            if len(devices) == 1
            else BalancedOptimizer(model, kind, parameters, lr=0.05)
        )
        step = TrainStep(model, criterion, optimizer)

        def backward(x, y):
            loss = criterion(model(x), y)
            loss = (
                loss + gather(other(x + 1)).square().mean().to(loss.device)
                if how == "no_sync of two models"
                else loss
            )
            loss.backward()

        for _ in range(3):
            batches = list(random_batches(3))
            for x, y in batches[:2]:
                if how == "train step":
                    step.add(x, y)
                else:
                    with model.no_sync(), other.no_sync():
                        backward(x, y)
                READS[read](optimizer, net[2].weight)
            if how == "train step":
                step.add(*batches[2])
                step.apply()
            else:
                backward(*batches[2])
                optimizer.step()
                optimizer.zero_grad()
        return values_of(net, head)

    assert_same_on_devices(trained)


def test_gradients_that_were_read_between_micro_batches_are_scaled_in_float16():
    """Gradients that the owners have taken between two micro-batches have the divisor and the scale of the others."""

    def trained(devices, precision):
        net = build_net().float().to(devices[0])
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = balanced_or_plain(model, torch.optim.SGD, len(devices) > 1)
        scaler = (
            None if precision == "fp32" else torch.amp.GradScaler("sim", init_scale=2.0**8)
        )  # Nothing overflows.
        step = TrainStep(model, criterion, optimizer, precision=Precision(precision, scaler))
        generator = torch.Generator().manual_seed(0)
        for rows in (3, 9, 30, 90):
            x = torch.randn(rows, 4, generator=generator, dtype=torch.float32)
            step.add(x, torch.randint(CLASSES, (rows,), generator=generator))
            assert optimizer.param_groups
        step.apply()
        return values_of(net)

    expected = trained(["cpu"], "fp32")
    with simulate(2):
        assert_close(list(trained(["sim:0", "sim:1"], "fp16")), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Unrecorded])
def test_two_models_of_one_module_equal_the_plain_program(kind):
    def trained(net, first, second, optimizer):
        first(torch.randn(4, 4))
        for x, y in random_batches(6):
            optimizer.zero_grad()
            (
                (gather([first(x)], "cpu") - y) * gather([second(x + 1)], "cpu")
            ).square().mean().backward()
            optimizer.step()
        return values_of(net)

    net = build_net()
    expected = trained(net, net, net, torch.optim.AdamW(net.parameters(), 0.05))
    with simulate(3):
        net = build_net()
        first, second = (
            DataParallelModel(net, devices, gather_outputs=True) for devices in ([0, 1, 2], [0, 2])
        )
        assert_equal(trained(net, first, second, BalancedOptimizer(first, kind, lr=0.05)), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_raise_an_error(copied):
    model = DataParallelModel(build_net(), ["cpu"] * 2)
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.05)
    with pytest.raises(TypeError, match=r"expected its state_dict\(\): copy the model, and load"):
        copied((model, optimizer) if copied is not copy.copy else optimizer)


def test_a_converted_submodule_raises_an_error_with_a_fix():
    with simulate(2):
        model = DataParallelModel(build_net(), [0, 1])
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        x = torch.randn(5, 4)
        gather(model(x)).sum().backward()
        optimizer.step()
        model.module.float()
        for use in (lambda: model(x.float()), optimizer.step, lambda: model(x.float())):
            with pytest.raises(RuntimeError, match=r"converted or unfrozen\): make a new one"):
                use()


def test_gradients_can_be_read_and_cleared():
    net = build_net()
    x, target = next(batches(1))
    nn.functional.cross_entropy(net(x), target).backward()
    expected = gradients(net)
    net.zero_grad()
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        assert optimizer.gradient(net[0].weight) is None
        criterion(model(x), target).backward()
        for _ in range(2):
            assert_equal(gradients(net, optimizer=optimizer), expected)
        optimizer.zero_grad()
        assert all(optimizer.gradient(parameter) is None for parameter in net.parameters())
        with model.no_sync():
            criterion(model(x), target).backward()
        optimizer.zero_grad()
        before = values_of(net)
        optimizer.step()
        assert_equal(values_of(net), before)


def test_autograd_grad_returns_whole_gradients():
    net = build_net()
    x, _ = next(batches(1))
    expected = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        found = torch.autograd.grad(gather(model(x)).pow(2).sum(), list(net.parameters()))
        assert_close([one.cpu() for one in found], expected)
        assert model.replicas.gradients.is_sharded
        assert all(
            parameter.grad is None
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


def test_shards_of_a_large_parameter_have_equal_bytes():
    with simulate(4) as cluster:
        net = nn.Sequential(nn.Linear(64, 1000), nn.Linear(1000, 10)).float()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        for _ in range(2):
            gather(model(torch.ones(8, 64, dtype=torch.float32))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        assert max(cluster.live) <= 1.02 * sum(cluster.live) / 4
