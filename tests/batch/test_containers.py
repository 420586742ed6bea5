"""Nested containers: types are kept, key paths are readable, structures that differ are an error."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch

from balanced_parallel.batch import containers


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    derived: Any = dataclasses.field(init=False, default=7)

    def __post_init__(self):
        assert self.x is not None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    names: list


CONTAINERS = [
    (1, 2),
    Pair(1, (2, 3)),
    {"a": 1, "b": [torch.zeros(2)]},
    collections.OrderedDict(a=1),
    collections.defaultdict(list, a=1),
    collections.UserDict(a=1),
    types.MappingProxyType({"a": 1}),
    Frozen(3),
    Slotted(torch.ones(1), ["a"]),
    [torch.zeros(2), "not only plain values"],
    torch.Size([2, 3]),
    torch.zeros(2, 2).max(1),
    (),
    {},
]


@pytest.mark.parametrize("node", CONTAINERS, ids=lambda node: type(node).__name__)
def test_map_leaves_keeps_the_type_and_all_leaves_of_containers(node):
    mapped = containers.map_leaves(lambda leaf: leaf, node)
    assert type(mapped) is type(node)
    assert [place for place, _ in containers.leaves(mapped)] == [
        place for place, _ in containers.leaves(node)
    ]
    assert all(
        one is two
        for (_, one), (_, two) in zip(
            containers.leaves(mapped), containers.leaves(node), strict=True
        )
    )


def test_key_paths_are_written_as_code():
    node = Pair({"x": [torch.zeros(1), None], "names": ["a", "b"]}, Frozen(1))
    assert [place for place, _ in containers.leaves(node, "inputs")] == [
        "inputs.left['x'][0]",
        "inputs.left['x'][1]",
        "inputs.left['names']",
        "inputs.right.x",
        "inputs.right.derived",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        (Pair(1, 2), (1, 2)),
        (torch.zeros(1), (1,)),
    ],
)
def test_zip_leaves_raises_for_structures_that_differ(first, second):
    with pytest.raises(ValueError, match="the structures differ at .*expected the same entries"):
        containers.zip_leaves(lambda place, values: values, [first, second])
