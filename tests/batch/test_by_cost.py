"""``shard_by_cost``: a model and a criterion take its shards as they are, and outputs come in the order of the samples."""

import pytest
import torch
from helpers.problems import assert_same_gradients, gradients
from helpers.unequal import assert_same_rows, build, length_of, make_samples, pad, plain
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, shard_by_cost


def shard(samples, shards):
    return shard_by_cost(samples, shards, cost=length_of, collate=pad)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_model_and_criterion_take_shards_as_they_are(double, devices):
    samples, net = make_samples(), build()
    expected_loss, expected, expected_outputs = plain(net, samples)
    model, criterion = DataParallelModel(net, ["cpu"] * devices), DataParallelCriterion(nn.CrossEntropyLoss())
    inputs, targets = shard(samples, devices)
    outputs = model(**inputs)
    loss = criterion(outputs, targets)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(net), expected)
    assert_same_rows(outputs.gather().detach(), expected_outputs, samples)
    with torch.no_grad():
        model.gather_outputs = True
        assert_same_rows(model(**inputs), expected_outputs, samples)


def test_parts_of_the_outputs_keep_the_order():
    samples = [torch.full((length,), float(length)) for length in (2, 9, 4, 3, 3, 1)]
    inputs, _ = shard_by_cost(
        samples, 3, cost=len, collate=lambda some: (nn.utils.rnn.pad_sequence(some, True), torch.ones(len(some)))
    )

    class Parts(nn.Module):
        def forward(self, rows):
            return {
                "rows": rows,
                "names": [f"{row.max():.0f}" for row in rows],
                "total": rows.sum(),
                "pair": (rows, rows.amax(1)),
            }

    outputs = DataParallelModel(Parts(), ["cpu"] * 3)(inputs)
    assert outputs["rows"].map(lambda rows: rows.amax(1)).gather().tolist() == [2, 9, 4, 3, 3, 1]
    assert outputs["names"].gather() == ["2", "9", "4", "3", "3", "1"]
    assert outputs["pair"].unzip()[1].gather().tolist() == [2, 9, 4, 3, 3, 1]
    gathered = outputs.gather()
    assert gathered["rows"].shape == (6, 9)
    assert gathered["total"].shape == (3,)
    with pytest.raises(ValueError, match="another order than the batch: call gather"):
        outputs["rows"].narrow(0, 2)


def test_rows_that_cannot_be_put_in_order_are_an_error():
    inputs, _ = shard(make_samples(), 3)
    with pytest.raises(ValueError, match="an output has [0-9]+ rows for 11 rows of the batch"):
        DataParallelModel(nn.Flatten(0), ["cpu"] * 3)(inputs["words"]).gather()


def test_shards_that_do_not_fit_are_an_error():
    inputs, _ = shard(make_samples(), 3)
    with pytest.raises(ValueError, match="rows in 3 shards for 2 devices, expected one for each at most"):
        DataParallelModel(nn.Identity(), ["cpu"] * 2)(inputs["words"])
    with pytest.raises(ValueError, match="split=.* of the model and rows that are cut by cost"):
        DataParallelModel(nn.Identity(), ["cpu"] * 3, split=[1, 1, 2])(inputs["words"])
    with pytest.raises(ValueError, match="split='speed', expected None or one weight per device.*'memory'"):
        DataParallelModel(nn.Identity(), ["cpu"] * 3, split="speed")
    with pytest.raises(ValueError, match="no samples"):
        shard([], 3)
