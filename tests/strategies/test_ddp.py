"""``DistributedDataParallel`` as parallelize sets it up: graphs, buckets, hooks, memory, exchanges, ranks without rows."""

import copy
import warnings

import pytest
import torch
from helpers.ddp import WAYS, Chosen, calls_of, cut_over_ranks, make_update
from helpers.optimizers import sgd
from helpers.problems import (
    CLASSES,
    assert_equal,
    assert_same_gradients,
    build_net,
    class_batch,
    class_targets,
    gradients,
    plain_program,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import TrainStep, gather, parallelize
from balanced_parallel.runtime.collectives import gather_objects


@on_ranks(2)
def test_accumulation_and_synchronizing_forward_compile_the_same_graphs(rank):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(3)])  # 33 MiB in several buckets
    step = parallel_step(torch.compile(net, backend=backend), nn.MSELoss(), micro_batch_size=2)
    step.add(torch.randn(2, 700), torch.randn(2, 700))
    count = len(graphs)
    assert count > 1, "the graph is not split at the buckets"
    for _ in range(2):
        step(torch.randn(4, 700), torch.randn(4, 700))
    assert len(graphs) == count
    torch._dynamo.reset()


@on_ranks(2)
def test_accumulation_keeps_one_copy_of_the_gradients(rank):
    """Buckets are allocated before. A backward makes one gradient at a time, an eighth of all, and adds it there."""
    net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(8)])

    def places():
        return {parameter.grad.untyped_storage().data_ptr() for parameter in net.parameters()}

    step = parallel_step(net, nn.MSELoss(), micro_batch_size=2)
    step(torch.randn(6, 500), torch.randn(6, 500))
    buckets = places()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for _ in range(3):
            step.add(torch.randn(2, 500), torch.randn(2, 500))
            assert places() == buckets
        step.apply()
    now = peak = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert peak < 0.3 * sum(parameter.nbytes for parameter in net.parameters())


@on_ranks(2)
def test_a_start_and_two_updates_print_no_warnings_of_torch(rank):
    with warnings.catch_warnings(action="error"):
        for strategy in ("ddp", "fsdp"):
            step = parallel_step(build_net(), strategy=strategy, micro_batch_size=2)
            for rows in (4, 5 * rank):
                step(*class_batch(rows))


class Biased(nn.Linear):
    """A linear layer with one more parameter, which it uses for a while."""

    is_biased = True

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return super().forward(inputs) + self.more if self.is_biased else super().forward(inputs)


@pytest.mark.parametrize("way", ["micro-batches", slow("criterion")])
@on_ranks(2)
def test_bucket_all_reduce_overlaps_with_the_backward_of_earlier_layers(rank, way):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    events = []
    net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(7)])  # 30 MiB in two buckets
    net[6] = Biased(700, 700)
    model, update = make_update(way, net, nn.MSELoss())

    def note(module, given, returned):
        events.append(list(net).index(module))

    def hook(state, bucket):
        events.append(f"bucket {bucket.index()}")
        return allreduce_hook(None, bucket)

    for layer in net:
        layer.register_full_backward_hook(note)
    model.register_comm_hook(None, hook)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        for number in range(4):  # the reducer makes its buckets anew after the first
            net[6].is_biased = number < 2 or way == "criterion"
            events.clear()
            update(torch.randn(4, 700), torch.randn(4, 700))
    last = events[events.index("bucket 0") :]
    assert sum(isinstance(event, int) for event in last) >= 1, events
    assert last[-1] == f"bucket {sum(isinstance(event, str) for event in last) - 1}", events
    assert len([event for event in events if isinstance(event, str)]) > 1, events


class Recomputed(nn.Module):
    """Checkpoints its first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, inputs):
        return self.last(checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True))


@on_ranks(2)
def test_reentrant_checkpointing_raises_an_error(rank):
    """Reentrant checkpoints run a backward inside of the backward, which DistributedDataParallel does not support."""
    for way in WAYS:
        _, update = make_update(way, Recomputed(), nn.CrossEntropyLoss())
        with pytest.raises(RuntimeError, match="reentrant backward passes"):
            update(*class_batch(3))


def quantize(state, bucket):
    """Rounds a whole bucket to 7 bits, by its largest entry."""
    buffer = bucket.buffer()
    unit = buffer.abs().max() / 127
    buffer.copy_((buffer / unit).round() * unit if unit else buffer)
    return (
        torch.distributed.all_reduce(buffer, async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] / 2)
    )


@on_ranks(2)
def test_comm_hook_buckets_contain_only_gradients(rank):
    torch.manual_seed(1)
    batch = torch.randn(600, 4, dtype=torch.float64), class_targets(600)
    loss, expected = plain_program(Chosen(), nn.CrossEntropyLoss(), *batch)
    largest = max(gradient.abs().max() for gradient in expected if gradient is not None)
    for way in ["step", "criterion"]:
        model, update = make_update(way, Chosen(), nn.CrossEntropyLoss())
        model.register_comm_hook(None, quantize)
        for _ in range(3):
            found = update(*(cut_over_ranks(each, [200, 400], rank) for each in batch))
            assert_equal(found, loss)
            assert_same_gradients(gradients(model.module), expected, 0.02 * largest.item())


@on_ranks(2)
def test_powersgd_hook_does_not_hang(rank):
    """Callbacks of the hook start collectives, on threads of gloo, while the reducer starts those of the next bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(700, 700) for _ in range(7)])  # 30 MiB in two buckets
    step = parallel_step(net, nn.MSELoss(), lr=0.01)
    step.model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    losses = [step(torch.randn(8, 700), torch.randn(8, 700)).item() for _ in range(4)]
    first, second = gather_objects(losses[-1])
    assert first == second


class Strict(nn.Module):
    """Refuses inputs without rows, as ``nn.InstanceNorm2d`` and the masks of Llama, counts forwards and draws numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.InstanceNorm2d(3),
            nn.BatchNorm2d(3),
            nn.Dropout(0.0),
            nn.Flatten(),
        )
        self.last = nn.Linear(12, 2)
        self.never = nn.Linear(2, 2)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        if not len(x):
            raise ValueError("no rows")
        self.forwards += 1
        return {"logits": self.last(self.layers(x)), "loss": x.mean()}

    def features(self, x):
        return self.forward(x)["logits"]


def check_loop(rank, first_is_empty, method):
    """Three updates; in two of them rank 1 has no rows."""
    plain = Strict().double()
    model, criterion = parallelize(copy.deepcopy(plain), nn.CrossEntropyLoss(), strategy="ddp")
    steps = [True, False, True] if first_is_empty else [False, True, True]
    for number, is_empty in enumerate(steps):
        torch.manual_seed(10 + number)
        x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
        targets = torch.randint(2, (6,))
        mine = slice(6, 6) if is_empty and rank else slice(0, 6)
        outputs = (
            model.call(method, x[mine])
            if method
            else model(x[mine]).map(lambda output: output["logits"])
        )
        assert list(outputs.sizes) == [len(x[mine])]
        loss = criterion(outputs, targets[mine])
        model.zero_grad()
        loss.backward()
        expected = nn.functional.cross_entropy(plain(x)["logits"], targets)
        plain.zero_grad()
        expected.backward()
        assert_equal(loss, expected)
        assert_same_gradients(gradients(model.module), gradients(plain))
        assert gather(outputs.map(lambda output: output.detach())).shape == (
            (6, 2) if is_empty else (12, 2)
        )
    with torch.no_grad():
        assert gather(model(x[mine]).map(lambda output: output["logits"])).shape == (6, 2)
    return model.module.forwards.item(), torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("first_is_empty", "method"), [(False, "features"), (True, None), slow(True, "features")]
)
def test_rank_without_rows_takes_part_in_a_loop_by_hand(first_is_empty, method):
    (forwards, random_numbers), others = run_ranks(
        2, check_loop, first_is_empty, method, timeout=60
    )
    assert forwards == 4
    assert others[1] == random_numbers


@on_ranks(2)
def test_rows_may_lie_in_another_dimension(rank):
    model = parallelize(nn.GRU(3, 2), dim=1, out_dims=(1, 1))
    rows = 0 if rank else 4
    output, _ = model(torch.randn(5, rows, 3)).unzip()
    assert output[0].shape == (5, rows, 2)
    assert output[0].requires_grad


class Changing(nn.Module):
    """Uses its second layer for a while."""

    uses_second = True

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden


def exchanges_of(work):
    return calls_of(work, "c10d::allreduce_", "c10d::allgather_")


def check_exchanges(rank):
    """Returns those of plain DDP, and of updates in which no rank, one rank and every rank has an unused parameter."""
    net = Changing()
    copied = copy.deepcopy(net)
    model, criterion = parallelize(net, nn.MSELoss())
    by_hand = nn.parallel.DistributedDataParallel(copied)
    assert not model.find_unused_parameters  # torch would warn of it
    step = TrainStep(model, criterion, sgd(model), micro_batch_size=2)
    inputs = torch.randn(4, 4)
    targets = torch.randn(4, 6)

    def update_by_hand():
        with by_hand.no_sync():
            nn.functional.mse_loss(by_hand(inputs[:2]), targets[:2]).backward()
        nn.functional.mse_loss(by_hand(inputs[2:]), targets[2:]).backward()

    # The reducer builds its buckets again after the first.
    counts = [exchanges_of(update_by_hand) for _ in range(2)]
    for users in ([0, 1], [0, 1], [1], []):
        net.uses_second = rank in users
        counts.append(exchanges_of(lambda: step(inputs, targets)))
        assert (net.second.weight.grad is None) == (not users)
    return [counts[1], *counts[3:]]


def test_update_adds_one_small_exchange_to_plain_ddp_and_another_for_unused_parameters():
    """Loss, weight, and whether the backward of a rank has failed; then the parameters that no rank has used."""
    # The other rank does not always wait for the last.
    assert run_ranks(2, check_exchanges)[0] == [1, 2, 3, 3]
