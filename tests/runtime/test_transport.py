"""Collectives between devices: sums in the order of the devices, by NCCL's functions where they exist, and in few rounds."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from balanced_parallel import simulate
from balanced_parallel.runtime import transport


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_have_each_pair_once_and_no_device_twice(count):
    pairs = list(transport.pairs(count))
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    busy = [0] * count  # The round in which each device is free.
    for one, other in pairs:
        busy[one] = busy[other] = max(busy[one], busy[other]) + 1
    assert max(busy) == (0 if count == 1 else count if count % 2 else count - 1)


def on_devices(count, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, size, generator=generator, dtype=dtype)
    return values, [row.to(f"sim:{index}") for index, row in enumerate(values)]


def sum_in_order(values):
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def fake_reduce(inputs, output, *_):
    output.copy_(sum_in_order([tensor.cpu() for tensor in inputs]))


def fake_reduce_scatter(inputs, outputs, *_):
    for output, part in zip(
        outputs, sum_in_order([tensor.cpu() for tensor in inputs]).chunk(len(outputs)), strict=True
    ):
        output.copy_(part)


def fake_broadcast(tensors, *_):
    for tensor in tensors[1:]:
        tensor.copy_(tensors[0])


def fake_all_gather(inputs, outputs, *_):
    for output in outputs:
        output.copy_(torch.cat([tensor.cpu() for tensor in inputs]))


def have_nccl(tensors):
    devices = {tensor.device for tensor in tensors}
    return len(devices) == len(tensors) and all(
        tensor.numel() and tensor.is_contiguous() for tensor in tensors
    )


@pytest.fixture(params=["nccl", "copies"])
def calls(request, monkeypatch):
    """Names of the functions of NCCL that were called, with copies in their place."""
    called = []
    for name in ("broadcast", "reduce", "reduce_scatter", "all_gather"):
        fake = globals()[f"fake_{name}"]
        function = lambda *a, name=name, f=fake: (called.append(name), f(*a))  # noqa: E731
        monkeypatch.setattr(torch._C, f"_nccl_{name}", function, raising=False)
    if request.param == "nccl":
        monkeypatch.setattr(transport, "_have_nccl", have_nccl)
    with simulate(4):
        yield called
    if request.param == "copies":
        assert not called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_sums_are_taken_in_the_order_of_the_devices(calls, dtype):
    values, tensors = on_devices(4, 12, dtype)
    expected = sum_in_order(values)
    output = torch.empty(12, device="sim:2", dtype=dtype)
    transport.reduce(tensors, output)
    assert torch.equal(output.cpu(), expected)
    for sizes in ([3, 3, 3, 3], [5, 0, 1, 6]):
        outputs = [
            torch.empty(size, device=f"sim:{index}", dtype=dtype)
            for index, size in enumerate(sizes)
        ]
        transport.reduce_scatter(tensors, outputs)
        assert torch.equal(torch.cat([output.cpu() for output in outputs]), expected)
    assert calls in ([], ["reduce", "reduce_scatter", "reduce", "reduce", "reduce"])


def test_fewer_devices_can_reduce_to_more(calls):
    values, tensors = on_devices(3, 8)
    outputs = [torch.empty(2, device=f"sim:{index}", dtype=torch.float64) for index in range(4)]
    transport.reduce_scatter(tensors, outputs)
    assert torch.equal(torch.cat([output.cpu() for output in outputs]), sum_in_order(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex128])
@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [5, 0, 1, 6]])
def test_values_of_every_dtype_are_copied_bit_by_bit(calls, dtype, sizes):
    values = torch.arange(12).to(dtype)
    outputs = [torch.empty(12, dtype=dtype, device=f"sim:{index}") for index in range(4)]
    slices = [output.split(sizes)[index] for index, output in enumerate(outputs)]
    for one, value in zip(slices, values.split(sizes), strict=True):
        one.copy_(value)
    transport.all_gather(outputs, sizes)
    assert all(torch.equal(output.cpu(), values) for output in outputs)
    outputs[0].fill_(0)
    transport.broadcast(outputs[0], outputs[1:])
    assert not any(output.cpu().any() for output in outputs)
    assert calls in ([], ["broadcast"] if len(set(sizes)) > 1 else ["all_gather", "broadcast"])


def test_gpus_and_the_cpu_use_copies():
    with simulate(1) as cluster:
        tensors = [torch.ones(4, device="sim:0"), torch.ones(4)]
        output = torch.empty(4)
        other = torch.empty(4, device="sim:0")
        transport.reduce(tensors, output)
        transport.reduce(tensors, other)
        assert output.tolist() == other.tolist() == [2] * 4
        assert cluster.copies[:2] == [("sim:0", "cpu"), ("cpu", "sim:0")]


def assorted():
    return [
        torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(5, 3).T,
        torch.randn(5, 3, 2)[..., 0],  # gaps are not packed
        torch.randn(4)[1:],
        torch.empty(0, 3),
        torch.tensor(2.0),
    ]


def test_a_single_tensor_is_not_copied():
    for tensor in (torch.randn(5, 3), torch.randn(5, 3).T):
        assert (
            transport.pack([transport.layout_of(tensor)], [tensor]).data_ptr() == tensor.data_ptr()
        )
    lazy = torch.randn(3, dtype=torch.complex64)
    flat = transport.pack([transport.layout_of(lazy)], [lazy.conj()])
    assert not flat.is_conj()


@pytest.mark.parametrize("buffer_bytes", [0, 10**6])
def test_copies_between_tensors_of_other_strides(buffer_bytes):
    value = torch.arange(24.0).view(4, 6)
    laid = [value, value.t().contiguous().t(), value.repeat_interleave(2, 1)[:, ::2]]
    with simulate(2):
        for source in laid:
            for target in laid:
                found = torch.empty(48, device="sim:1").as_strided(target.shape, target.stride())
                before = found._version
                transport.copy_coalesced([[found]], [source.to("sim:0")], buffer_bytes)
                assert torch.equal(found.cpu(), value)
                assert found._version > before


@pytest.mark.parametrize("bytes_per_buffer", [1, 100, 10**6])
def test_copies_of_many_tensors(bytes_per_buffer):
    tensors = [*assorted(), torch.arange(3), torch.tensor(True)]
    with simulate(3) as cluster:
        devices = cluster.devices
        here = [tensor.to("sim:0") for tensor in tensors]
        targets = [[torch.empty_like(each, device=device) for each in here] for device in devices]
        before = len(cluster.copies)
        transport.copy_coalesced(targets[1:], here, bytes_per_buffer)
        if bytes_per_buffer == 10**6:  # one copy for each dtype
            assert cluster.copies[before:] == [("sim:0", "sim:1"), ("sim:1", "sim:2")] * 3
        assert_copies(targets[1:], devices[1:], tensors)
        repeated = [devices[0], devices[1], devices[1], devices[0]]
        found = transport.copies(here, repeated, bytes_per_buffer)
        assert_copies(found, repeated, tensors)
        places = [one.data_ptr() for copied in [here, *found] for one in copied if one.numel()]
        assert len(set(places)) == len(places)


def assert_copies(found, devices, tensors):
    for copied, device in zip(found, devices, strict=True):
        assert {one.device for one in copied} == {device}
        assert_close([one.cpu() for one in copied], tensors, rtol=0, atol=0)
