"""BalancedOptimizer where parameters are shared, copied, saved by hooks, laid out otherwise, or missing."""

import copy
import io
import pickle

import pytest
import torch
from helpers.problems import CLASSES, build_net
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")


def batches(steps, rows=7):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(rows, 4, generator=generator), torch.randn(rows, CLASSES, generator=generator)


def values_of(*modules):
    return [parameter.detach().cpu().clone() for module in modules for parameter in module.parameters()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class SharedHead(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.own = nn.Parameter(torch.full((CLASSES,), 0.3, device=weight.device))

    def forward(self, x, y):
        return ((x @ self.weight) @ self.weight.T * self.own - y).square().mean()


@pytest.mark.parametrize("how", ["plain loop", "whole", "micro-batches", "fused"])
def test_a_parameter_of_model_and_criterion(how):
    def trained(devices):
        net = build_net().to(devices[0])
        head = SharedHead(net[2].weight)
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        parameters = [*net.parameters(), head.own]
        settings = {"lr": 0.05, "fused": how == "fused" and devices[0] == "cpu"}
        if len(devices) == 1:
            optimizer = torch.optim.AdamW(parameters, **settings)
        else:
            optimizer = BalancedOptimizer(model, Unrecorded if how == "fused" else torch.optim.AdamW, parameters, **settings)
        step = TrainStep(model, criterion, optimizer, micro_batch_size=2 if how == "micro-batches" else None)
        for x, y in batches(6):
            if how in ("plain loop", "fused"):
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
            else:
                step(x, y)
        return values_of(net, head)

    expected = trained(["cpu"])
    with simulate(3):
        assert_equal(trained(["sim:0", "sim:1", "sim:2"]), expected)


class Unrecorded(torch.optim.AdamW):
    """Writes as fused kernels do: no version counter moves."""

    def step(self, closure=None):
        with torch.autograd._unsafe_preserve_version_counter(tuple(p for group in self.param_groups for p in group["params"])):
            return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Unrecorded])
def test_two_wrappers_around_one_module(kind):
    def trained(wrap, make):
        net = build_net()
        first, second = wrap(net, [0, 1, 2]), wrap(net, [0, 2])
        first(torch.randn(4, 4))
        optimizer = make(first, net)
        for x, y in batches(6):
            optimizer.zero_grad()
            out = gather(first(x), "cpu") if wrap is DataParallelModel else first(x)
            again = gather(second(x + 1), "cpu") if wrap is DataParallelModel else second(x + 1)
            ((out - y) * again).square().mean().backward()
            optimizer.step()
        return values_of(net)

    expected = trained(lambda net, _: net, lambda _, net: torch.optim.AdamW(net.parameters(), 0.05))
    with simulate(3):
        assert_equal(trained(DataParallelModel, lambda first, net: BalancedOptimizer(first, kind, lr=0.05)), expected)


def test_two_optimizers_for_one_module_are_refused():
    with simulate(3):
        net = build_net()
        first, second = DataParallelModel(net), DataParallelModel(net)
        optimizer = BalancedOptimizer(first, torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="the module's parameters belong to another BalancedOptimizer"):
            BalancedOptimizer(second, torch.optim.SGD, lr=0.1)
        del optimizer


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("devices", [["cpu"] * 2, ["sim:0", "sim:1", "sim:2"]], ids=["cpu", "sim"])
def test_copies_train_on_as_the_original_does(copied, devices):
    def train(model, optimizer, steps):
        for x, y in batches(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(gather(model(x), "cpu"), y).backward()
            optimizer.step()

    with simulate(3):
        model = DataParallelModel(build_net().to(devices[0]), devices)
        groups = [{"params": model.module[0].parameters(), "lr": 0.02}, {"params": model.module[2].parameters()}]
        optimizer = BalancedOptimizer(model, torch.optim.AdamW, groups, lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 3)
        scheduler.step()
        other_model, other = copied((model, optimizer))
        assert [group["lr"] for group in other.param_groups] == [0.01, 0.025]
        train(model, optimizer, 3)
        assert any(not torch.equal(*pair) for pair in zip(values_of(model), values_of(other_model), strict=True))
        train(other_model, other, 3)
        assert_equal(values_of(other_model), values_of(model))


def test_hooks_of_the_state_dict_are_called():
    seen = []
    with simulate(2):
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.1)
        optimizer.register_state_dict_pre_hook(lambda this: seen.append(("saving", this)))
        optimizer.register_state_dict_post_hook(lambda this, state: {**state, "extra": 1})
        optimizer.register_state_dict_post_hook(lambda this, state: seen.append(("saved", this)))
        optimizer.register_load_state_dict_pre_hook(lambda this, state: {k: v for k, v in state.items() if k != "extra"})
        optimizer.register_load_state_dict_pre_hook(lambda this, state: seen.append(("loading", this)))
        optimizer.register_load_state_dict_post_hook(lambda this: seen.append(("loaded", this)))
        state = optimizer.state_dict()
        assert state["extra"] == 1
        optimizer.load_state_dict(state)
        assert state["extra"] == 1
        assert seen == [(word, optimizer) for word in ("saving", "saved", "loading", "loaded")]
        steps = []
        optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
        optimizer.register_step_post_hook(lambda *_: steps.append("after"))
        optimizer.step()
        assert steps == ["before", "after"]


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["sim:0", "sim:1"]], ids=["cpu", "sim"])
def test_nothing_to_train(devices):
    with simulate(2):
        with pytest.raises(ValueError, match="BalancedOptimizer got an empty parameter list"):
            BalancedOptimizer(DataParallelModel(nn.Tanh(), devices), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="BalancedOptimizer got an empty parameter list"):
            BalancedOptimizer(DataParallelModel(build_net().to(devices[0]), devices), torch.optim.SGD, [], lr=0.1)
        frozen = DataParallelModel(build_net().to(devices[0]).requires_grad_(False), devices)
        optimizer = BalancedOptimizer(frozen, torch.optim.SGD, lr=0.1)  # as torch's
        before = values_of(frozen)
        frozen(torch.randn(4, 4))
        optimizer.step()
        assert_equal(values_of(frozen), before)


class RowMajor(torch.autograd.Function):
    """A kernel whose gradients are always laid out row by row."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous(memory_format=torch.contiguous_format)


class Laid(nn.Module):
    """Parameters that are not laid out row by row."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Parameter(torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(CLASSES, 24).T)
        self.gaps = nn.Parameter(torch.randn(CLASSES, CLASSES, 2)[..., 0])

    def forward(self, x):
        x = nn.functional.conv2d(x.view(-1, 2, 4, 4), RowMajor.apply(self.conv)).flatten(1)
        return x @ RowMajor.apply(self.turned) @ RowMajor.apply(self.gaps)


@pytest.mark.parametrize("how", ["plain loop", "deferred", "balanced", "micro-batches"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_gradients_are_laid_out_as_the_parameters_are(how, dtype):
    torch.manual_seed(3)
    x, y = torch.randn(7, 32), torch.randn(7, CLASSES)

    def trained(devices):
        torch.manual_seed(1)
        net = Laid().to(devices[0])
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
        balanced = how == "balanced" and len(devices) > 1
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else torch.optim.SGD(net.parameters(), 0.1)
        if how == "micro-batches":
            precision = "fp16" if dtype is torch.float16 and devices[0] != "cpu" else "fp32"
            TrainStep(model, criterion, optimizer, micro_batch_size=1, precision=precision)(x, y)
        elif how == "deferred" and len(devices) > 1:
            with model.no_sync():
                (criterion(model(x), y) / 2).backward()
            (criterion(model(x), y) / 2).backward()
        else:
            criterion(model(x), y).backward()
        return [parameter.grad for parameter in net.parameters()]

    expected = trained(["cpu"])
    with simulate(3):
        found = trained(["sim:0", "sim:1", "sim:2"])
        for one, other in zip(found, expected, strict=True):
            if dtype is torch.float64:
                torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)
            assert [s for s, n in zip(one.stride(), one.shape, strict=True) if n > 1] == [
                s for s, n in zip(other.stride(), other.shape, strict=True) if n > 1
            ]
