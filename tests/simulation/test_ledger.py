"""Bytes of simulated devices: live, at the peak, moved, and above the capacity. Tensors that are copied and resized."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

from balanced_parallel import simulate

MIB = 2**20


def floats(mebibytes, device):
    return torch.empty(mebibytes * MIB // 4, device=device)


@pytest.mark.parametrize("count", [1, 511, 512, 513, 4 * MIB + 1])
def test_allocations_are_rounded_up_to_512_bytes(count):
    with simulate(2) as cluster:
        held = torch.empty(count, dtype=torch.uint8, device="sim:1")
        rounded = -(-count // 512) * 512
        assert cluster.live == [0, rounded]
        del held
        assert (cluster.live, cluster.peak) == ([0, 0], [0, rounded])


def test_views_and_aliases_add_no_bytes_and_storages_are_freed():
    with simulate(1) as cluster:
        whole = floats(1, "sim:0")
        pieces = [
            whole.view(2, -1),
            whole[5:],
            whole.detach(),
            whole.reshape(4, -1).t(),
            whole.view(torch.int32),
        ]
        assert cluster.live == [MIB]
        del whole
        assert cluster.live == [MIB]
        pieces.clear()
        assert cluster.live == [0]
        empty = torch.empty(0, 3, device="sim:0")
        assert cluster.live == [0]
        assert empty.device == torch.device("sim:0")


def test_resize_and_set_change_the_counted_bytes():
    with simulate(1) as cluster:
        tensor = torch.empty(0, device="sim:0").resize_(1000)
        assert cluster.live == [4096]
        torch.mul(torch.ones(2000, device="sim:0"), 2, out=tensor.resize_(0))
        assert cluster.live == [8192]
        assert tensor.eq(2).all()
        storage = tensor.untyped_storage()
        storage.resize_(16384)
        assert tensor.eq(2).all()
        assert cluster.live == [16384]
        storage.resize_(0)
        assert (storage.size(), cluster.live) == (0, [0])
        storage.resize_(8192)
        assert tensor.fill_(3).sum().item() == 6000
        assert cluster.live == [8192]
        del storage
        tensor.set_()
        assert cluster.live == [0]


def test_reset_peak_restarts_from_the_live_bytes():
    with simulate(2) as cluster:
        held = floats(1, "sim:0")
        floats(3, "sim:0")
        assert cluster.peak == [4 * MIB, 0]
        cluster.reset_peak()
        assert cluster.peak == [MIB, 0]
        floats(2, "sim:0")
        assert cluster.peak == [3 * MIB, 0]
        assert torch.accelerator.max_memory_allocated("sim:0") == 3 * MIB
        assert torch.accelerator.memory_allocated("sim:0") == MIB == held.nbytes
        torch.accelerator.reset_peak_memory_stats("sim:0")
        assert cluster.peak == [MIB, 0]


def test_allocations_above_the_capacity_raise_and_earlier_tensors_stay_valid():
    with simulate(2, memory=["4MiB", 8 * MIB]) as cluster:
        kept = floats(3, "sim:0").fill_(7)
        message = (
            "sim out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 4.00 MiB of which 1024.00 KiB is free. "
            "Of the allocated memory 3.00 MiB is allocated by PyTorch"
        )
        with pytest.raises(torch.OutOfMemoryError, match=re.escape(message)):
            floats(2, "sim:0")
        with pytest.raises(torch.OutOfMemoryError, match="GPU 0"):
            kept.sqrt()
        assert kept.eq(7).all()
        assert (
            cluster.live[0] == 3 * MIB < cluster.peak[0] < 4 * MIB
        )  # the booleans of the comparison fit
        assert torch.accelerator.get_memory_info("sim:0") == (MIB, 4 * MIB)
        fits = floats(1, "sim:0")
        assert len({fits.device, floats(8, "sim:1").device}) == 2


def test_moved_bytes_are_counted_by_source_and_target_and_copies_are_listed_in_order():
    with simulate(2) as cluster:
        x = torch.ones(1000, dtype=torch.float64).to("sim:0")
        y = x.to("sim:1")
        y.cpu()
        y.sum().item()
        x.copy_(y)
        x[:10].to("cpu", torch.float32)
        x.float()
        assert cluster.moved == {
            ("cpu", "sim:0"): 8000,
            ("sim:0", "sim:1"): 8000,
            ("sim:1", "cpu"): 8000 + 8,
            ("sim:1", "sim:0"): 8000,
            ("sim:0", "cpu"): 40,
        }
        before = cluster.moved
        copies = len(cluster.copies)
        x.to("sim:1").cpu()
        x.to("sim:0", copy=True)
        torch.empty(0, device="sim:0").to("sim:1")
        assert cluster.moved - before == {("sim:0", "sim:1"): 8000, ("sim:1", "cpu"): 8000}
        expected = [("sim:0", "sim:1"), ("sim:1", "cpu")]
        assert cluster.copies[copies:] == expected
    assert cluster.copies[copies:] == expected
    with simulate(1) as cluster:
        assert cluster.copies == []


def test_the_allocation_that_is_asked_to_fail_raises_an_error_and_those_after_it_succeed():
    with simulate(2) as cluster:
        cluster.fail_allocation(3)
        before = cluster.allocations
        kept = [floats(1, "sim:0"), floats(1, "sim:1")]
        with pytest.raises(
            torch.OutOfMemoryError, match=r"sim out of memory\. Tried to allocate 1024\.00 KiB"
        ):
            floats(1, "sim:1")
        assert (cluster.live, cluster.allocations - before) == ([MIB, MIB], 3)
        kept.append(floats(1, "sim:1"))
    assert cluster.allocations - before == 4
    with pytest.raises(RuntimeError, match="can be read, expected changes inside of it"):
        cluster.fail_allocation(1)


def test_tensors_can_be_copied_saved_and_printed():
    with simulate(2):
        net = nn.Linear(3, 2).to("sim:1")
        assert repr(torch.ones(2, device="sim:1")) == "tensor([1., 1.], device='sim:1')"
        assert copy.deepcopy(net).weight.equal(net.weight)
        assert copy.deepcopy(net).weight.device == torch.device("sim:1")
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        assert torch.load(file, map_location="cpu")["weight"].equal(net.weight.cpu())
        assert pickle.loads(pickle.dumps(net.weight.data)).device == torch.device("sim:1")
        assert torch.ones(2).pin_memory().to("sim:0", non_blocking=True).device == torch.device(
            "sim:0"
        )
