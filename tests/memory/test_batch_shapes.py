"""Shapes of a batch on the command line."""

import pytest
import torch

from balanced_parallel.batch import nested
from balanced_parallel.memory import batch_shapes


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("3x224x224", (3, 224, 224), torch.float32),
        ("128:int64", (128,), torch.int64),
        (":int64", (), torch.int64),
        ("4:bfloat16", (4,), torch.bfloat16),
    ],
)
def test_parse_shape_reads_sizes_and_dtype(text, shape, dtype):
    assert batch_shapes.parse_shape(text, torch.float32) == (shape, dtype)


def test_a_colon_without_a_dtype_is_an_error():
    with pytest.raises(ValueError, match="':' has no dtype after the colon, expected :float32 or :int64 for one number per row"):
        batch_shapes.parse_shape(":", torch.float32)


def test_build_batch_nests_shapes_by_key_path():
    def shape(*texts, dim=0):
        batch = batch_shapes.build_batch(texts, 8, dim, torch.float32)
        return nested.map_leaves(lambda leaf: tuple(leaf.shape), batch)

    assert shape("4") == (8, 4)
    assert shape("4", "3x5") == ((8, 4), (8, 3, 5))
    assert shape("ids=4:int64", "mask=4") == {"ids": (8, 4), "mask": (8, 4)}
    assert shape("pair.1=3", "pair.0=:int64", "pair.2.a=2") == {"pair": ((8,), (8, 3), {"a": (8, 2)})}
    assert shape("0.a=1", "0.b=2", "1=3") == ({"a": (8, 1), "b": (8, 2)}, (8, 3))
    assert shape("4x5", dim=1) == (4, 8, 5)
    assert shape("4", dim=1) == (4, 8)
