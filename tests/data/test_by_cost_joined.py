"""``collate=`` that joins samples: packed rows, graphs and nested tensors stay whole on one device.

The result of such a ``collate`` is marked with ``Whole``. The loss and the gradients are those of all samples, one by one.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import fsdp
from helpers.loops import Calls
from helpers.optimizers import sgd
from helpers.pages import blocks
from helpers.problems import assert_same_gradients, gradients
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from helpers.updates import values_of
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    ByCost,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    Whole,
    convert_sync_batchnorm,
    simulate,
)

LENGTHS = [9, 3, 4, 2, 3, 7, 5, 12, 1]
WORDS = 37
TAGS = 5


def make_samples(lengths=LENGTHS):
    numbers = torch.Generator().manual_seed(5)
    return [
        {"input_ids": torch.randint(1, WORDS, (length,), generator=numbers).tolist()}
        for length in lengths
    ]


def tokens_of(sample):
    return len(sample["input_ids"])


def assert_equal(loss, net, expected):
    assert_close(loss.cpu(), expected[0], rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected[1])


def make_step(net, cut, criterion=None, devices=("cpu",) * 3, lr=0.0, **settings):
    model = DataParallelModel(net, list(devices))
    optimizer = sgd(net, lr=lr)
    return TrainStep(
        model,
        criterion or DataParallelCriterion(nn.CrossEntropyLoss()),
        optimizer,
        cut=cut,
        **settings,
    )


# A model of one packed row, of which each position knows its sample


class Packed(nn.Module):
    """The mean of the words of each sample, at each of them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 8)
        self.tags = nn.Linear(16, TAGS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words, places):
        states = self.dropout(self.words(words))  # 1 x words x 8
        same = (places[0, :, None] == places[0]).to(states.dtype)
        return self.tags(
            torch.cat([states, same / same.sum(1, keepdim=True) @ states], 2)
        ).transpose(1, 2)


def join(samples):
    words = torch.tensor([[word for sample in samples for word in sample["input_ids"]]])
    sizes = torch.tensor([tokens_of(sample) for sample in samples])
    tags = (words % TAGS).where(words % 7 > 0, -100)
    return {
        "words": words,
        "places": torch.arange(len(samples)).repeat_interleave(sizes)[None],
    }, tags


def whole(samples):
    return Whole(join(samples))


def packed_program(samples, net=None):
    """Returns the loss and the gradients of the plain program on one packed row of all samples."""
    net = copy.deepcopy(net or Packed().double())
    inputs, tags = join(samples)
    loss = F.cross_entropy(net(**inputs), tags)
    loss.backward()
    return loss.detach(), gradients(net)


class Normed(Packed):
    """Holds the statistics of all tokens of a forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(TAGS)

    def forward(self, words, places):
        return self.norm(super().forward(words, places))


def test_no_samples_in_one_process_change_nothing():
    net = Normed().double()
    samples = make_samples()
    plain = copy.deepcopy(net)
    plain(**join(samples)[0])
    step = make_step(net, ByCost(tokens_of, collate=whole, combine=sum), devices=["cpu"])
    step.add(samples)
    step.add([])
    assert_equal(step.apply(), net, packed_program(samples, Normed().double()))
    assert_close(net.norm.running_mean, plain.norm.running_mean, rtol=1e-10, atol=1e-10)
    with pytest.warns(UserWarning, match="no target of this batch was counted"):
        _, outputs = step([], return_outputs=True)
    assert outputs == []
    assert net.norm.num_batches_tracked == 1


def train_with_batch_norm(rank, expected, first):
    """Trains on samples of the first batch of this rank, then on some of the second rank alone."""
    net = convert_sync_batchnorm(Normed().double())
    cut = ByCost(tokens_of, collate=whole, combine=sum)
    step = parallel_step(net, devices=["cpu"], lr=0.0, cut=cut)
    samples = make_samples()
    assert_close(step(samples[first[rank]]), expected, rtol=1e-10, atol=1e-10)
    step(samples[7:] if rank else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "message"),
    [
        ((slice(7), slice(7, None)), "has no samples, and collate= joins them, expected one"),
        ((slice(None), slice(0)), "had no sample in its first batch"),
    ],
)
def test_a_rank_without_samples_is_refused_if_others_wait_for_its_batch_norm(first, message):
    expected, _ = packed_program(make_samples(), Normed().double())
    with pytest.raises(AssertionError, match=f"this rank {message}"):
        run_ranks(2, train_with_batch_norm, expected, first, fresh=True)


def unmarked_targets(samples):
    inputs, tags = join(samples)
    return Whole(inputs), Whole(tags)


def count_one(output, tags):
    return 1


ROWS_REFUSED = r"collate was given 3 samples and returned inputs with 1 rows, expected one for each.*return Whole\("


@pytest.mark.parametrize(
    ("collate", "weight", "settings", "message"),
    [
        (
            whole,
            "rows",
            {},
            "weight='rows' with samples joined into fewer rows, expected a function that counts",
        ),
        (
            whole,
            count_one,
            {"reproducible": True},
            "reproducible=True with samples that collate= joins",
        ),
        (join, count_one, {}, ROWS_REFUSED),
        (
            unmarked_targets,
            count_one,
            {},
            "collate was given 3 samples and returned targets with no rows",
        ),
    ],
)
def test_joined_samples_that_are_refused(collate, weight, settings, message):
    criterion = DataParallelCriterion(lambda output, tags: output.mean(), weight=weight)
    step = make_step(
        Packed(dropout=0.5), ByCost(tokens_of, collate=collate, combine=sum), criterion, **settings
    )
    with pytest.raises(ValueError, match=message):
        step(make_samples([4] * 9))


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
@on_ranks(2)
def test_ranks_join_their_own_samples(rank, strategy):
    samples = make_samples()
    plain = Packed().double()
    net = Packed().double()
    cut = ByCost(tokens_of, collate=whole, combine=sum, limit=14)
    step = parallel_step(net, devices=["cpu"], strategy=strategy, lr=1.0, cut=cut)
    for first, second in ((samples[:2], []), (samples[:7], samples[7:]), ([], samples[2:5])):
        loss, updates = packed_program(first + second, plain)
        for parameter, update in zip(plain.parameters(), updates, strict=True):
            parameter.data -= update
        assert_close(step(second if rank else first), loss, rtol=1e-10, atol=1e-10)
    found = [fsdp.whole(parameter).detach() for parameter in net.parameters()]
    assert_close(found, values_of(plain), rtol=1e-10, atol=1e-10)


# Objects: nested tensors, graphs


def join_nested(samples):
    rows = torch.nested.nested_tensor([row for row, _ in samples], layout=torch.jagged)
    return Whole((rows, torch.cat([tags for _, tags in samples])))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_are_made_on_each_device(double):
    samples = [(torch.randn(length, 4), torch.randint(TAGS, (length,))) for length in LENGTHS]
    net, plain = (Calls(lambda net, rows: net(rows).values()) for _ in range(2))
    rows, tags = join_nested(samples).value
    loss = F.cross_entropy(plain(rows), tags)
    loss.backward()
    cut = ByCost(lambda sample: len(sample[0]), collate=join_nested, combine=sum, limit=12)
    found, outputs = make_step(net, cut)(samples, return_outputs=True)
    assert_equal(found, net, (loss.detach(), gradients(plain)))
    assert max(map(len, outputs)) == 12
    with pytest.raises(ValueError, match="rows of the batch, expected as many for a cut by cost"):
        outputs.gather()
    criterion = DataParallelCriterion(
        lambda output, tags: F.cross_entropy(output, tags), weight="rows"
    )
    for inputs, targets in ((rows, tags), (torch.randn(len(LENGTHS), 4), rows)):
        with pytest.raises(TypeError, match=r"a nested tensor cannot be split by rows.*collate="):
            make_step(net, None, criterion)(inputs, targets)


class Movable:
    """An object with tensors that ``to`` changes in place, as that of torch_geometric's ``Batch`` does."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_objects_are_moved_to_the_device_of_their_replica():
    samples = [(torch.randn(4), row % TAGS) for row in range(6)]

    def collate(samples):
        rows, targets = zip(*samples, strict=True)
        return Whole((Movable(torch.stack(rows)), torch.tensor(targets)))

    batch, net = collate(samples).value[0], Calls(lambda net, batch: net(batch.x))
    expected = net(batch).detach()
    with simulate(2) as cluster:
        (output,) = DataParallelModel(net, cluster.devices)(Whole(batch))
        assert output.device == cluster.devices[0]
        step = make_step(net, ByCost(lambda sample: 1, collate=collate), devices=cluster.devices)
        _, outputs = step(samples, return_outputs=True)
        assert [output.device for output in outputs] == cluster.devices
        assert_close(outputs.gather("cpu"), expected)
    assert batch.x.device.type == "cpu"  # the object of the caller stays where it is


# torch_geometric


class GraphNet(nn.Module):
    """Two graph convolutions. ``pools`` makes a row per graph of the rows of its nodes."""

    def __init__(self, pools):
        super().__init__()
        from torch_geometric.nn import GCNConv

        torch.manual_seed(1)
        self.pools = pools
        self.first = GCNConv(3, 8)
        self.second = GCNConv(8, TAGS)

    def forward(self, graphs):
        from torch_geometric.nn import global_mean_pool

        nodes = self.second(self.first(graphs.x, graphs.edge_index).relu(), graphs.edge_index)
        return global_mean_pool(nodes, graphs.batch, graphs.num_graphs) if self.pools else nodes


def make_graphs(pools):
    from torch_geometric.data import Data

    graphs = []
    for number, nodes in enumerate(LENGTHS):
        targets = torch.tensor([number % TAGS]) if pools else torch.randint(TAGS, (nodes,))
        graphs.append(
            Data(
                x=torch.randn(nodes, 3), edge_index=torch.randint(nodes, (2, 2 * nodes)), y=targets
            )
        )
    return graphs


def batch_graphs(graphs):
    """Runs the function of the page."""
    (block,) = [
        block
        for block in blocks("docs/recipes/ragged_rows.md", "py")
        if "def batch_graphs" in block
    ]
    exec(block[: block.index("cut = ")], names := {})
    return names["batch_graphs"](graphs)


LOSSES = {
    "function": lambda output, targets: 2 * F.cross_entropy(output, targets),
    "module": nn.CrossEntropyLoss(ignore_index=1, weight=torch.rand(TAGS, dtype=torch.float64)),
}


@pytest.mark.parametrize(
    ("pools", "name", "limit"),
    [
        (True, "function", 14),
        (False, "module", 14),
        slow(True, "module", None),
        slow(False, "function", None),
    ],
)
def test_graphs_of_torch_geometric(double, pools, name, limit):
    pytest.importorskip("torch_geometric")
    net = GraphNet(pools)
    graphs = make_graphs(pools)
    loss = LOSSES[name]
    batch = batch_graphs(graphs).value[0]
    plain = copy.deepcopy(net)
    expected = loss(plain(batch), batch.y)
    expected.backward()
    cut = ByCost(lambda graph: graph.num_nodes, collate=batch_graphs, combine=sum, limit=limit)
    step = make_step(net, cut, DataParallelCriterion(loss))
    found, outputs = step(batch.to_data_list(), return_outputs=True)
    assert_equal(found, net, (expected.detach(), gradients(plain)))
    if pools:
        assert_close(outputs.gather(), plain(batch), rtol=1e-10, atol=1e-10)
    with pytest.raises(
        TypeError,
        match=r"inputs\[0\] is an object of type DataBatch that holds tensors.*Whole\(\.\.\.\)",
    ):
        DataParallelModel(net, ["cpu"] * 2)(batch)
