"""``DistributedDataParallel`` as parallelize sets it up: compiled graphs, memory of gradients, warnings."""

import warnings

import torch
from helpers.problems import CLASSES, build_net, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import TrainStep, parallelize
from balanced_parallel.runtime import collectives


def check_compiled(rank):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(16)])  # 30 MiB in several buckets
    model, criterion = parallelize(torch.compile(net, backend=backend), nn.MSELoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    step.add(torch.randn(2, 700), torch.randn(2, 700))
    count = len(graphs)
    assert count > 1, "the graph is not split at the buckets"
    for _ in range(2):
        step(torch.randn(4, 700), torch.randn(4, 700))
    assert len(graphs) == count
    torch._dynamo.reset()
    return True


def test_accumulation_compiles_the_graphs_of_the_reducing_forward():
    assert run_ranks(2, check_compiled, timeout=200) == [True, True]


def check_memory(rank):
    net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(8)])
    model, criterion = parallelize(net, nn.MSELoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    step(torch.randn(6, 500), torch.randn(6, 500))
    buckets = {parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(3):
            step.add(torch.randn(2, 500), torch.randn(2, 500))
            assert {parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()} == buckets
        step.apply()
    now = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / sum(parameter.nbytes for parameter in net.parameters())


def test_gradients_exist_once_while_micro_batches_accumulate():
    """Buckets are allocated before. A backward makes one gradient at a time, an eighth of all, and adds it there."""
    assert max(run_ranks(2, check_memory)) < 0.3


def check_order(rank):
    events, start = [], collectives.start_sum_over_ranks

    def noted(tensor):
        events.append("start")
        wait = start(tensor)
        return lambda: (events.append("wait"), wait())[1]

    collectives.start_sum_over_ranks = noted
    try:
        net = build_net()
        net[2].weight.register_hook(lambda gradient: events.append("backward"))
        model, criterion = parallelize(net, nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
        step(torch.randn(4, 4), class_targets(4))
    finally:
        collectives.start_sum_over_ranks = start
    return events


def test_loss_and_weight_travel_while_the_last_backward_runs():
    assert run_ranks(2, check_order) == [["backward", "start", "backward", "wait"]] * 2


class Changing(nn.Module):
    """Uses its second layer for a while."""

    uses_second = True

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden


def check_unused(rank):
    net = Changing()
    model, criterion = parallelize(net, nn.MSELoss())
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=1)
    for number in range(4):
        net.uses_second = number == 1 or (number == 2 and rank == 0)
        step(torch.randn(3, 4), torch.randn(3, 6))
        assert net.first.weight.grad.any()
        assert (net.second.weight.grad is not None) == (number in (1, 2))
    return True


def test_unused_parameters_have_no_gradient_after_an_accumulation():
    assert run_ranks(2, check_unused) == [True, True]


def check_quiet(rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)  # torch gives some warnings once per process, and this process has run other tests
        model, criterion = parallelize(build_net(), nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(3, 4), class_targets(3) % CLASSES)
    torch.set_warn_always(False)
    return [str(warning.message) for warning in caught]


def test_no_warning_advises_to_leave_out_the_search_for_unused_parameters():
    assert run_ranks(2, check_quiet) == [[], []]


def check_inside(rank):
    seen = []
    net = build_net()
    model, _ = parallelize(net, nn.CrossEntropyLoss())
    net[0].register_forward_hook(lambda *_: seen.append(model.module))
    model(torch.randn(3, 4))
    return seen == [net] and model.module is net


def test_the_module_is_the_users_own_inside_of_its_forward():
    assert run_ranks(2, check_inside) == [True, True]
