"""``DistributedDataParallel`` as parallelize sets it up: compiled graphs, checkpoints, buckets, memory of gradients, warnings."""

import copy
import warnings

import pytest
import torch
from helpers.ddp import WAYS, make_update
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients, plain_program
from helpers.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import TrainStep, parallelize


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


def test_accumulation_and_synchronizing_forward_compile_the_same_graphs():
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


def test_accumulation_keeps_one_copy_of_the_gradients():
    """Buckets are allocated before. A backward makes one gradient at a time, an eighth of all, and adds it there."""
    assert max(run_ranks(2, check_memory)) < 0.3


def check_inside(rank):
    seen = []
    net = build_net()
    model, _ = parallelize(net, nn.CrossEntropyLoss())
    net[0].register_forward_hook(lambda *_: seen.append(model.module))
    model(torch.randn(3, 4))
    return seen == [net] and model.module is net


def test_module_attribute_is_the_original_module_in_forward():
    assert run_ranks(2, check_inside) == [True, True]


class Biased(nn.Linear):
    """A linear layer with one more parameter, which it uses for a while."""

    is_biased = True

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return super().forward(inputs) + self.more if self.is_biased else super().forward(inputs)


def check_order(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for way in WAYS:
        events = []
        net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(16)])  # 30 MiB in two buckets
        net[15] = Biased(700, 700)
        model, update = make_update(way, net, nn.MSELoss())

        def note(module, given, returned, events=events, net=net):
            events.append(list(net).index(module))

        def hook(state, bucket, events=events):
            events.append(f"bucket {bucket.index()}")
            return allreduce_hook(None, bucket)

        for layer in net:
            layer.register_full_backward_hook(note)
        model.register_comm_hook(None, hook)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for number in range(4):  # the reducer makes its buckets anew after the first
                net[15].is_biased = number < 2 or way == "criterion"
                events.clear()
                update(torch.randn(4, 700), torch.randn(4, 700))
        last = events[events.index("bucket 0") :]
        assert sum(isinstance(event, int) for event in last) >= 1, (way, events)
        assert last[-1] == f"bucket {sum(isinstance(event, str) for event in last) - 1}", (way, events)
        assert len([event for event in events if isinstance(event, str)]) > 1, (way, events)
    return True


def test_bucket_all_reduce_overlaps_with_the_backward_of_earlier_layers():
    assert run_ranks(2, check_order) == [True, True]


class Recomputed(nn.Module):
    """Checkpoints its middle layer."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(4, size).double() for size in (4, 4, CLASSES))
        self.use_reentrant = use_reentrant

    def forward(self, inputs):
        return self.last(checkpoint(self.middle, self.first(inputs), use_reentrant=self.use_reentrant))


def check_recomputed(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(7, 4, dtype=torch.float64), class_targets(7, ignored=2)
    plain = Recomputed(use_reentrant=False)
    expected = nn.functional.cross_entropy(plain(inputs), targets)
    expected.backward()
    mine = slice(0, 3) if rank == 0 else slice(3, None)
    for way in WAYS:
        model, update = make_update(way, Recomputed(use_reentrant=False), nn.CrossEntropyLoss())
        for _ in range(3):
            torch.testing.assert_close(update(inputs[mine], targets[mine]), expected.detach(), rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_activation_checkpointing_equals_the_plain_program():
    assert run_ranks(2, check_recomputed) == [True, True]


def check_reentrant(rank):
    """Reentrant checkpoints run a backward inside of the backward, which DistributedDataParallel does not support."""
    for way in WAYS:
        _, update = make_update(way, Recomputed(use_reentrant=True), nn.CrossEntropyLoss())
        with pytest.raises(RuntimeError, match="reentrant backward passes"):
            update(torch.randn(3, 4, dtype=torch.float64), class_targets(3))
    return True


def test_reentrant_checkpointing_raises_an_error():
    assert run_ranks(2, check_reentrant) == [True, True]


class Words(nn.Module):
    """A sparse gradient, which the reducer refuses where there is none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = nn.Embedding(11, 4, sparse=True).double(), nn.Linear(4, CLASSES).double()

    def forward(self, inputs):
        return self.last(self.embedding(inputs).mean(1))


def check_sparse(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randint(11, (9, 3)), class_targets(9, ignored=3)
    sizes = [3, 0, 6]  # nothing counted, no rows, all the rest
    mine = inputs.split(sizes)[rank], targets.split(sizes)[rank]
    for way in WAYS:
        plain, (model, update) = Words(), make_update(way, Words(), nn.CrossEntropyLoss())
        for _ in range(3):
            plain.zero_grad()
            loss = nn.functional.cross_entropy(plain(inputs), targets)
            loss.backward()
            torch.testing.assert_close(update(*mine), loss.detach(), rtol=1e-10, atol=1e-10)
            found = gradients(model.module)
            assert found[0].is_sparse
            assert_same_gradients([found[0].to_dense(), *found[1:]], [p.grad.to_dense() for p in plain.parameters()])
    return True


def test_sparse_gradients_with_ranks_without_rows():
    assert run_ranks(3, check_sparse) == [True] * 3


class Layouts(nn.Module):
    """Convolutions of several layouts and dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        kinds = [(torch.channels_last, torch.half), (torch.contiguous_format, torch.half), (torch.channels_last, torch.float)]
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 2).to(memory_format=layout, dtype=dtype) for layout, dtype in kinds)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs.to(layer.weight.dtype))
        return inputs.float()


def check_strides(rank):
    for way in WAYS:
        model, update = make_update(way, Layouts(), nn.MSELoss())
        for _ in range(3):
            update(torch.randn(4 * rank, 4, 5, 5), torch.randn(4 * rank, 4, 2, 2))
            assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    return True


def test_gradients_have_the_strides_of_their_parameters():
    assert run_ranks(2, check_strides) == [True, True]


def check_copy(rank):
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 4), class_targets(7, 1)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    model, criterion = parallelize(build_net(), torch.nn.CrossEntropyLoss())
    TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))(inputs[mine], targets[mine])
    copied = copy.deepcopy(model)
    assert copied.module[0].weight is not model.module[0].weight
    for one in (model, copied):
        plain = copy.deepcopy(one.module)
        loss, expected = plain_program(plain, torch.nn.CrossEntropyLoss(), inputs, targets)
        step = TrainStep(one, criterion, torch.optim.SGD(one.parameters(), lr=0.1))
        torch.testing.assert_close(step(inputs[mine], targets[mine]), loss)
        assert_same_gradients(gradients(one.module), expected, 1e-6)
    return True


def test_deepcopy_of_a_trained_model_trains():
    assert run_ranks(2, check_copy) == [True, True]
