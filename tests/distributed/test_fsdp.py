"""FSDP2 as parallelize sets it up: blocks, meshes, compiled blocks, precision, evaluation, optimizers."""

import os
import warnings

import torch
from helpers.fsdp import Language, language_batch, whole_gradients
from helpers.problems import assert_same_gradients, build_net, class_targets, plain_program
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import BalancedOptimizer, TrainStep, convert_sync_batchnorm, gather, parallelize
from balanced_parallel.distributed.sharding import find_sharded_blocks


class Named(nn.Module):
    """Blocks as the models of Hugging Face name them."""

    _no_split_modules = ("TransformerEncoderLayer",)

    def __init__(self):
        super().__init__()
        self.first, self.other = (nn.TransformerEncoderLayer(4, 1, 4) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_blocks_are_those_of_the_model_or_repeated_modules():
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


def check_mesh(rank):
    """Two hosts with two ranks each: shards over the ranks of a host, copies over the hosts."""
    torch.set_default_dtype(torch.float64)
    words, targets = language_batch()
    before = dict(os.environ)
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    try:
        model, criterion = parallelize(Language(), nn.CrossEntropyLoss(), strategy="fsdp")
    finally:
        os.environ.update(before)
    assert model.module.head.weight.device_mesh.shape == (2, 2)
    assert model.module.blocks[0].linear1.weight.to_local().shape == (8, 8)
    plain = Language()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), words, targets)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=2)
    for sizes in ([4, 0, 3, 2], [1, 1, 6, 1]):
        found = step(words.split(sizes)[rank], targets.split(sizes)[rank])
        torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
        assert_same_gradients(whole_gradients(model.module), expected)
    return True


def test_two_hosts_shard_over_their_ranks_and_copy_over_hosts():
    assert run_ranks(4, check_mesh) == [True] * 4


def check_compiled(rank):
    """Compiled before they are sharded, in both of torch's ways."""
    torch.set_default_dtype(torch.float64)
    words, targets = language_batch(6)
    plain = Language()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), words, targets)
    for way in ("in place", "wrapped"):
        net = Language()
        for index, block in enumerate(net.blocks):
            if way == "in place":
                block.compile(backend="aot_eager")
            else:
                net.blocks[index] = torch.compile(block, backend="aot_eager")
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy="fsdp")
        assert len(model.units) == 4
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=2)
        for sizes in ([2, 4], [6, 0]):
            found = step(words.split(sizes)[rank], targets.split(sizes)[rank])
            torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
            assert_same_gradients(whole_gradients(model.module), expected)
    torch._dynamo.reset()
    return True


def test_compiled_blocks_equal_the_plain_program():
    assert run_ranks(2, check_compiled, timeout=200) == [True, True]


def check_start(rank):
    """Weights of rank 0; an evaluation before the optimizer is made; rows in another dimension; another method."""
    torch.set_default_dtype(torch.float64)
    net = build_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), strategy="fsdp")
    assert_same_gradients([one.full_tensor() for one in model.parameters()], list(build_net().parameters()))
    inputs, targets = torch.randn(7, 4), class_targets(7)
    inputs = inputs.clone()
    torch.distributed.broadcast(inputs, 0)
    mine = slice(0, 7) if rank == 0 else slice(7, None)
    with torch.no_grad():
        torch.testing.assert_close(gather(model(inputs[mine])), build_net()(inputs))
    language = parallelize(Language(), strategy="fsdp")
    with torch.no_grad():
        language(language_batch()[0])
    with warnings.catch_warnings(action="error"):  # FSDP2 warns of outputs that are views
        gather(language(language_batch()[0])).sum().backward()
    assert all(hasattr(one, "full_tensor") for one in language.parameters())  # those of the root too
    plain = build_net()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    found, outputs = step(inputs[mine], targets[mine], return_outputs=True)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(gather(outputs), plain(inputs).detach())
    model.zero_grad()
    net.encode = net.forward
    criterion(model.call("encode", inputs[mine]), targets[mine]).backward()
    assert_same_gradients(whole_gradients(model.module), expected)
    return True


def test_evaluation_and_other_methods_of_ranks_without_rows():
    assert run_ranks(2, check_start) == [True, True]


def check_precision(rank):
    words, targets = language_batch()
    plain = Language()
    loss, _ = plain_program(plain, nn.CrossEntropyLoss(), words, targets)
    model, criterion = parallelize(Language(), nn.CrossEntropyLoss(), precision="bf16", strategy="fsdp")
    seen = []
    model.module.blocks[0].linear1.register_forward_hook(lambda layer, given, output: seen.append(layer.weight.dtype))
    step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), precision="bf16", micro_batch_size=2)
    found = step(words.split([2, 7])[rank], targets.split([2, 7])[rank])
    torch.testing.assert_close(found, loss, rtol=2e-2, atol=2e-2)
    assert set(seen) == {torch.bfloat16}  # all-gathered
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return found.item()


def test_precision_is_that_of_the_gathered_parameters():
    first, second = run_ranks(2, check_precision)
    assert first == second


def check_optimizer(rank):
    """Adam over shards, whose state moves to the plain optimizer and back."""
    torch.set_default_dtype(torch.float64)
    words, targets = language_batch()
    plain = Language()
    whole = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, criterion = parallelize(Language(), nn.CrossEntropyLoss(), strategy="fsdp")
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.01)
    step = TrainStep(model, criterion, optimizer, max_grad_norm=0.5)
    for number in range(4):
        whole.zero_grad()
        nn.functional.cross_entropy(plain(words), targets).backward()
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
        whole.step()
        step(words.split([3, 6])[rank], targets.split([3, 6])[rank])
        state = optimizer.state_dict()
        assert state["param_groups"] == whole.state_dict()["param_groups"]
        for key, values in whole.state_dict()["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(state["state"][key][name], value, rtol=1e-8, atol=1e-10)
        if number == 1:
            optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.01)
            optimizer.load_state_dict(whole.state_dict())
            step = TrainStep(model, criterion, optimizer, max_grad_norm=0.5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-8, atol=1e-10)
    return sum(value.to_local().nbytes for values in optimizer.state.values() for value in values.values() if value.dim())


def test_optimizer_state_is_sharded_and_moves_to_the_plain_optimizer():
    size = sum(2 * parameter.nbytes for parameter in Language().double().parameters())
    parts = run_ranks(2, check_optimizer)
    assert max(parts) < 0.6 * size


def check_sync_batchnorm(rank):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    inputs, targets = torch.randn(6, 4), class_targets(6)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))

    plain = build()
    loss, expected = plain_program(plain, nn.CrossEntropyLoss(), inputs, targets)
    model, criterion = parallelize(convert_sync_batchnorm(build()), nn.CrossEntropyLoss(), strategy="fsdp")
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.testing.assert_close(step(inputs.split([6, 0])[rank], targets.split([6, 0])[rank]), loss)
    assert_same_gradients(whole_gradients(model.module), expected)
    torch.testing.assert_close(model.module[1].running_mean, plain[1].running_mean)
    return True


def test_batch_norm_over_ranks_without_rows():
    assert run_ranks(2, check_sync_batchnorm) == [True, True]
