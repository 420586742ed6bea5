"""``parallelize``: models without a criterion, other methods than forward, other losses, rows in other dimensions.

Metrics under torchrun: with a reduction over the ranks of their own, and without.

The strategy of ``parallelize``: what fits one device, and what is impossible.
"""

import logging
import re
from pathlib import Path

import pytest
import torch
from helpers.problems import (
    build_net,
    class_batch,
)
from helpers.ranks import on_ranks, run_ranks
from torch import nn

from balanced_parallel import (
    DataParallelModel,
    gather,
    parallelize,
)
from balanced_parallel.strategies import parallelize as strategy
from balanced_parallel.strategies.ddp import DistributedModel
from balanced_parallel.strategies.fsdp import ShardedModel


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = build_net()
        self.text = build_net()

    def encode_image(self, x, scale):
        return self.image(x) * scale.sum()

    def forward(self, x, scale=None):
        return self.text(x)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_error_for_a_method_of_the_module_names_call(rank, strategy):
    model = parallelize(TwoTowers(), strategy=strategy)
    with pytest.raises(
        AttributeError,
        match=r"no attribute 'encode_image', which .*: write model.call\('encode_image', ",
    ):
        model.encode_image(torch.randn(2, 4), torch.ones(3))
    with pytest.raises(AttributeError, match="no attribute 'encode'$"):
        model.encode(torch.randn(2, 4))


@on_ranks(2)
def test_module_without_trainable_parameters_raises_an_error(rank):
    with pytest.raises(
        ValueError, match="no parameter of the module requires a gradient, expected one at least"
    ):
        parallelize(build_net().requires_grad_(False), nn.CrossEntropyLoss())


PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"
METRIC_SIZES = [[3, 2], [1, 0]]  # rows of each rank in each batch


def metric_of_the_page():
    """Returns the metric that the page defines, which sums over the ranks in compute()."""
    names = {"torch": torch}
    (source,) = re.findall(
        r"^class Hits:.*?return whole\n", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    exec(compile(source, str(PAGE), "exec"), names)
    return names["Hits"]()


def batches():
    torch.manual_seed(0)
    net = build_net()
    x, targets = class_batch(6)
    predictions = net(x).argmax(1)
    return (
        net,
        list(zip(x.split([5, 1]), targets.split([5, 1]), strict=True)),
        [int((predictions == targets).sum()), 6],
    )


def classes(output):
    return output.argmax(1)


@on_ranks(2)
def test_metrics_count_every_row_once(rank):
    net, whole, expected = batches()
    model, _ = parallelize(net, nn.CrossEntropyLoss())
    reducing = metric_of_the_page()
    gathered = torch.zeros(2, dtype=torch.long)
    twice = metric_of_the_page()
    with torch.no_grad():
        for (x, targets), sizes in zip(whole, METRIC_SIZES, strict=True):
            x = x.split(sizes)[rank]
            targets = targets.split(sizes)[rank]
            outputs = model(x).map(classes)
            reducing.update(outputs.on(targets.device), targets)
            assert gather([targets], ranks=False).tolist() == targets.tolist()
            predictions = gather(outputs)
            labels = gather([targets])
            gathered += torch.stack([(predictions == labels).sum(), torch.tensor(len(labels))])
            twice.update(predictions, labels)
    assert reducing.compute().tolist() == gathered.tolist() == expected
    # This is the reason for outputs.on().
    assert twice.compute().tolist() == [2 * count for count in expected]


def check_auto(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    strategy._log.addHandler(handler)
    strategy._log.setLevel(logging.INFO)
    free_bytes = strategy.free_bytes
    size = 4 * sum(parameter.nbytes for parameter in build_net().parameters())
    found = []
    try:
        for mine in (2 * size, 2 * size - 1):
            # one rank has less than the other; the two share the memory of this machine
            strategy.free_bytes = lambda device, mine=mine: 2 * mine if rank == 0 else 2**40
            model, _ = parallelize(build_net(), nn.CrossEntropyLoss())
            found.append(type(model))
        assert isinstance(parallelize(build_net().requires_grad_(False)), DataParallelModel)
    finally:
        strategy._log.removeHandler(handler)
        strategy.free_bytes = free_bytes
    assert found == [DistributedModel, ShardedModel]
    with pytest.raises(
        ValueError, match="strategy='replicas' with 2 ranks, expected 'auto', 'ddp' or 'fsdp'"
    ):
        parallelize(build_net(), nn.CrossEntropyLoss(), strategy="replicas")
    return lines


def test_auto_shards_a_model_that_is_too_large_for_one_device():
    first, second = run_ranks(2, check_auto)
    assert not second
    assert len(first) == 2
    state = "needs 1.02 KiB (parameters, gradients and AdamW's state) of 1.02 KiB"
    assert first[0] == f"strategy='auto' is 'ddp': under 'ddp' a rank {state}"
    assert first[1].startswith("strategy='auto' is 'fsdp'")


@on_ranks(1)
def test_one_rank_is_a_replica_with_every_strategy(rank):
    for name in ("auto", "replicas", "ddp", "fsdp"):  # one rank has nothing to share
        assert isinstance(
            parallelize(build_net(), nn.CrossEntropyLoss(), strategy=name)[0], DataParallelModel
        )


def replace_head(net):
    net[2] = nn.Linear(6, 5)


def add_adapter(net):
    net[1] = nn.Sequential(net[1], nn.Linear(6, 6))


def assign_weight(net):
    net[2].weight = nn.Parameter(torch.zeros(5, 6))


def register_parameter(net):
    net[0].register_parameter("scale", nn.Parameter(torch.ones(6)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_parameters_that_came_after_parallelize_are_refused_in_a_loop_by_hand(rank, strategy):
    """Their gradients were not reduced, and the ranks drifted apart."""
    x, target = class_batch(2)
    for change in (replace_head, add_adapter, assign_weight, register_parameter):
        net = build_net()
        model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy=strategy)
        for _ in range(2):  # FSDP2 leaves whole parameters behind a forward.
            outputs = model(x)
        criterion(outputs, target).backward()
        change(net)
        with pytest.raises(
            ValueError,
            match="the parameter [0-9]+.*(weight|bias|scale) came after parallelize, .*expected",
        ):
            model(x)
        with torch.no_grad():
            model(x)
    frozen = build_net()
    model, criterion = parallelize(frozen, nn.CrossEntropyLoss(), ["cpu"], strategy=strategy)
    frozen[1] = nn.Sequential(frozen[1], nn.Linear(6, 6).requires_grad_(False))
    criterion(model(x), target).backward()


@on_ranks(2)
def test_modules_that_are_sharded_or_have_sparse_gradients_are_not_sharded(rank):
    """The errors were those of torch, an assertion and an operator that is not there."""
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="embedding '0' has sparse=True.*or strategy='ddp'"):
        parallelize(sparse, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")
    net = build_net()
    parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")
    replace_head(net)
    with pytest.raises(
        ValueError, match="the module was sharded before, .*expected one that is not sharded"
    ):
        parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")


@on_ranks(2)
def test_a_strategy_is_one_entry_of_a_table(rank):
    def wrap(on_rank):
        return DistributedModel(on_rank.module, on_rank.device, None, **on_rank.settings)

    strategy.OVER_RANKS["mine"] = strategy.RankStrategy(wrap)
    try:
        model = parallelize(build_net(), device_ids=["cpu"], strategy="mine")
        with pytest.raises(ValueError, match="expected 'auto', 'ddp' or 'fsdp' or 'mine'"):
            parallelize(build_net(), strategy="replicas")
    finally:
        del strategy.OVER_RANKS["mine"]
    assert type(model) is DistributedModel
