"""Collectives of FSDP2: three of the hosts in each update, and one reduction of gradients that stay whole until then."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ddp import calls_of
from helpers.fsdp import whole_gradients
from helpers.optimizers import sgd
from helpers.problems import assert_same_gradients, build_net, class_targets, plain_program
from helpers.ranks import run_ranks
from helpers.releases import keeps_whole_gradients
from helpers.slow import slow
from helpers.steps import parallel_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import TrainStep, parallelize
from balanced_parallel.runtime import collectives


def words_of(work):
    """Returns the collectives of the hosts: those besides the all-gathers of parameters and the reductions of gradients."""
    gather = mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object)
    add = mock.patch.object(collectives, "gather_numbers", wraps=collectives.gather_numbers)
    with (
        gather as gathered,
        add as added,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        work()
    # key_averages() reads stacks too, which rarely raises "cannot create std::vector" (torch 2.13, events of gloo's threads).
    events = profiler.profiler.kineto_results.events()
    others = sum(event.name() in ("c10d::allreduce_", "c10d::broadcast_") for event in events)
    return gathered.call_count + added.call_count + others


# rows of each rank: alike, as many micro-batches on each, fewer on one, more on one, fewer on both, none on one
SIZES = [
    [4, 4],
    [4, 4],
    [4, 3],
    [4, 1],
    [4, 4],
    [4, 9],
    [10, 9],
    [2, 1],
    [2, 1],
    [2, 1],
    [0, 4],
    [0, 4],
]


def check_words(rank, precision, all_sizes):
    if precision == "fp32":
        torch.set_default_dtype(torch.float64)
    tolerance = 1e-10 if precision == "fp32" else 2e-2
    plain = build_net()
    counts = []
    model, criterion = parallelize(
        build_net(), nn.CrossEntropyLoss(), precision=precision, strategy="fsdp"
    )
    step = TrainStep(
        model,
        criterion,
        sgd(model, lr=0.0),
        precision=precision,
        micro_batch_size=2,
    )
    for number, sizes in enumerate(all_sizes):
        torch.manual_seed(number)
        inputs = torch.randn(sum(sizes), 4)
        targets = class_targets(sum(sizes), ignored=1)
        loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
        mine = inputs.split(sizes)[rank], targets.split(sizes)[rank]
        losses = []
        counts.append(words_of(lambda: losses.append(step(*mine))))  # noqa: B023
        assert_close(losses[0], loss, rtol=tolerance, atol=min(tolerance, 2e-3))
        assert_same_gradients(whole_gradients(model.module), expected, tolerance)
    return counts


def test_hosts_ask_at_the_start_and_the_end_of_a_batch_and_exchange_their_losses():
    counts, others = run_ranks(2, check_words, "fp32", SIZES)
    assert counts == others
    assert counts[1:10] == [3] * 9
    assert counts[10:] == [5, 5]  # a rank without rows has unused parameters, and asks for buffers


def test_more_micro_batches_in_float16():
    """Every micro-batch has one more exchange, of the weight. In the third update rank 1 needs more than rank 0."""
    run_ranks(2, check_words, "fp16", [[4, 4], [4, 1], [3, 9], [31, 1], [0, 2]])


class Branches(nn.Module):
    """Uses another part of its block in each micro-batch, and one of them never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branch() for _ in range(2))
        self.last = nn.Linear(4, 5)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs):
        chosen = inputs[:, :1] > 0
        if chosen.any():
            inputs = inputs + chosen * self.first(inputs)
        return inputs if chosen.all() else inputs + ~chosen * self.second(inputs)


def check_whole_gradients(rank, precision):
    """Reduces gradients once in each update from the third on. Rank 1 has no rows in the last micro-batches."""
    torch.manual_seed(1)
    inputs = torch.randn(10, 4)
    targets = class_targets(10)
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor([1, 1, -1, -1, -1, -1, 1, 1, -1, -1])
    sizes = [6, 4]
    mine = inputs.split(sizes)[rank], targets.split(sizes)[rank]
    plain = Branches()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    model, criterion = parallelize(
        Branches(), nn.CrossEntropyLoss(), precision=precision, strategy="fsdp"
    )
    step = TrainStep(model, criterion, sgd(model, lr=0.0), micro_batch_size=2)
    tolerance = 1e-5 if precision == "fp32" else 5e-2
    counts = []
    fails = False

    def fail(gradient):
        if fails:
            raise ValueError("a failure of all ranks")

    model.module.blocks[0].register_forward_hook(lambda *of: of[2].register_hook(fail) and None)
    for number in range(6):
        fails = number == 4
        if fails:
            with pytest.raises(ValueError, match="a failure of all ranks"):
                step(*mine)
            continue
        found = []
        counts.append(calls_of(lambda: found.append(step(*mine)), "c10d::_reduce_scatter_base_"))  # noqa: B023
        assert_close(found[0], loss, rtol=tolerance, atol=tolerance)
        assert_same_gradients(whole_gradients(model.module), expected, tolerance)
        assert model.module.blocks[0].never.weight.grad is None
    return counts


@keeps_whole_gradients
@pytest.mark.parametrize("precision", [slow("fp32"), "bf16"])
def test_gradients_stay_whole_until_the_last_micro_batch(precision):
    counts = run_ranks(2, check_whole_gradients, precision)
    assert counts == [[9, 9, 3, 3, 3]] * 2  # three units; a failure changes nothing


def added_rows(rank, strategy, plans):
    """Returns the losses of two updates, whose ranks add batches of these numbers of rows."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    step = parallel_step(net, nn.MSELoss(), devices=["cpu"], strategy=strategy)
    losses = []
    for _ in range(2):
        for rows in plans[rank]:
            step.add(torch.ones(rows, 4), torch.zeros(rows, 2))
        losses.append(step.apply().item())
    return losses


@pytest.mark.parametrize(
    "plans",
    [
        [[2], [0, 0]],
        [[2, 0], [0]],
        slow([[2, 0], [0, 0]]),
        slow([[0], [0, 3, 0]]),
    ],
)
def test_a_batch_without_rows_is_not_the_end_of_a_rank(plans):
    losses = run_ranks(2, added_rows, "fsdp", plans)
    assert losses[0] == pytest.approx(losses[1])
    assert losses == [pytest.approx(each) for each in run_ranks(2, added_rows, "ddp", plans)]
