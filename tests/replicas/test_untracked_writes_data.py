"""Writes through ``.data``: training loops of users, compared with the plain program."""

import pytest
import torch
from helpers.problems import build_net
from helpers.updates import ROWS, Head, assert_equal, random_batches, values_of
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, gather, simulate

pytestmark = pytest.mark.usefixtures("double")


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


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_writes_through_data_equal_the_plain_program(loop):
    """Without a warning: there is nothing to be warned of."""
    expected = loop(Plain())
    with simulate(3):
        assert_equal(loop(Split()), expected)
