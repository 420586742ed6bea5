"""Collectives between devices: sums in the order of the devices, by NCCL's functions where they exist, and in few rounds."""

import pytest
import torch

from balanced_parallel import simulate
from balanced_parallel.runtime import transport


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
