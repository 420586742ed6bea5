"""Values of small integer inputs in a trace: a model that reads them runs as in training."""

import pytest
import torch
from helpers.slow import slow
from torch import nn

from balanced_parallel import Rows, Whole, memory
from balanced_parallel.memory.trace import values


class Reads(nn.Module):
    """Adds what a function of the integers returns."""

    def __init__(self, read):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.read = read

    def forward(self, inputs, integers):
        return self.layer(inputs) + self.read(self.layer.weight, integers).sum()


def patches(weight, sizes):
    return torch.cat(
        [weight.new_zeros(frames * height * width, 8) for frames, height, width in sizes.tolist()]
    )


def offsets(weight, sizes):
    lengths = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0]).cumsum(0)
    assert torch.equal(lengths, lengths.clone())
    return weight.new_zeros(int(lengths[-1]), 8)


def written(weight, sizes):
    ends = sizes.new_zeros(3)
    torch.cumsum(sizes.prod(1), 0, out=ends[1:])
    ends += 1
    return weight.new_zeros(ends.max().item(), 8)


def estimate(read, integers, **settings):
    batch = (torch.zeros(6, 8), integers), torch.zeros(6, 8)
    return memory.estimate(Reads(read), nn.MSELoss(), *batch, **{"device_kind": "cpu", **settings})


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(
    ("read", "layout", "devices"),
    [
        (patches, "single", 1),
        (offsets, "replicas", 2),
        (written, "ddp", 2),
        slow(patches, "fsdp", 2),
    ],
)
def test_sizes_of_images_are_read(read, layout, devices):
    small, large = (
        estimate(
            read, Whole(torch.tensor([[2, 2, 2], [1, side, side]])), layout=layout, devices=devices
        )
        for side in (4, 400)
    )
    assert large.allocated[0] - small.allocated[0] > 0.99 * 8 * 4 * 400**2


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(
    ("as_given", "layout", "devices"),
    [(torch.tensor, "fsdp", 2), (list, "replicas", 2), (Rows, "ddp", 2), slow(list, "single", 1)],
)
def test_lengths_of_rows_are_read(as_given, layout, devices):
    def read(weight, lengths):
        numbers = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
        return torch.stack([weight.new_zeros(length, 8).sum() for length in numbers])

    assert estimate(read, as_given([3, 5, 1, 2, 7, 4]), layout=layout, devices=devices).allocated[0]


@pytest.mark.parametrize(
    "integers",
    [
        torch.tensor([[2, 2, 2]], device="meta"),
        torch.ones(1 + values.KNOWN // 3, 3, dtype=torch.int64),
        torch.ones(1, 3),
    ],
    ids=["meta", "many", "floats"],
)
def test_other_values_are_not_known(integers):
    with pytest.raises(
        ValueError,
        match=r"reads a value of a tensor .* small tensor of integers on the CPU, .* \(--scalar\)",
    ):
        estimate(patches, Whole(integers))


def test_what_is_written_to_is_not_known_any_more():
    def read(weight, sizes):
        sizes[0] = weight[0].long()[:3]
        return patches(weight, sizes)

    with pytest.raises(ValueError, match="reads a value of a tensor"):
        estimate(read, Whole(torch.tensor([[2, 2, 2]])))


def test_objects_of_the_caller_stay_as_they_are():
    def read(weight, sizes):
        sizes += 1
        return patches(weight, sizes)

    sizes = torch.tensor([[2, 2, 2]])
    estimate(read, Whole(sizes))
    assert sizes.tolist() == [[2, 2, 2]]
