"""FSDP2 as parallelize sets it up: blocks, loss and gradients of the plain program, ranks that run different blocks."""

import datetime
import functools
import warnings

import pytest
import torch
from helpers.ddp import WAYS, assert_update, make_update
from helpers.fsdp import Language, language_batch, whole_gradients
from helpers.optimizers import sgd
from helpers.problems import assert_same_gradients, build_net, class_targets, plain_program
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import TrainStep, gather, parallelize
from balanced_parallel.runtime.collectives import gather_objects
from balanced_parallel.strategies.fsdp import find_sharded_blocks


class Named(nn.Module):
    """Repeated blocks outside of a list, and plain layers in one."""

    def __init__(self):
        super().__init__()
        self.first, self.other = (nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_blocks_are_repeated_modules():
    named = Named()
    assert find_sharded_blocks(named) == [named.first, named.other]
    net = build_net()
    assert find_sharded_blocks(net) == [net[0], net[2]]
    language = Language()
    assert find_sharded_blocks(language) == list(language.blocks)
    assert find_sharded_blocks(torch.compile(language, backend="eager")) == list(language.blocks)
    language.blocks[1].linear2.weight = language.blocks[0].linear2.weight
    assert find_sharded_blocks(language) == [language.blocks[2]]  # the root has shared parameters
    assert find_sharded_blocks(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("way", ["in place", slow("wrapped")])
@on_ranks(2)
def test_compiled_blocks_equal_the_plain_program(rank, way):
    """Compiled before they are sharded, in both of torch's ways."""
    torch.set_default_dtype(torch.float64)
    batch = language_batch(6)
    net = Language()
    expected = plain_program(Language(), nn.CrossEntropyLoss(), *batch)
    for index, block in enumerate(net.blocks):
        if way == "in place":
            block.compile(backend="aot_eager")
        else:
            net.blocks[index] = torch.compile(block, backend="aot_eager")
    model, update = make_update("micro-batches", net, nn.CrossEntropyLoss(), strategy="fsdp")
    assert len(model.units) == 4
    for sizes in ([2, 4], [6, 0]):
        assert_update(update, model.module, batch, sizes, rank, expected)
    torch._dynamo.reset()


@on_ranks(2)
def test_evaluation_and_other_methods_of_ranks_without_rows(rank):
    """Weights of rank 0; an evaluation before the optimizer is made; rows in another dimension; another method."""
    torch.set_default_dtype(torch.float64)
    net = build_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy="fsdp")
    assert_same_gradients(
        [one.full_tensor() for one in model.parameters()], list(build_net().parameters())
    )
    inputs = torch.randn(7, 4)
    targets = class_targets(7)
    inputs = inputs.clone()
    torch.distributed.broadcast(inputs, 0)
    mine = slice(0, 7) if rank == 0 else slice(7, None)
    with torch.no_grad():
        assert_close(gather(model(inputs[mine])), build_net()(inputs))
    language = parallelize(Language(), strategy="fsdp")
    with torch.no_grad():
        language(language_batch()[0])
    with warnings.catch_warnings(action="error"):  # FSDP2 warns of outputs that are views
        gather(language(language_batch()[0])).sum().backward()
    assert all(
        hasattr(one, "full_tensor") for one in language.parameters()
    )  # those of the root too
    plain = build_net()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    step = TrainStep(model, criterion, sgd(model, lr=0.0))
    found, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    assert_close(found, loss)
    assert_close(gather(outputs), plain(inputs).detach())
    model.zero_grad()
    net.encode = net.forward
    criterion(model.call("encode", inputs[mine]), targets[mine]).backward()
    assert_same_gradients(whole_gradients(model.module), expected)


def check_precision(rank):
    words, targets = language_batch()
    plain = Language()
    loss, _ = plain_program(plain, nn.CrossEntropyLoss(), words, targets)
    model, criterion = parallelize(
        Language(), nn.CrossEntropyLoss(), precision="bf16", strategy="fsdp"
    )
    seen = []
    model.module.blocks[0].linear1.register_forward_hook(
        lambda layer, given, output: seen.append(layer.weight.dtype)
    )
    step = TrainStep(
        model,
        criterion,
        torch.optim.AdamW(model.parameters()),
        precision="bf16",
        micro_batch_size=2,
    )
    found = step(words.split([2, 7])[rank], targets.split([2, 7])[rank])
    assert_close(found, loss, rtol=2e-2, atol=2e-2)
    assert set(seen) == {torch.bfloat16}  # all-gathered
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return found.item()


def test_precision_is_that_of_the_gathered_parameters():
    first, second = run_ranks(2, check_precision)
    assert first == second


shard = functools.partial(parallelize, strategy="fsdp")


@on_ranks(2)
def test_parameters_that_cannot_be_joined_are_refused(rank):
    """torch said so in the first forward: 'FSDP expects uniform original parameter dtype'."""
    for shape, dtype in (
        ((4, 3), torch.complex64),
        ((4, 3), torch.float64),
        ((0, 4), torch.float32),
        ((4, 0), torch.float32),
    ):
        net = nn.Linear(4, 3, dtype=torch.float32)
        net.shift = nn.Parameter(torch.ones(shape, dtype=dtype))
        with pytest.raises(
            ValueError, match=r"(shift|weight) is torch.\w+ of .* use strategy='ddp'"
        ):
            shard(net)
    net = nn.Linear(4, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="weight is torch.complex64 of .*, expected elements"):
        shard(net, precision="bf16")
    assert shard(net)(torch.ones(2, 4, dtype=torch.complex64))[0].shape == (2, 3)


class Poisoned(nn.Module):
    """Returns nan for rows that are marked, draws random numbers, and has batch statistics."""

    is_poisoned = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 5)
        )
        self.layers[1].p = 0.0

    def forward(self, inputs):
        if self.is_poisoned:
            inputs = inputs * torch.nan
        self.layers[2].train(len(inputs) > 1)  # torch refuses statistics of one row
        torch.rand(3)
        return self.layers(inputs)


@on_ranks(2)
def test_forward_without_rows_leaves_no_trace(rank):
    """It is nan, and changes neither gradients nor batch statistics, which are those of the rank with rows, and random numbers as
    a forward with rows does.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    inputs = torch.randn(5, 4)
    targets = class_targets(5)
    plain = Poisoned()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    for way in WAYS:
        model, update = make_update(way, Poisoned(), nn.CrossEntropyLoss(), strategy="fsdp")
        if way == "micro-batches":
            update.micro_batch_size = 5
        for _ in range(2):
            mine = slice(0, 5) if rank == 1 else slice(5, None)
            model.module.is_poisoned = rank == 0
            assert_close(update(inputs[mine], targets[mine]), loss)
            assert_same_gradients(whole_gradients(model.module), expected)
            first, second = gather_objects(torch.get_rng_state().tolist())
            assert first == second
            first, second = gather_objects([buffer.tolist() for buffer in model.buffers()])
            assert first == second
            assert all(buffer.isfinite().all() for buffer in model.buffers())
        assert model.module.layers[2].num_batches_tracked == 2


@on_ranks(2)
def test_failures_have_clear_errors_and_the_step_can_be_repeated(rank):
    inputs = torch.randn(4, 4)
    targets = class_targets(4)
    net = build_net()
    model, criterion = shard(net, nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, sgd(model, lr=0.0), micro_batch_size="auto")
    fails = True

    def fail(module, given):
        if fails:
            raise torch.OutOfMemoryError("too large")

    net[2].register_forward_pre_hook(fail)
    with pytest.raises(
        RuntimeError,
        match="where others wait for it.*give micro_batch_size a smaller number",
    ):
        step(inputs, targets)
    fails = False
    plain = build_net()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    assert_close(step(inputs, targets), loss)  # the same rows on both ranks
    assert_same_gradients(whole_gradients(model.module), expected, 1e-6)

    stranger = nn.Parameter(torch.ones(()))
    model, criterion = shard(
        build_net(),
        lambda output, target: (output * stranger).mean(),
        weight=lambda output, target: 1,
    )
    step = TrainStep(model, criterion, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    with pytest.raises(ValueError, match=r"shape \(\).*make it part of the module"):
        step(inputs, targets)

    model.module[0].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"0\.weight has requires_grad=False, but True when parallelize sharded it"
    ):
        model(inputs)
    with torch.no_grad():
        model(inputs)


@on_ranks(2)
def test_layers_frozen_in_a_forward_without_gradients_are_trained_afterwards(rank):
    """A reference without adapters comes first, as in preference tuning with ``disable_adapter()`` of peft."""
    net = build_net()
    inputs = torch.randn(4, 4)
    targets = class_targets(4)
    net[0].requires_grad_(False)
    plain = build_net()
    plain[0].requires_grad_(False)
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    model, criterion = shard(net, nn.CrossEntropyLoss())
    step = TrainStep(model, criterion, sgd(model, lr=0.0))
    for _ in range(2):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.no_grad():
            assert_close(model(inputs)[0], plain(inputs).detach())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for parameter in trained:
            parameter.requires_grad_(True)
        assert_close(step(inputs, targets), loss)  # the same rows on both ranks
        assert_same_gradients(whole_gradients(model.module), expected, 1e-6)


class Experts(nn.Module):
    """The first feature of a row is the number of its expert. An expert without rows does not run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(4)
        )

    def forward(self, inputs):
        outputs = inputs.new_zeros(len(inputs), 5)
        for number, expert in enumerate(self.experts):
            rows = (inputs[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(inputs[rows]))
        return outputs


@on_ranks(2)
def test_blocks_that_differ_between_ranks_raise_an_error(rank):
    torch.manual_seed(1)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    targets = torch.randint(5, (8,))
    mine = slice(4 * rank, 4 * rank + 4)
    plain = Experts().double()
    net = Experts().double()
    step = parallel_step(net, strategy="fsdp", lr=0.0)
    mixed_up = r"rank 1 ran the block experts\.2 where rank 0 ran experts\.0, expected the same blocks in the same order"
    for experts, is_same in (
        ([0, 1, 2, 3, 0, 1, 2, 3], True),
        ([0, 0, 1, 1, 2, 2, 3, 3], False),
        ([0, 2, 2, 0, 2, 0, 0, 0], True),
    ):
        inputs[:, 0] = torch.tensor(experts)
        if not is_same:  # two blocks on each rank, of equal sizes: FSDP2 has no reason to fail
            with pytest.raises(RuntimeError, match=mixed_up):
                step(inputs[mine], targets[mine])
            with pytest.raises(RuntimeError, match=mixed_up), torch.no_grad():
                step.model(inputs[mine])
            continue
        expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
        assert_update(step, net, (inputs, targets), [4, 4], rank, expected)
        with torch.no_grad():
            assert_close(step.model(inputs[mine])[0], plain(inputs[mine]))


@pytest.mark.parametrize("expert", [2, -1])
@on_ranks(2, timeout=60)
def test_blocks_of_the_first_forward_are_compared_before_they_are_gathered(rank, expert):
    """Shards of other sizes aborted gloo, and a rank without a block waited in the loss."""
    net = Experts()
    net.experts[2] = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5))
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")
    inputs = torch.full((2, 4), float(expert * rank))
    with pytest.raises(RuntimeError, match=r"rank 1 ran the block (none|experts\.2) where rank 0"):
        criterion(model(inputs), torch.zeros(2, dtype=torch.long))


@on_ranks(2, fresh=True)
def test_blocks_that_change_on_one_rank_never_train_on_mixed_parameters(rank):
    """Runs the experts of one rank in another order in the third update. The other rank waits for its shards."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    net = Experts()
    step = parallel_step(net, nn.CrossEntropyLoss(), strategy="fsdp")
    inputs = torch.randn(4, 4)
    targets = torch.randint(5, (4,))
    for update in range(3):
        inputs[:, 0] = torch.tensor([2, 3, 2, 3] if update == 2 and rank == 1 else [0, 1, 0, 1])
        before = [parameter.to_local().clone() for parameter in net.parameters()]
        if update < 2:
            step(inputs, targets)
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout|closed"):
        step(inputs, targets)
    assert all(
        torch.equal(one.to_local(), other)
        for one, other in zip(net.parameters(), before, strict=True)
    )
