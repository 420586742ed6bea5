"""BalancedOptimizer: the plain optimizer's numbers and checkpoints, with gradients and state spread over the devices."""

import copy
import gc
import io
import itertools

import pytest
import torch
from helpers.problems import BODIES, CLASSES, build_net
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    gather,
    parallelize,
    simulate,
)

ROWS = 11
KINDS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {},
    "Adadelta": {"lr": 1.0},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "ASGD": {},
}

pytestmark = pytest.mark.usefixtures("double", "buckets")


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(ROWS, 4, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def plain(net, make, steps=4, clip=None):
    """The plain program on a copy: the net and its optimizer."""
    net = copy.deepcopy(net)
    optimizer = make(net)
    for x, target in batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), target).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net, optimizer


def assert_same(net, expected, tolerance=1e-10):
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=tolerance, atol=tolerance)


def assert_same_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(found["state"][index][name], value, rtol=1e-10, atol=1e-10)


def train(model, optimizer, steps=4, clip=None):
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    for x, target in batches(steps):
        optimizer.zero_grad()
        criterion(model(x), target).backward()
        if clip:
            clip()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_every_elementwise_optimizer_gives_the_plain_programs_parameters_and_state(kind):
    settings = {"lr": 0.1} | KINDS[kind]
    optimizer_class = getattr(torch.optim, kind)
    net = build_net()
    expected, reference = plain(net, lambda net: optimizer_class(net.parameters(), **settings))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, optimizer_class, **settings)
        train(model, optimizer)
        assert_same(net, expected)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        for parameters in zip(*(model.replicas.copies.by_device.values()), net.parameters(), strict=True):
            assert all(parameter.cpu().equal(parameters[-1].detach().cpu()) for parameter in parameters)


@pytest.mark.parametrize("body", BODIES)
def test_every_kind_of_network(body):
    net = BODIES[body]()
    expected, _ = plain(net, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01))
    with simulate(4):
        model = DataParallelModel(net)
        train(model, BalancedOptimizer(model, torch.optim.AdamW, lr=0.01))
        assert_same(net, expected)


LAYOUTS = ["plain", "one device", "three devices", "four devices"]


def layout(name, net):
    """A net's optimizer, and a function that trains it for two steps on."""
    if name == "plain":
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def go_on():
            for x, target in batches(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), target).backward()
                optimizer.step()

        return optimizer, go_on
    model = DataParallelModel(net, list(range({"one": 1, "three": 3, "four": 4}[name.split()[0]])))
    optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
    return optimizer, lambda: train(model, optimizer, 2)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_a_checkpoint_moves_between_layouts(first, second):
    start = build_net()
    expected, reference = plain(start, lambda net: torch.optim.Adam(net.parameters(), lr=0.1), steps=2)
    for x, target in batches(2):
        reference.zero_grad()
        nn.functional.cross_entropy(expected(x), target).backward()
        reference.step()
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
        state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict())
        assert_same_state(state, reference.state_dict())


CLIPS = {
    "the model's parameters": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "the groups": lambda model, optimizer: nn.utils.clip_grad_norm_(
        [parameter for group in optimizer.param_groups for parameter in group["params"]], 0.1
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping(name):
    net = build_net()
    expected, _ = plain(net, lambda net: torch.optim.SGD(net.parameters(), lr=1.0), clip=0.1)
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        train(model, optimizer, clip=lambda: CLIPS[name](model, optimizer))
        assert_same(net, expected)


def test_the_gradient_of_a_parameter_can_be_read_written_and_cleared():
    net, (x, target) = build_net(), next(batches(1))
    nn.functional.cross_entropy(net(x), target).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        criterion(model(x), target).backward()
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient)
            assert parameter.grad is parameter.grad
        criterion(model(x), target).backward()  # adds up
        torch.testing.assert_close(net[0].weight.grad.cpu(), expected[0] * 2)
        before = net[0].weight.detach().cpu()
        net[0].weight.grad = torch.ones_like(net[0].weight)
        optimizer.step()
        torch.testing.assert_close(net[0].weight.detach().cpu(), before - 1)
        assert not optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
        criterion(model(x), target).backward()
        model.zero_grad()
        before = net[0].weight.detach().cpu()
        optimizer.step()
        assert net[0].weight.cpu().equal(before)


def test_what_does_not_come_through_the_replicas_counts_too():
    """A penalty on the parameters themselves, and a batch so small that the module runs alone."""
    net = build_net()
    expected = copy.deepcopy(net)
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    (x, target) = next(batches(1))

    def penalty(net):
        return sum(parameter.pow(2).sum() for parameter in net.parameters())

    for rows in (ROWS, 1):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(expected(x[:rows]), target[:rows]) + penalty(expected)).backward()
        optimizer.step()
    with simulate(3):
        model = DataParallelModel(net)
        split = DataParallelCriterion(nn.CrossEntropyLoss())
        balanced = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        for rows in (ROWS, 1):
            balanced.zero_grad()
            (split(model(x[:rows]), target[:rows]) + penalty(net)).backward()
            balanced.step()
        assert_same(net, expected)


def test_autograd_grad_still_returns_gradients():
    net, (x, _) = build_net(), next(batches(1))
    expected = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        found = torch.autograd.grad(gather(model(x)).pow(2).sum(), list(net.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
        assert model.replicas.gradients.is_sharded
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])


@pytest.mark.parametrize("balanced", [False, True])
def test_hooks_of_parameters_see_and_change_the_gradients(balanced):
    net = build_net()
    expected = copy.deepcopy(net)
    expected[0].weight.register_hook(lambda gradient: gradient * 2)
    reference = torch.optim.SGD(expected.parameters(), lr=1.0)
    for x, target in batches(2):
        reference.zero_grad()
        nn.functional.cross_entropy(expected(x), target).backward()
        reference.step()
    calls = []
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    net[2].bias.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.shape))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0) if balanced else torch.optim.SGD(net.parameters(), lr=1.0)
        step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, micro_batch_size=2)
        for x, target in batches(2):
            step(x, target)
        assert_same(net, expected)
        assert calls


def test_schedulers_and_closures():
    net = build_net()

    def scheduled(optimizer, step):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, target in batches(3):
            optimizer.step(lambda x=x, target=target: step(x, target))
            scheduler.step()
        return scheduler.get_last_lr()

    expected = copy.deepcopy(net)
    reference = torch.optim.SGD(expected.parameters(), lr=1.0)

    def plain_step(x, target):
        reference.zero_grad()
        nn.functional.cross_entropy(expected(x), target).backward()

    rates = scheduled(reference, plain_step)
    with simulate(3):
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)

        def step(x, target):
            optimizer.zero_grad()
            criterion(model(x), target).backward()

        assert scheduled(optimizer, step) == rates
        assert_same(net, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_train_step(precision, micro_batch_size):
    net = build_net().float()

    def trained(balanced):
        with simulate(3):
            mine = copy.deepcopy(net)
            model, criterion = parallelize(mine, nn.CrossEntropyLoss(), precision=precision)
            kind, settings = torch.optim.AdamW, {"lr": 0.01}
            optimizer = BalancedOptimizer(model, kind, **settings) if balanced else kind(mine.parameters(), **settings)
            step = TrainStep(
                model, criterion, optimizer, micro_batch_size=micro_batch_size, precision=precision, max_grad_norm=0.3
            )
            losses = [step(x.float(), target).item() for x, target in batches(3)]
            for x, target in batches(2):
                step.add(x.float(), target)
            return [*losses, step.apply().item()], mine.cpu()

    expected_losses, expected = trained(False)
    losses, found = trained(True)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_same(found, expected, 1e-5)


def test_fp16_scaling_skips_the_same_steps():
    with simulate(2):
        net = build_net().float()
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), precision="fp16")
        optimizer, scaler = BalancedOptimizer(model, torch.optim.SGD, lr=1.0), torch.amp.GradScaler("sim", init_scale=2.0**30)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        (x, target) = next(batches(1))
        scaler.scale(criterion(model(x.float()), target)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**29
        assert all(parameter.equal(other) for parameter, other in zip(net.parameters(), before, strict=True))


def test_param_groups():
    net = build_net()
    groups = lambda net: [{"params": net[0].parameters(), "lr": 0.5}, {"params": [net[2].weight], "weight_decay": 0.1}]  # noqa: E731
    expected, reference = plain(net, lambda net: torch.optim.Adam(groups(net), lr=0.1))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, params=groups(net), lr=0.1)
        train(model, optimizer)
        assert_same(net, expected)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        assert net[2].bias.grad is not None  # nobody's: as in the plain program
        with pytest.raises(RuntimeError, match="takes its param groups when it is made"):
            optimizer.add_param_group({"params": [net[2].bias]})
        with pytest.raises(ValueError, match=r"param groups of \[4\] parameters, expected \[2, 1\]"):
            optimizer.load_state_dict(torch.optim.Adam(net.parameters()).state_dict())


def test_a_criterions_parameters_are_updated_where_they_are():
    net, criterion = build_net(), nn.AdaptiveLogSoftmaxWithLoss(CLASSES, CLASSES, cutoffs=[2, 3], div_value=1.0)
    expected = copy.deepcopy(nn.ModuleList([net, criterion]))
    reference = torch.optim.Adam(expected.parameters(), lr=0.1)
    for x, target in batches(3):
        reference.zero_grad()
        expected[1](expected[0](x), target).loss.backward()
        reference.step()
    with simulate(3):
        model, split = DataParallelModel(net), DataParallelCriterion(criterion.to("sim:0"))
        optimizer = BalancedOptimizer(model, torch.optim.Adam, [*net.parameters(), *criterion.parameters()], lr=0.1)
        for x, target in batches(3):
            optimizer.zero_grad()
            split(model(x), target).backward()
            optimizer.step()
        assert_same(nn.ModuleList([net, criterion]), expected)


def test_parts_are_equal_in_bytes_even_of_one_large_parameter():
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


def test_layouts_of_memory_that_cannot_be_cut_stay_whole():
    net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, CLASSES))
    net = net.to(memory_format=torch.channels_last)
    expected, _ = plain(net, lambda net: torch.optim.Adam(net.parameters(), lr=0.1))
    with simulate(3):
        model = DataParallelModel(net)
        train(model, BalancedOptimizer(model, torch.optim.Adam, lr=0.1))
        assert_same(net, expected)


def test_changes_of_values_between_steps_are_kept():
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        train(model, optimizer, 1)
        changes = {3: lambda p: p.data.mul_(0).add_(3), 4: lambda p: setattr(p, "data", torch.full_like(p, 4))}
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
            reference = torch.optim.SGD(expected.parameters(), lr=1.0)
            for x, target in batches(2):
                reference.zero_grad()
                nn.functional.cross_entropy(expected(x), target).backward()
                reference.step()
            assert_same(net, expected)


def test_other_parameters_than_before_are_refused():
    with simulate(2):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        with pytest.raises(ValueError, match="has a BalancedOptimizer already"):
            BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        net[1].note = "an attribute is not a parameter"
        train(model, optimizer, 1)
        net[0].bias = nn.Parameter(torch.zeros(6, device="sim:0"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="other parameters than when its BalancedOptimizer was made.*make a new one"):
                train(model, optimizer, 1)
        del optimizer
        gc.collect()
        train(model, BalancedOptimizer(model, torch.optim.SGD, lr=1.0), 1)


def test_without_the_optimizer_everything_is_as_it_was():
    net = build_net()
    expected, _ = plain(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), 2)
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        train(model, optimizer, 1)
        copied = copy.deepcopy(model)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        del optimizer
        gc.collect()
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        net.zero_grad()
        plain_optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, target = list(batches(2))[1]
        DataParallelCriterion(nn.CrossEntropyLoss())(model(x), target).backward()
        plain_optimizer.step()
        assert_same(net, expected)


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "SparseAdam", "Muon"])
def test_optimizers_that_need_the_whole_are_refused(kind):
    model = DataParallelModel(build_net(), ["cpu"])
    with pytest.raises(TypeError, match=f"{kind} was given, expected an elementwise optimizer of torch.optim"):
        BalancedOptimizer(model, getattr(torch.optim, kind), lr=0.1)


def test_bad_arguments():
    with pytest.raises(TypeError, match="the model is a Sequential, expected a DataParallelModel or the model"):
        BalancedOptimizer(build_net(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="0.1 was given, expected an elementwise optimizer"):
        BalancedOptimizer(DataParallelModel(build_net(), ["cpu"]), 0.1)


def test_replicas_on_the_cpu_share_one_plain_optimizer():
    net = build_net()
    expected, reference = plain(net, lambda net: torch.optim.Adam(net.parameters(), lr=0.1))
    model = DataParallelModel(net, ["cpu"] * 3)
    optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
    train(model, optimizer)
    assert_same(net, expected)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


def _train_on_ranks(rank, saved):
    torch.set_default_dtype(torch.float64)
    net = build_net()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"])
    optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for x, target in batches(2):
        mine = slice(0, 7) if rank == 0 else slice(7, ROWS)
        step(x[mine], target[mine])
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "mine": len(optimizer.shards.inner.optim.state)}


def test_under_torchrun_it_is_torchs_own_and_checkpoints_move():
    start = build_net()
    expected, reference = plain(start, lambda net: torch.optim.Adam(net.parameters(), lr=0.1), 2)
    first = run_ranks(2, _train_on_ranks, None)
    for found in first:
        torch.testing.assert_close(found["net"], dict(expected.state_dict()), rtol=1e-10, atol=1e-10)
        assert_same_state(found["optimizer"], reference.state_dict())
        assert 0 < found["mine"] < 4  # its part alone
    for x, target in batches(2):
        reference.zero_grad()
        nn.functional.cross_entropy(expected(x), target).backward()
        reference.step()
    saved = copy.deepcopy(first[0])  # tensors that go to another process are shared with it
    for found in run_ranks(2, _train_on_ranks, {"net": first[0]["net"], "optimizer": first[0]["optimizer"]}):
        torch.testing.assert_close(found["net"], dict(expected.state_dict()), rtol=1e-10, atol=1e-10)
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 2)
        assert_same(net, expected)
