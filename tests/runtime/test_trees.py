"""Nested lists, tuples and dictionaries, flattened and mapped."""

import torch

from balanced_parallel.runtime import trees


def test_leaves_are_in_order_and_include_plain_values():
    tensor = torch.ones(2)
    assert trees.leaves({"step": 3, "state": [tensor, (None, "text")]}) == [3, tensor, None, "text"]


def test_map_tensors_leaves_other_values_alone():
    tree = {"step": 3, "state": (torch.ones(2), "text")}
    assert trees.map_tensors(lambda tensor: tensor.tolist(), tree) == {"step": 3, "state": ([1.0, 1.0], "text")}
