"""States as JSON and tensors: every value comes back as it was, or is refused by its place."""

import collections
import json

import numpy as np
import pytest
import torch
from helpers.checkpoints import Part, load, save

from balanced_parallel import simulate
from balanced_parallel.state.state import join_tensors, seed_anew, split_tensors

Point = collections.namedtuple("Point", ["x", "y"])


def leaves_of(state):
    return [
        leaf.tolist()
        for value in state.values()
        for leaf in (value.values() if isinstance(value, dict) else [value])
    ]


def through_files(folder, state):
    save(folder, 1, part=Part(state))
    loaded = Part()
    load(folder, part=loaded)
    return loaded.state


@pytest.mark.parametrize(
    "state",
    [
        {
            1: torch.zeros(2),
            "1": torch.ones(2),
            "%(1)": torch.full((2,), 2.0),
            "%25(1)": torch.full((2,), 3.0),
        },
        {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "a%2Fb": torch.full((2,), 2.0)},
        {
            None: torch.zeros(2),
            "None": torch.ones(2),
            1.5: torch.full((2,), 2.0),
            "1.5": torch.full((2,), 3.0),
        },
    ],
)
def test_tensors_of_keys_that_look_alike_are_all_there(tmp_path, state):
    """Paths joined with a slash were the same name, and one tensor was lost."""
    loaded = through_files(tmp_path, state)
    assert list(loaded) == list(state)
    assert leaves_of(loaded) == leaves_of(state)


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        (1, [2.0, (None,)], {"x": True}),
        float("-inf"),
    ],
    ids=repr,
)
def test_value_comes_back_with_its_type(value):
    tree, _ = split_tensors({"part": value})
    loaded = join_tensors(json.loads(json.dumps(tree)), None)["part"]
    assert type(loaded) is type(value)
    assert loaded == value


@pytest.mark.parametrize("number", [np.float64(0.1), np.float16(0.1), np.int64(-3), np.bool_(True)])
def test_numbers_of_numpy_come_back_as_those_of_python(number):
    """A learning rate of numpy is one."""
    tree, _ = split_tensors([number])
    (loaded,) = join_tensors(json.loads(json.dumps(tree)), None)
    assert type(loaded) is type(number.item())
    assert loaded == number


@pytest.mark.parametrize(
    "dtype", ["float8_e8m0fnu", "float8_e5m2fnuz", "float8_e4m3fn", "bfloat16", "uint16", "bool"]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensor_of_any_type_comes_back_with_its_bits(tmp_path, dtype, shape):
    """float8_e8m0 was saved and could not be loaded."""
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    loaded = through_files(tmp_path, {"x": tensor})["x"]
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert loaded.float().tolist() == tensor.float().tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Point(1, 2), "part/x is a Point, expected tensors, numbers"),
        (collections.defaultdict(int), "part/x is a defaultdict, expected"),
        ({(1, 2): 3}, "part/x is a dict, expected .* with keys that are numbers or strings"),
        (np.datetime64("2020-01-01"), "part/x is a date, expected"),
        (torch.Size([2, 3]), "part/x is a Size, expected"),
        (np.zeros(2), "part/x is a ndarray, expected"),
        (
            torch.eye(2).to_sparse(),
            "part/x is a torch.sparse_coo tensor of torch.float32, expected a dense, plain one",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_that_would_change_its_type_is_refused_by_its_place(value, message):
    """A named tuple came back as a tuple."""
    with pytest.raises(TypeError, match=message):
        split_tensors({"part": {"x": value}})


def test_new_seeds_of_devices_are_different():
    with simulate(2):
        devices = [torch.device("sim", index) for index in (0, 1, 0)]
        torch.manual_seed(5)
        torch.rand(4, device="sim:0")
        of_cpu = torch.get_rng_state()
        seen = [torch.rand(4, device=device).cpu() for device in devices[:2]]
        first = torch.rand(4)
        for number in (0, 2):  # Two ranks have two devices each.
            seed_anew(of_cpu, devices, number)
            seen += [torch.rand(4, device=device).cpu() for device in devices]
            assert torch.equal(torch.rand(4), first)
        assert len({tuple(draw.tolist()) for draw in seen}) == len(seen)
