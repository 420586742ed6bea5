"""Models that return several rows for each row: joined only where their order is known."""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls
from helpers.problems import (
    assert_equal,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
    plain_program,
)
from helpers.ranks import on_ranks
from helpers.steps import still_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, gather, parallelize

pytestmark = pytest.mark.usefixtures("double")
ADVICE = r"2 for each.*return out\.chunk\(2\).*in_order"


def views(form=lambda out: out):
    """Returns a model of two views of each row: in one output sorted by view, as DINO's multi-crop and SimCLR, or as a tuple."""
    return Calls(lambda net, x: form(net(torch.cat([x, x.flip(1)]))))


def contrast(features, target):
    """Pairs row ``i`` of the first view with row ``i`` of the second."""
    first, second = features.chunk(2)
    return F.cross_entropy(first @ second.t(), torch.arange(len(first))) + F.cross_entropy(
        first, target
    )


def contrast_of_pair(first, second, target):
    return contrast(torch.cat([first, second]), target)


def test_gather_refuses_several_rows_for_each_row():
    outputs = DataParallelModel(views(), CPUS)(torch.randn(7, 4))
    for given in (outputs, outputs.map(F.normalize)):
        with pytest.raises(
            ValueError,
            match=rf"output has \[6, 4, 4\] rows for \[3, 2, 2\] rows of the batch, {ADVICE}",
        ):
            gather(given)
    with pytest.raises(
        TypeError, match=r"outputs of 2 calls of a model, expected those of one call: gather "
    ):
        gather([outputs, DataParallelModel(build_net(), CPUS)(torch.randn(7, 4))])
    mapping = DataParallelModel(views(lambda out: {"x": out}), CPUS)(torch.randn(7, 4))
    with pytest.raises(ValueError, match=r"output\['x'\] has \[6, 4, 4\] rows"):
        mapping.gather()
    assert len(DataParallelModel(views(), ["cpu"])(torch.randn(7, 4)).gather()) == 14
    with pytest.raises(ValueError, match=ADVICE):
        DataParallelModel(views(), CPUS, gather_outputs=True)(torch.randn(7, 4))
    assert len(DataParallelModel(views(), ["cpu"], gather_outputs=True)(torch.randn(7, 4))) == 14


def test_both_named_ways_equal_the_plain_program():
    x = torch.randn(7, 4)
    net = views()
    expected = net(x)
    chunks = DataParallelModel(views(lambda out: out.chunk(2)), CPUS)
    assert_close(torch.cat(gather(chunks(x))), expected)
    by_view = [
        row + 7 * view for rows in ([0, 1, 2], [3, 4], [5, 6]) for view in (0, 1) for row in rows
    ]
    assert_close(DataParallelModel(net, CPUS)(x).in_order(by_view).gather(), expected)


def test_tokens_are_gathered_with_an_order_and_need_none_in_a_criterion():
    """The tokens of a row are beside each other."""
    net = Calls(lambda net, x: net(torch.stack([x, x * 2, x * 3], 1)).flatten(0, 1))
    x = torch.randn(7, 4)
    targets = class_targets(21)
    model = DataParallelModel(net, CPUS)
    with pytest.raises(ValueError, match=r"3 for each.*in_order\(range\(21\)\)"):
        gather(model(x))
    assert_close(model(x).in_order(range(21)).gather(), net(x))
    loss = DataParallelCriterion(nn.CrossEntropyLoss())(model(x), targets)
    assert_close(loss, F.cross_entropy(net(x), targets))


def test_other_numbers_of_rows_are_gathered_as_they_are():
    """Boxes that a detector finds, and pooled rows: their numbers are not those of views."""
    x = torch.arange(28.0).view(7, 4)
    for function in (lambda net, x: net(x)[1:], lambda net, x: net(x).mean(0, keepdim=True)):
        gather(DataParallelModel(Calls(function), CPUS)(x))


@pytest.mark.parametrize(
    ("devices", "size"), [(3, None), (1, 3)], ids=["replicas", "micro-batches"]
)
def test_a_whole_loss_refuses_several_rows_for_each_row(devices, size):
    x = torch.randn(6, 4)
    target = torch.randint(5, (6,))
    net = views()
    pair = views(lambda out: out.chunk(2))
    loss, expected = plain_program(net, contrast, x, target)
    with pytest.raises(ValueError, match=r"rows of the batch, 2 for each.*return out\.chunk\(2\)"):
        still_step(
            net, DataParallelCriterion(contrast, whole=True), devices, micro_batch_size=size
        )(x, target)
    found = still_step(
        pair, DataParallelCriterion(contrast_of_pair, whole=True), devices, micro_batch_size=size
    )(x, target)
    assert_equal(found, loss)
    assert_same_gradients(gradients(pair), expected)
    assert_close(
        DataParallelCriterion(contrast, whole=True)(DataParallelModel(views(), ["cpu"])(x), target),
        loss,
    )


@on_ranks(2)
def test_all_ranks_refuse_several_rows_for_each_row(rank):
    """Each rank has one replica, and rank 1 no rows: all of them raise the error."""
    model, criterion = parallelize(views(), DataParallelCriterion(contrast, whole=True))
    x = torch.randn(3 if rank == 0 else 0, 4)
    outputs = model(x)
    for use in (
        lambda: gather(outputs),
        lambda: criterion(outputs, torch.zeros(len(x), dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match="2 for each"):
            use()


@pytest.mark.parametrize(
    "form", [lambda out: out.mean(0, keepdim=True), lambda out: out.mean().view(1)]
)
def test_gathered_outputs_warn_of_one_row_per_replica(form):
    """``.mean()`` of a loss of shape ``[1]`` per replica is not the loss of the batch."""
    model = DataParallelModel(Calls(lambda net, x: form(net(x))), CPUS, gather_outputs=True)
    with pytest.warns(UserWarning, match="the output has one value per replica.*weighted_mean"):
        model(torch.randn(7, 4))
    model(torch.randn(3, 4))  # one row is its own mean


def test_a_forward_without_rows_is_gathered():
    """It was an error of Python: ``tuple.index(x): x not in tuple``."""
    model = DataParallelModel(Calls(lambda net, scale: 2 * scale), CPUS, gather_outputs=True)
    assert model(torch.tensor(2.0)) == 4


def test_another_model_refuses_to_cut_several_rows_for_each_row():
    """Replicas of the other model would get some of the rows only, if it splits the batch in another way."""
    outputs = DataParallelModel(views(), CPUS)(torch.randn(7, 4))
    same = DataParallelModel(nn.Identity(), CPUS)(outputs)
    assert [len(output) for output in same] == [6, 4, 4]
    with pytest.raises(ValueError, match="2 for each"):
        DataParallelModel(nn.Identity(), ["cpu"] * 2)(outputs)
