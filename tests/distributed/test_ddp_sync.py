"""When DistributedDataParallel's reducer sends what: beside the backward, as by hand, and whatever a rank has used."""

import copy
import warnings

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, class_targets, gradients
from helpers.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import TrainStep, gather, parallelize, weighted_mean

WAYS = ["step", "micro-batches", "criterion"]


def make_update(way, module, criterion):
    """One update with lr=0: by TrainStep at once, by TrainStep in micro-batches, and by hand."""
    model, criterion = parallelize(module, criterion)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.0)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2 if way == "micro-batches" else None)

    def by_hand(inputs, targets):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return model, by_hand if way == "criterion" else step


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


def test_buckets_are_reduced_beside_the_backward_of_the_layers_before():
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


def test_checkpoints_equal_the_plain_program():
    assert run_ranks(2, check_recomputed) == [True, True]


def check_reentrant(rank):
    """Reentrant checkpoints run a backward inside of the backward, which DistributedDataParallel does not support."""
    for way in WAYS:
        _, update = make_update(way, Recomputed(use_reentrant=True), nn.CrossEntropyLoss())
        with pytest.raises(RuntimeError, match="reentrant backward passes"):
            update(torch.randn(3, 4, dtype=torch.float64), class_targets(3))
    return True


def test_reentrant_checkpoints_are_an_error():
    assert run_ranks(2, check_reentrant) == [True, True]


class Chosen(nn.Module):
    """Uses one of its branches, or none, as it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, CLASSES).double()
        self.branches = nn.ModuleList(nn.Linear(CLASSES, CLASSES).double() for _ in range(60))
        self.chosen = 0

    def forward(self, inputs):
        hidden = self.first(inputs)
        return hidden if self.chosen is None else self.branches[self.chosen](hidden)


def check_chosen(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    halves = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    for way in WAYS:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        for chosen in [(0, 0), (0, 0), (1, 2), (None, 1), (0, 1), (None, None), (2, 2)]:
            plain.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for plain.chosen, (some, wanted) in zip(chosen, halves, strict=True):
                total = total + nn.functional.cross_entropy(plain(some), wanted, reduction="sum")
            (total / 6).backward()
            model.module.chosen = chosen[rank]
            torch.testing.assert_close(update(*halves[rank]), (total / 6).detach(), rtol=1e-10, atol=1e-10)
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_unused_parameters_may_differ_between_ranks_and_steps():
    assert run_ranks(2, check_chosen) == [True, True]


def test_unused_parameters_may_differ_where_the_reducer_debugs(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")  # its errors then have names too, which may be numbers
    assert run_ranks(2, check_chosen, fresh=True) == [True, True]


LOSSES = {
    "of the model's own": lambda outputs, wanted: weighted_mean([nn.functional.cross_entropy(outputs[0], wanted)], [len(wanted)]),
    "of all outputs": lambda outputs, wanted: nn.functional.cross_entropy(gather(outputs), gather([wanted])),
    "by hand": lambda outputs, wanted: nn.functional.cross_entropy(outputs[0], wanted, reduction="sum") * 2 / 6,
}


def check_own_losses(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    plain = Chosen()
    nn.functional.cross_entropy(plain(inputs), targets).backward()
    for loss_of in LOSSES.values():
        model, _ = parallelize(Chosen(), nn.CrossEntropyLoss())
        for _ in range(3):
            model.zero_grad()
            loss_of(model(inputs[mine]), targets[mine]).backward()
            assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_losses_without_the_criterion_are_reduced_too():
    assert run_ranks(2, check_own_losses) == [True, True]


def check_chain(rank):
    """A loss that goes through two parallelized models, as a generator's does."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    plain = [nn.Linear(4, 4).double(), Chosen()]
    nets = copy.deepcopy(plain)
    nn.functional.cross_entropy(plain[1](plain[0](inputs)), targets).backward()
    generator, _ = parallelize(nets[0], nn.MSELoss())
    judge, criterion = parallelize(nets[1], nn.CrossEntropyLoss())
    for _ in range(3):
        generator.zero_grad()
        judge.zero_grad()
        criterion(judge(generator(inputs[mine])[0]), targets[mine]).backward()
        assert_same_gradients(gradients(*nets), gradients(*plain))
    return True


def test_one_loss_through_two_models():
    assert run_ranks(2, check_chain) == [True, True]


def check_two_losses(rank):
    """A loss of the user's own beside the criterion's, over parameters that the criterion's leaves out, as it does others."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    model, criterion = parallelize(Chosen(), nn.CrossEntropyLoss())
    for _ in range(3):
        model.zero_grad()
        loss = criterion(model(inputs), targets) + model.module.branches[1].weight.sum()
        loss.backward()
        assert model.module.first.weight.grad.any()
        torch.testing.assert_close(model.module.branches[1].weight.grad, torch.ones(CLASSES, CLASSES, dtype=torch.float64))
    return True


def test_a_second_loss_may_use_what_the_criterion_leaves_out():
    assert run_ranks(2, check_two_losses) == [True, True]


def check_gradients_alone(rank):
    model, criterion = parallelize(Chosen(), nn.CrossEntropyLoss())
    inputs, targets = torch.randn(2, 4, dtype=torch.float64), class_targets(2)
    for _ in range(3):
        criterion(model(inputs), targets).backward()
        kept = model.module.first.weight.grad.add_(rank).clone()  # what ranks do not share shows whether it was reduced
        gradient, *_ = torch.autograd.grad(criterion(model(inputs), targets), model.module.first.weight)
        assert gradient.any()
        assert torch.equal(model.module.first.weight.grad, kept)
        model.zero_grad()
    return True


def test_a_gradient_asked_of_autograd_leaves_the_reducer_as_it_was():
    assert run_ranks(2, check_gradients_alone) == [True, True]


def check_frozen(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    for way in WAYS:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        for frozen in (False, True, True, False):
            plain.zero_grad()
            for net in (plain, model.module):
                net.first.requires_grad_(not frozen)
            nn.functional.cross_entropy(plain(inputs), targets).backward()
            update(inputs[mine], targets[mine])
            assert_same_gradients(gradients(model.module), gradients(plain))
            assert [p.requires_grad for p in model.module.first.parameters()] == [not frozen] * 2
    return True


def test_layers_may_be_frozen_for_a_while():
    assert run_ranks(2, check_frozen) == [True, True]


def check_strangers(rank):
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), class_targets(4)
    for way in WAYS:
        module = Chosen()
        module.first.requires_grad_(False)
        _, update = make_update(way, module, nn.CrossEntropyLoss())
        update(inputs, targets)
        module.first.requires_grad_(True)
        with pytest.raises(ValueError, match=r"first\.weight requires a gradient.*call parallelize again"):
            update(inputs, targets)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    model, criterion = parallelize(
        Chosen(),
        lambda output, target: nn.functional.cross_entropy(output * scale, target),
        weight=lambda output, target: len(target),
    )
    step = TrainStep(model, criterion, torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    with pytest.raises(ValueError, match=r"shape \(\).*make it part of the module or of the criterion"):
        step(inputs, targets)
    return True


def test_a_gradient_that_no_rank_would_share_is_an_error():
    assert run_ranks(2, check_strangers) == [True, True]


def check_two_criteria(rank):
    """The loss of two forwards, added before one backward."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), class_targets(6)
    plain = Chosen()
    (2 * nn.functional.cross_entropy(plain(inputs), targets)).backward()
    model, criterion = parallelize(Chosen(), nn.CrossEntropyLoss())
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    for _ in range(2):
        model.zero_grad()
        (criterion(model(inputs[mine]), targets[mine]) + criterion(model(inputs[mine]), targets[mine])).backward()
        assert_same_gradients(gradients(model.module), gradients(plain))
    return True


def test_two_losses_before_one_backward():
    assert run_ranks(2, check_two_criteria) == [True, True]


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


def test_sparse_gradients_of_ranks_that_have_none():
    assert run_ranks(3, check_sparse) == [True] * 3


def quantize(state, bucket):
    """Rounds a whole bucket to 7 bits, by its largest entry."""
    buffer = bucket.buffer()
    unit = buffer.abs().max() / 127
    buffer.copy_((buffer / unit).round() * unit if unit else buffer)
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0] / 2)


def check_bucketwise(rank):
    torch.manual_seed(1)
    inputs, targets = torch.randn(600, 4, dtype=torch.float64), class_targets(600)
    mine = slice(0, 200) if rank == 0 else slice(200, None)
    for way in ["step", "criterion"]:
        plain, (model, update) = Chosen(), make_update(way, Chosen(), nn.CrossEntropyLoss())
        model.register_comm_hook(None, quantize)
        loss = nn.functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        for _ in range(3):
            torch.testing.assert_close(update(inputs[mine], targets[mine]), loss.detach(), rtol=1e-10, atol=1e-10)
            largest = max(gradient.abs().max() for gradient in gradients(plain) if gradient is not None)
            assert_same_gradients(gradients(model.module), gradients(plain), 0.02 * largest.item())
    return True


def test_a_hook_that_compresses_whole_buckets_finds_gradients_alone_in_them():
    assert run_ranks(2, check_bucketwise) == [True, True]


def check_batched(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook

    model, _ = parallelize(Chosen(), nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="torch raises an AssertionError without a message.*use powerSGD_hook"):
        model.register_comm_hook(PowerSGDState(None), batched_powerSGD_hook)
    return True


def test_a_hook_that_torch_cannot_run_is_named():
    assert run_ranks(2, check_batched) == [True, True]


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
