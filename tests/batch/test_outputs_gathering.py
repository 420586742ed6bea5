"""Gathering: concatenation of every leaf, containers of every type, rows in another order, errors for outputs that differ."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.trainers import make_model, make_rows, pad
from torch import nn
from torch.testing import assert_close
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from balanced_parallel import DataParallelModel, PerReplica, Whole, gather, scatter


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    names: list
    count: int
    extra: Any = None


def test_gather_concatenates_tensors_scalars_strings_and_numbers():
    outputs = [
        Output(torch.ones(2, 3), ["a", "b"], 2, (torch.tensor(1.5), "first")),
        Output(torch.zeros(1, 3), ["c"], 1, (torch.tensor(2.5), "second")),
    ]
    whole = gather(outputs)
    assert type(whole) is Output  # torch cannot gather one (pytorch#41327)
    assert whole.logits.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert whole.names == ["a", "b", "c"]
    assert whole.count == [2, 1]
    assert whole.extra[0].tolist() == [1.5, 2.5]
    assert whole.extra[1] == ["first", "second"]  # torch returns "<map object at ...>" for strings
    assert gather([{"x": None}, {"x": None}]) == {"x": None}
    assert gather([["a"], []]) == ["a"]
    assert gather([1.0, 2.0]) == [1.0, 2.0]


def test_scatter_and_gather_keep_hugging_face_outputs():
    output = CausalLMOutputWithPast(
        logits=torch.arange(15.0).view(5, 3), hidden_states=(torch.ones(5, 2), torch.zeros(5, 2))
    )
    pieces = scatter(output, ["cpu"] * 2)
    assert [type(piece) for piece in pieces] == [CausalLMOutputWithPast] * 2
    assert pieces[0].loss is None
    assert torch.equal(pieces[1].logits, output.logits[3:])
    assert torch.equal(pieces[1]["hidden_states"][0], torch.ones(2, 2))
    whole = gather(pieces)
    assert type(whole) is CausalLMOutputWithPast
    assert torch.equal(whole.logits, output.logits)
    assert whole.keys() == output.keys()
    batch = BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    assert [type(piece) for piece in scatter(batch, ["cpu"] * 2)] == [BatchEncoding] * 2


def test_the_cache_of_a_model_is_gathered():
    """It is an object with the tensors of each layer."""
    net, batch = make_model("gpt2").eval(), pad(make_rows("gpt2", 7))
    with torch.no_grad():
        plain = net(**batch).past_key_values
        found = DataParallelModel(net, ["cpu"] * 3, gather_outputs=True)(**batch).past_key_values
    assert type(found) is type(plain)
    for layer, expected in zip(found, plain, strict=True):
        assert_close(layer[:2], expected[:2])


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (
            torch.zeros(3),
            TypeError,
            r"gather was given a tensor of shape \(3,\), expected a list.*gather\(\[output\]\)",
        ),
        ([], ValueError, "no outputs"),
        ([object()], TypeError, "output is an object of type object: expected tensors"),
        (
            [torch.zeros(1, 2), torch.zeros(1, 3)],
            ValueError,
            r"\(1, 2\) and \(1, 3\), expected shapes that differ in dimension 0",
        ),
        ([torch.zeros(1, 2), None], TypeError, "a tensor of shape .*NoneType"),
        (
            [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}],
            ValueError,
            r"the structures differ at output: output\['a'\] in the first, output\['b'\] in number 1",
        ),
        ([(torch.zeros(1),), (torch.zeros(1), 2)], ValueError, "the structures differ"),
    ],
)
def test_outputs_that_cannot_be_gathered_raise_an_error(outputs, error, message):
    with pytest.raises(error, match=message):
        gather(outputs)


SHARDS = [[1], [2, 0, 3, 4], [5]]
ROWS = [torch.full((length,), float(length)) for length in (2, 9, 4, 3, 3, 1)]


def ordered(function):
    """Returns outputs for shards that are padded to a length of their own, the longest row first."""
    entries = [
        function(nn.utils.rnn.pad_sequence([ROWS[row] for row in shard], True)) for shard in SHARDS
    ]
    return PerReplica(entries, [len(shard) for shard in SHARDS]).in_order(
        [row for shard in SHARDS for row in shard]
    )


def test_parts_of_the_outputs_keep_their_order():
    outputs = ordered(
        lambda rows: {
            "rows": rows,
            "names": [f"{row.max():.0f}" for row in rows],
            "total": rows.sum(),
            "pair": (rows, rows.amax(1)),
        }
    )
    assert outputs["rows"].map(lambda rows: rows.amax(1)).gather().tolist() == [2, 9, 4, 3, 3, 1]
    assert outputs["names"].gather() == ["2", "9", "4", "3", "3", "1"]
    assert outputs["pair"].unzip()[1].gather().tolist() == [2, 9, 4, 3, 3, 1]
    gathered = outputs.gather()
    assert gathered["rows"].shape == (6, 9)
    assert gathered["total"].shape == (3,)


def test_a_model_takes_outputs_in_another_order_whole_alone():
    outputs = ordered(lambda rows: rows)
    with pytest.raises(ValueError, match="another order than the batch: call gather"):
        DataParallelModel(nn.Identity(), ["cpu"] * 2)(outputs)
    assert torch.equal(DataParallelModel(nn.Identity(), ["cpu"])(outputs)[0], outputs.gather())
    (whole,) = scatter(Whole(outputs), ["cpu"])
    assert torch.equal(whole, outputs.gather())


def test_rows_that_cannot_be_put_in_order_are_an_error():
    with pytest.raises(ValueError, match="an output has 26 rows for 6 rows of the batch"):
        ordered(torch.flatten).gather()
