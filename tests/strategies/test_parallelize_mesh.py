"""Ranks that share a batch are a dimension of a mesh: the others compute with the same rows."""

import pytest
import torch
from helpers.ddp import assert_update
from helpers.fsdp import Language, language_batch, whole
from helpers.optimizers import sgd
from helpers.problems import plain_program
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from balanced_parallel import (
    BalancedOptimizer,
    Checkpoints,
    RankBatchSampler,
    TrainStep,
    convert_sync_batchnorm,
    gather,
    parallelize,
)
from balanced_parallel.strategies.ddp import DistributedModel


def build():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)
    return convert_sync_batchnorm(nn.Sequential(*layers)).double()


def train(place, mesh, strategy):
    """Returns the losses and parameters of updates by TrainStep and by hand, with uneven rows, dropout and batch norm."""
    module = build() if strategy == "ddp" else Language(0.5).double()
    sizes = [6, 4]
    model, criterion = parallelize(module, nn.CrossEntropyLoss(), strategy=strategy, mesh=mesh)
    optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=0.1)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=3, max_grad_norm=1.0)
    inputs, targets = language_batch(10)
    if strategy == "ddp":
        inputs = torch.nn.functional.one_hot(inputs[:, 0] % 4, 4).double()
        targets = targets[:, 0] % 5
    inputs = inputs.split(sizes)[place]
    targets = targets.split(sizes)[place]
    losses = [step(inputs, targets).item() for _ in range(3)]
    for _ in range(2):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        outputs = gather(model.eval()(inputs))
    sampler = RankBatchSampler(range(10), 10)
    moments = [values["exp_avg"].tolist() for values in optimizer.state_dict()["state"].values()]
    # Under DDP, it has the parameters of this rank.
    local = getattr(optimizer.shards.inner, "optim", optimizer)
    owned = sum(tensor.numel() for values in local.state.values() for tensor in values.values())
    parameters = [whole(parameter).tolist() for parameter in model.parameters()]
    return losses, parameters, outputs.tolist(), [*sampler], moments, owned


def train_on_a_mesh(rank, strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "copies"))
    result = train(rank // 2, mesh["data"], strategy)
    frozen = parallelize(nn.Linear(2, 2).requires_grad_(False))  # keeps the ranks
    assert frozen(torch.zeros(3, 2)).sizes == (3,)
    with pytest.raises(
        ValueError,
        match=r"mesh= has the ranks \[.*\], and a model before has \[.*expected the same ranks",
    ):
        parallelize(nn.Linear(2, 2), mesh=mesh["copies"])
    with pytest.raises(
        ValueError,
        match=r"mesh= has the dimensions \('data', 'copies'\), expected one, of the ranks",
    ):
        parallelize(nn.Linear(2, 2), mesh=mesh, strategy="ddp")
    with pytest.raises(
        ValueError, match="Checkpoints with mesh= of 2 of 4 ranks, expected all ranks"
    ):
        Checkpoints("unused", model=nn.Linear(2, 2)).load_latest()
    return result


def train_without_a_mesh(rank, strategy):
    return train(rank, None, strategy)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_ranks_that_compute_with_the_same_rows_change_no_number(strategy):
    expected = run_ranks(2, train_without_a_mesh, strategy)
    found = run_ranks(4, train_on_a_mesh, strategy, fresh=True)
    for rank, result in enumerate(found):
        assert result == expected[rank // 2]


@on_ranks(4)
def test_a_mesh_may_have_copies_and_shards(rank):
    """Two copies of shards over two ranks, and the whole world as one dimension."""
    batch = language_batch(8)
    expected = plain_program(Language().double(), nn.CrossEntropyLoss(), *batch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for dimensions in (mesh, init_device_mesh("cpu", (4,))):
        model, criterion = parallelize(Language().double(), nn.CrossEntropyLoss(), mesh=dimensions)
        assert isinstance(model, DistributedModel) == (dimensions.ndim == 1)
        step = TrainStep(model, criterion, sgd(model, lr=0.0))
        assert_update(step, model.module, batch, [4, 0, 3, 1], rank, expected)
