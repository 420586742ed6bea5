"""Writes to parameters that torch does not record: by optimizers and through ``.data``, compared with the plain program."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from helpers.problems import CLASSES, build_net
from helpers.updates import ROWS, Head, assert_equal, random_batches, values_of
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate


class Fused(torch.optim.AdamW):
    """Writes as fused kernels do: no version counter moves."""

    def step(self, closure=None):
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.param_groups[0]["params"])):
            return super().step(closure)


def fused_optimizer(parameters, device):
    return Fused(parameters, 0.05) if device.startswith("sim") else torch.optim.AdamW(parameters, 0.05, fused=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("devices", [["cpu"], ["sim:0", "sim:1"], ["cpu", "sim:0", "sim:1"]], ids=str)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_optimizer_trains_all_replicas(devices, micro_batch_size, scaled):
    def trained(devices):
        net, head = build_net(), Head()
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        criterion.to(devices[0])
        optimizer = fused_optimizer([*net.parameters(), *head.parameters()], devices[0])
        # the first steps change nothing
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: float(number > 2))
        scaler = torch.amp.GradScaler("cpu" if devices[0] == "cpu" else "sim", init_scale=64.0, enabled=scaled)
        step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, scheduler=scheduler)
        for number, (x, y) in enumerate(random_batches(8)):
            if number % 2:
                step(x, y)
            else:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        return values_of(net, head)

    torch.manual_seed(3)
    expected = trained(["cpu"])
    with simulate(2):
        torch.manual_seed(3)
        assert_equal(trained(devices), expected)


@pytest.mark.usefixtures("double")
def test_parameters_keep_their_class_and_serialization():
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        gather(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        kept = net[0].weight.data
        assert all(type(parameter) is nn.Parameter and not vars(parameter) for parameter in net.parameters())
        assert type(kept) is torch.Tensor
        assert type(net[0].weight.detach()) is torch.Tensor
        assert all(type(parameter) is nn.Parameter for parameter in copy.deepcopy(model).parameters())
        net.to("cpu")
        assert net[0].weight.data.device.type == "cpu"
        for saved in (net.state_dict(), net[0].weight, list(net.parameters())):
            file = io.BytesIO()
            torch.save(saved, file)
            assert b"balanced_parallel" not in file.getvalue()
            file.seek(0)
            torch.load(file, weights_only=True)
        net.half()
        assert net[0].weight.dtype == torch.float16
    file = io.BytesIO()
    torch.save(net, file)
    assert b"balanced_parallel" not in file.getvalue()


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_an_optimizer_that_writes_through_data_trains_all_replicas(micro_batch_size, balanced):
    class Old(torch.optim.Optimizer):  # as many were written, and still are
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    losses = {}
    for devices in (None, 3):
        with simulate(devices) if devices else contextlib.nullcontext():
            net = build_net()
            model = DataParallelModel(net, None if devices else ["cpu"])
            optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0) if balanced else Old(net.parameters())
            step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), optimizer, micro_batch_size=micro_batch_size)
            torch.manual_seed(2)
            x = torch.randn(12, 4)
            y = torch.randn(12, CLASSES)
            losses[devices] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    losses[devices].append(float(step(x, y)))
                    if balanced:
                        for parameter in net.parameters():
                            parameter.data.clamp_(-0.2, 0.2)
            assert not caught
    torch.testing.assert_close(losses[None], losses[3])


class Split:
    """The same program with replicas: ``wrap`` and ``loss`` are all that differs."""

    device = "sim:0"

    def wrap(self, net):
        return DataParallelModel(net)

    def loss(self, criterion, outputs, targets):
        return DataParallelCriterion(criterion)(outputs, targets)

    def whole(self, outputs):
        return gather(outputs)


class Plain:
    device = "cpu"

    def wrap(self, net):
        return net

    def loss(self, criterion, outputs, targets):
        return criterion(outputs, targets)

    def whole(self, outputs):
        return outputs


class Averages:
    """An average of the parameters, as torch_ema writes one."""

    def __init__(self, parameters, decay=0.8):
        self.decay = decay
        self.shadow = [parameter.clone().detach() for parameter in parameters]

    def update(self, parameters):
        with torch.no_grad():
            for shadow, parameter in zip(self.shadow, parameters, strict=True):
                shadow.sub_((1 - self.decay) * (shadow - parameter))

    def store(self, parameters):
        self.stored = [parameter.clone() for parameter in parameters]

    def copy_to(self, parameters):
        for shadow, parameter in zip(self.shadow, parameters, strict=True):
            parameter.data.copy_(shadow.data)

    def restore(self, parameters):
        for stored, parameter in zip(self.stored, parameters, strict=True):
            parameter.data.copy_(stored.data)


def average_copied_for_evaluation(run):
    net = build_net().to(run.device)
    model, optimizer, averages = run.wrap(net), torch.optim.Adam(net.parameters(), 0.05), Averages([*net.parameters()])
    seen = []
    for number, (x, y) in enumerate(random_batches(30)):
        if number % 7 == 6:
            averages.store(net.parameters())
            averages.copy_to(net.parameters())
            with torch.no_grad():
                seen.append(run.whole(model(x)).cpu())
            averages.restore(net.parameters())
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), model(x), y).backward()
        optimizer.step()
        averages.update(net.parameters())
    return [*seen, *values_of(net)]


def average_swapped_for_evaluation(run):
    net, average = build_net().to(run.device), build_net().to(run.device)
    model, optimizer = run.wrap(net), torch.optim.Adam(net.parameters(), 0.05)
    seen = []
    for number, (x, y) in enumerate(random_batches(30)):
        for _ in range(2 if number % 7 == 6 else 0):  # there, and back
            for mine, theirs in zip(net.parameters(), average.parameters(), strict=True):
                mine.data, theirs.data = theirs.data, mine.data
            with torch.no_grad():
                seen.append(run.whole(model(x)).cpu())
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), model(x), y).backward()
        optimizer.step()
        for mine, theirs in zip(net.parameters(), average.parameters(), strict=True):
            theirs.data.mul_(0.8).add_(mine.data, alpha=0.2)
    return [*seen, *values_of(net, average)]


def clamped_critic(run):
    critic, generator = build_net(1).to(run.device), build_net(4).to(run.device)
    critic_of, generate = run.wrap(critic), run.wrap(generator)
    for_critic, for_generator = (torch.optim.RMSprop(net.parameters(), 0.03) for net in (critic, generator))
    for number, (x, _) in enumerate(random_batches(25)):
        for parameter in critic.parameters():  # that the generator's turn has used since it was trained
            parameter.data.clamp_(-0.1, 0.1)
        for_critic.zero_grad()
        fake = run.whole(generate(x.flip(1))).detach()
        (run.whole(critic_of(fake)).mean() - run.whole(critic_of(x)).mean()).backward()
        for_critic.step()
        if number % 3 == 0:
            for_generator.zero_grad()
            (-run.whole(critic_of(run.whole(generate(x)))).mean()).backward()
            for_generator.step()
    return values_of(critic, generator)


def averaged_teacher(run):
    student, teacher = build_net().to(run.device), build_net().to(run.device).requires_grad_(False)
    learn, teach = run.wrap(student), run.wrap(teacher)
    optimizer = torch.optim.SGD(student.parameters(), 0.5)
    seen = []
    for x, y in random_batches(20):
        seen.append(run.whole(teach(x)).cpu())
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), learn(x), y + run.whole(teach(x)).cpu().detach()).backward()
        optimizer.step()
        for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data.mul_(0.7).add_(theirs.data, alpha=0.3)
    return [*seen, *values_of(student, teacher)]


def delayed_target_network(run):
    critic, target = build_net().to(run.device), build_net().to(run.device)
    value, target_value = run.wrap(critic), run.wrap(target)
    optimizer = torch.optim.Adam(critic.parameters(), 0.05)
    for number, (x, y) in enumerate(random_batches(24)):
        with torch.no_grad():
            wanted = y + 0.9 * run.whole(target_value(x)).cpu()
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), value(x), wanted).backward()
        optimizer.step()
        if number % 5 == 4:
            for mine, theirs in zip(critic.parameters(), target.parameters(), strict=True):
                theirs.data.copy_(0.3 * mine.data + 0.7 * theirs.data)
    return values_of(critic, target)


def write_between_two_forwards(run):
    net = build_net().to(run.device)
    model, optimizer = run.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    for x, y in random_batches(12):
        optimizer.zero_grad()
        first = run.loss(nn.MSELoss(), model(x), y)
        for parameter in net.parameters():
            parameter.data.mul_(0.9)
        second = run.loss(nn.MSELoss(), model(x + 1), y)
        (first + second).backward()  # of the values there are by then, as torch does without a word
        optimizer.step()
    return values_of(net)


def views_kept_over_steps(run):
    net = build_net().to(run.device)
    model, optimizer = run.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    model(torch.randn(ROWS, 4))
    views = [parameter.data.view(-1) for parameter in net.parameters()]
    for x, y in random_batches(12):
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), model(x), y).backward()
        optimizer.step()
        model(x)
        for view in views:
            view.mul_(0.9)
    return values_of(net)


def tensor_assigned_to_data(run):
    net = build_net().to(run.device)
    model, optimizer = run.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    model(torch.randn(ROWS, 4))
    given = torch.full_like(net[0].weight, 0.3, requires_grad=False)
    net[0].weight.data = given
    for x, y in random_batches(12):
        optimizer.zero_grad()
        run.loss(nn.MSELoss(), model(x), y).backward()
        optimizer.step()
        model(x)
        given.mul_(0.5)
    return values_of(net)


def data_assigned_twice(run):
    net = build_net().to(run.device)
    model = run.wrap(net)
    seen = []
    for x, _ in random_batches(12):
        for parameter in net.parameters():
            for factor in (0.5, 3.0):  # the second may be given the memory that the first has let go
                parameter.data = parameter.data * factor
        with torch.no_grad():
            seen.append(run.whole(model(x)).cpu())
    return seen


def clamped_criterion(run):
    net = build_net().to(run.device)
    torch.manual_seed(2)
    head = Head().to(run.device)
    model, criterion = run.wrap(net), run.wrap_criterion(head) if run.device != "cpu" else head
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1)
    for x, y in random_batches(12):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        criterion(model(x), y)
        head.weight.data.clamp_(-0.2, 0.2)
    return values_of(net, head)


Split.wrap_criterion = lambda self, head: DataParallelCriterion(head, weight=lambda x, y: x.size(0))
LOOPS = [
    average_copied_for_evaluation,
    average_swapped_for_evaluation,
    clamped_critic,
    averaged_teacher,
    delayed_target_network,
    write_between_two_forwards,
    views_kept_over_steps,
    tensor_assigned_to_data,
    data_assigned_twice,
    clamped_criterion,
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_writes_through_data_equal_the_plain_program(loop):
    """Without a warning: there is nothing to be warned of."""
    expected = loop(Plain())
    with simulate(3):
        assert_equal(loop(Split()), expected)


class Momentum(nn.Module):
    """The second layer follows the first in each forward, as in MoCo."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.key.weight.lerp_(self.query.weight, 0.5)
        return self.query(x) - self.key(x + 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_forward_that_writes_parameters_runs_once_per_device(frozen, enabled):
    x, expected = torch.randn(6, 4), Momentum()
    output = expected(x)
    with simulate(2), torch.set_grad_enabled(enabled):
        for devices in (["sim:0", "sim:1"], ["cpu", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            found = gather(DataParallelModel(net, devices)(x))
            torch.testing.assert_close(found.cpu(), output)
            torch.testing.assert_close(net.key.weight.cpu(), expected.key.weight)
        for devices in (["cpu", "cpu"], ["sim:0", "sim:1", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            with pytest.raises(
                RuntimeError, match="wrote to a parameter that several replicas on one device share, .* expected one"
            ):
                DataParallelModel(net, devices)(x)
