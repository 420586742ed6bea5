"""One model called from several threads, by another model, and in its own forward."""

import threading

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelModel, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")

LAYOUTS = [["sim:0", "sim:1", "sim:2"], ["cpu", "sim:0", "sim:1"]]


def together(*work):
    failures = []

    def call(one):
        try:
            one()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=call, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.parametrize("deferred", [False, True])
def test_concurrent_forwards_and_backwards_equal_the_plain_program(devices, deferred):
    x = [torch.randn(rows, 4) for rows in (7, 2, 5)]
    net = build_net()
    for batch in x:
        (net(batch).square().sum() * 10).backward()
    expected = gradients(net)
    with simulate(3):
        net = build_net().to(devices[0])
        own = [*net.parameters()]
        model = DataParallelModel(net, devices)

        def work(batch):
            for _ in range(10):
                gather(model(batch), "cpu").square().sum().backward()

        def run():
            together(*(lambda batch=batch: work(batch) for batch in x))

        if deferred:
            with model.no_sync():
                run()
            model.reduce_gradients()
        else:
            run()
        assert [*map(id, net.parameters())] == [*map(id, own)]
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


def test_optimizer_step_in_another_thread_keeps_the_parameters():
    with simulate(3):
        model = DataParallelModel(build_net())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.0)
        x = torch.randn(7, 4)
        gather(model(x)).sum().backward()
        own = [*map(id, model.parameters())]

        def run():
            for _ in range(20):
                model(x)

        def update():
            for _ in range(20):
                optimizer.step()

        together(run, update)
        assert [*map(id, model.parameters())] == own


def test_model_called_by_replicas_of_another_model():
    class Asks(nn.Module):
        def __init__(self, teacher):
            super().__init__()
            self.own, self.ask = nn.Linear(4, CLASSES), teacher

        def forward(self, x):
            return self.own(x) * self.ask(x).to(x.device)

    x = torch.randn(7, 4)
    torch.manual_seed(0)
    teacher, net = build_net(), Asks(build_net())
    plain = net(x)
    plain.square().sum().backward()
    expected = [*gradients(net), *gradients(teacher)]
    with simulate(3):
        teacher = build_net()
        teach = DataParallelModel(teacher)
        torch.manual_seed(0)
        build_net()
        outer = Asks(build_net())
        outer.ask = None
        outer.own.load_state_dict(net.own.state_dict())
        object.__setattr__(outer, "ask", lambda x: gather(teach(x)))  # not a part of it, and asked by every replica
        model = DataParallelModel(outer)
        gather(model(x)).square().sum().backward()
        found = [*gradients(outer), *gradients(teacher)]
        assert_same_gradients([gradient.cpu() for gradient in found], [*expected[:2], *gradients(net.ask)])


@pytest.mark.parametrize("rows", [7, 1])
def test_model_called_in_its_own_forward_raises_an_error(rows):
    class Itself(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(4, 4)

        def forward(self, x):
            x = self.own(x)
            return self.call(x) if len(x) > 1 else x

    x = torch.randn(7, 4)
    with simulate(3):
        net = Itself()
        own = [*map(id, net.parameters())]
        model = DataParallelModel(net)
        object.__setattr__(net, "call", lambda x: gather(model(x[:rows])))
        with pytest.raises(RuntimeError, match="inside of its own forward, expected .* call the module itself"):
            model(x)
        assert [*map(id, net.parameters())] == own
        object.__setattr__(net, "call", lambda x: x)
        model(x)
