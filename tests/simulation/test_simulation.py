"""Simulated devices: bytes, capacities, traffic, errors, and cleanup at the end of the block."""

import copy
import gc
import importlib
import io
import pickle
import re
import subprocess
import sys
import threading
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import balanced_parallel
from balanced_parallel import simulate
from balanced_parallel.simulation import compilation, torch_data_parallel

MIB = 2**20


def floats(mebibytes, device):
    return torch.empty(mebibytes * MIB // 4, device=device)


def test_devices_exist_inside_the_block_only():
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with simulate(3) as cluster:
        assert cluster.devices == [torch.device("sim", index) for index in range(3)]
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")
        assert (torch.accelerator.device_count(), torch.sim.device_count()) == (3, 3)
        with pytest.raises(RuntimeError, match="invalid device ordinal: there is no sim:3, the cluster has sim:0 to sim:2"):
            torch.ones(1, device="sim:3")
        with torch.accelerator.device_index(2):
            assert torch.ones(1, device="sim").device == torch.device("sim:2")
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with pytest.raises(RuntimeError, match="only inside `with simulate"):
        torch.ones(1, device="sim:0")


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
        pieces = [whole.view(2, -1), whole[5:], whole.detach(), whole.reshape(4, -1).t(), whole.view(torch.int32)]
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
        assert cluster.live[0] == 3 * MIB < cluster.peak[0] < 4 * MIB  # the booleans of the comparison fit
        assert torch.accelerator.get_memory_info("sim:0") == (MIB, 4 * MIB)
        fits = floats(1, "sim:0")
        assert len({fits.device, floats(8, "sim:1").device}) == 2


def test_out_of_memory_in_backward_keeps_parameters_and_a_smaller_batch_runs():
    with simulate(1, memory="3MiB") as cluster:
        net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to("sim:0")
        before = copy.deepcopy(net).cpu().state_dict()
        with pytest.raises(torch.OutOfMemoryError):
            net(torch.ones(1000, 64).to("sim:0")).sum().backward()
        net.zero_grad()
        gc.collect()
        assert all(value.cpu().equal(before[name]) for name, value in net.state_dict().items())
        net(torch.ones(100, 64).to("sim:0")).sum().backward()
        assert cluster.peak[0] <= 3 * MIB


def test_moved_bytes_are_counted_by_source_and_target():
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
        x.to("sim:1")
        assert cluster.moved - before == {("sim:0", "sim:1"): 8000}


def test_copies_are_listed_in_order():
    with simulate(2) as cluster:
        x = torch.ones(1000).to("sim:0")
        x.to("sim:1").cpu()
        x.to("sim:0", copy=True)
        torch.empty(0, device="sim:0").to("sim:1")
        expected = [("cpu", "sim:0"), ("sim:0", "sim:1"), ("sim:1", "cpu")]
        assert cluster.copies == expected
    assert cluster.copies == expected
    with simulate(1) as cluster:
        assert cluster.copies == []


def test_functions_of_nccl_run_on_simulated_devices():
    nccl = torch.cuda.nccl
    with simulate(3) as cluster:
        tensors = [torch.arange(6.0).to(device) * (device.index + 1) for device in cluster.devices]
        assert nccl.is_available(tensors)
        assert not nccl.is_available([tensors[0], tensors[0]])
        assert not nccl.is_available([tensors[0], torch.ones(6)])
        assert not nccl.is_available([tensors[0][::2], tensors[1]])
        nccl.reduce(tensors, output=(total := torch.empty_like(tensors[1])), root=1)
        assert total.tolist() == [0, 6, 12, 18, 24, 30]
        nccl.reduce_scatter(tensors, (shards := [tensor.new_empty(2) for tensor in tensors]))
        assert [shard.tolist() for shard in shards] == [[0, 6], [12, 18], [24, 30]]
        nccl.all_gather(shards, (gathered := [torch.empty_like(tensor) for tensor in tensors]))
        assert all(torch.equal(one.cpu(), total.cpu()) for one in gathered)
        nccl.broadcast(tensors)
        assert all(torch.equal(tensor.cpu(), torch.arange(6.0)) for tensor in tensors)


def adam_step(cluster, net, rows=64):
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        cluster.reset_peak()
        inputs = torch.randn(rows, 64).to("sim:0")
        net(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_categories_of_the_peak_add_up_to_it():
    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 8)).to("sim:0")
        size = sum(-(-parameter.nbytes // 512) * 512 for parameter in net.parameters())
        adam_step(cluster, net, rows=2)
        parts = cluster.categories(0)
        assert list(parts) == ["parameters", "gradients", "optimizer state", "inputs", "activations", "other"]
        assert sum(parts.values()) == cluster.peak[0]
        assert (parts["parameters"], parts["inputs"]) == (size, 2 * 64 * 4)
        assert parts["gradients"] == size
        assert 2 * size <= parts["optimizer state"] <= 2 * size + 4 * 512  # and a step count per parameter
        adam_step(cluster, net, rows=8192)
        parts = cluster.categories(0)  # now the peak is in the backward
        assert parts["activations"] >= 8192 * 1024 * 4
        assert parts["other"] >= 8192 * 1024 * 4  # the gradient of an activation
        assert (parts["parameters"], parts["inputs"]) == (size, 8192 * 64 * 4)


def test_categories_without_an_optimizer_have_gradients_and_frozen_parameters():
    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).requires_grad_(False).to("sim:0")
        head = nn.Linear(512, 2048, bias=False).to("sim:0")
        inputs = torch.ones(2, 512).to("sim:0")
        head(net(inputs)).sum().backward()
        parts = cluster.categories(0)
        assert parts["parameters"] >= 512 * 512 * 4 + 512 * 2048 * 4
        assert parts["gradients"] == 512 * 2048 * 4
        assert parts["inputs"] == inputs.nbytes


def test_categories_of_the_peak_survive_many_later_allocations():
    with simulate(1) as cluster:
        net = nn.Linear(64, 64).to("sim:0")
        adam_step(cluster, net)
        inputs = torch.randn(4096, 64).to("sim:0")
        net(inputs).sum().backward()
        expected, peak = cluster.categories(0), cluster.peak
        del inputs
        small = torch.ones(4, device="sim:0")
        for _ in range(70_000):  # longer than the ledger's log
            small + small
        assert (cluster.peak, cluster.categories(0)) == (peak, expected)


def test_recomputed_activations_have_the_category_activations():
    from torch.utils.checkpoint import checkpoint

    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 4)).to("sim:0")
        checkpoint(net, torch.ones(512, 64, requires_grad=True).to("sim:0"), use_reentrant=False).sum().backward()
        assert cluster.categories(0)["activations"] >= 512 * 2048 * 4


def test_the_table_and_all_numbers_are_readable_after_the_block():
    with simulate(2, memory=["2GiB", "1GiB"]) as cluster:
        torch.ones(MIB).to("sim:1")
        inside = str(cluster)
        expected = cluster.live, cluster.peak, cluster.moved, cluster.categories(1)
    assert str(cluster) == inside
    assert (cluster.live, cluster.peak, cluster.moved, cluster.categories(1)) == expected
    lines = inside.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip())[:5] == ["device", "memory", "now", "peak", "parameters"]
    assert re.split(r"\s{2,}", lines[-1].strip())[:4] == ["sim:1", "1.00 GiB", "0 B", "4.00 MiB"]
    with pytest.raises(RuntimeError, match="peaks can be read, but not reset"):
        cluster.reset_peak()
    with pytest.raises(IndexError):
        cluster.categories(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "devices=0, expected an integer from 1 to 64"),
        ((2.0,), "devices=2.0, expected an integer"),
        ((True,), "devices=True, expected an integer"),
        ((65,), "from 1 to 64"),
        ((2, ["1GiB"]), "memory has 1 entries for 2 devices"),
        ((2, "24 gigs"), "'24 gigs' is not a memory size, expected a positive number of bytes, or text with a unit"),
        ((2, -1), "-1 is not a memory size"),
    ],
)
def test_invalid_arguments_raise_an_error_with_the_value(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)), simulate(*arguments):
        pass


def test_nested_clusters_raise_an_error():
    with simulate(1):
        with pytest.raises(RuntimeError, match="inside simulate"), simulate(2):
            pass
        assert torch.ones(1, device="sim:0").item() == 1


def test_tensors_can_only_be_copied_to_the_cpu_or_freed_after_the_block():
    with simulate(2):
        old = torch.ones(MIB, device="sim:1")
    assert old.cpu().eq(1).all()
    with simulate(2) as cluster:
        assert cluster.live == [0, 0]
        with pytest.raises(RuntimeError, match="of a cluster that has ended"):
            old + 1
        with pytest.raises(RuntimeError, match="of a cluster that has ended"):
            old.to("sim:0")
        del old
        assert cluster.live == [0, 0]


def public_and_private_names(module):
    return {name for name in dir(module) if not name.startswith("__")}


def test_the_end_of_the_block_removes_patches_hooks_and_devices():
    net = nn.Linear(2, 2)
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim has no attribute for this module
    with simulate(1):
        pass  # makes the changes that torch cannot undo
    places = [torch, torch._C, torch.Tensor, nn.Module, nn.parallel.comm, torch.cuda.nccl, nn.modules.module, optimizer]
    names = [public_and_private_names(place) for place in places]
    hooks = len(nn.modules.module._global_forward_pre_hooks), len(optimizer._global_optimizer_pre_hooks)
    modules, state, nccl = set(sys.modules), torch.get_rng_state(), torch.cuda.nccl.is_available
    with simulate(2):
        torch.rand(3, device="sim:1")
        assert nn.DataParallel(net.to("sim:0"))(torch.ones(2, 2)).shape == (2, 2)
    assert [public_and_private_names(place) for place in places] == names
    assert hooks == (len(nn.modules.module._global_forward_pre_hooks), len(optimizer._global_optimizer_pre_hooks))
    assert set(sys.modules) - modules <= {name for name in sys.modules if name.startswith("torch.")}
    assert torch.cuda.nccl.is_available is nccl
    assert torch.get_rng_state().equal(state)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    torch.manual_seed(3)
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.Adam(plain.parameters()).step()  # queries the accelerator
    assert balanced_parallel.DataParallelModel(plain).devices == [torch.device("cpu")]


def test_an_error_inside_the_block_ends_the_cluster():
    with pytest.raises(IndexError), simulate(2) as cluster:
        floats(1, "sim:1")[MIB]
    assert cluster.peak == [0, MIB]
    with simulate(3):
        assert torch.accelerator.device_count() == 3


WRONG_PLACES = {
    "add": lambda x: x + torch.ones(4, 4),
    "add_": lambda x: x.add_(torch.ones(4)),
    "host first": lambda x: torch.ones(4, 4) + x,
    "into the host": lambda x: torch.ones(4, 4).add_(x),
    "other device": lambda x: x * x.to("sim:2"),
    "matmul": lambda x: x @ torch.ones(4, 4),
    "linear": lambda x: nn.Linear(4, 4)(x),
    "linear, input": lambda x: nn.Linear(4, 4).to("sim:1")(torch.ones(4, 4)),
    "cat": lambda x: torch.cat([x, x.cpu()]),
    "stack": lambda x: torch.stack([x, x.to("sim:2")]),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(4)),
    "embedding": lambda x: nn.functional.embedding(torch.tensor([1]), x),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "index_add": lambda x: x.index_add_(0, torch.tensor([0]), x[:1]),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool), 0),
    "mse_loss": lambda x: nn.functional.mse_loss(x, x.cpu()),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "layer_norm": lambda x: nn.LayerNorm(4)(x),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(x),
    "conv": lambda x: nn.Conv1d(1, 1, 2)(x[:, None]),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None].cpu()),
    "lstm": lambda x: nn.LSTM(4, 4)(x),
    "foreach": lambda x: torch._foreach_add([x, x], [x, x.cpu()]),
    "number in a product": lambda x: x @ torch.tensor(1.0).expand(4),
    "out": lambda x: torch.add(x, x, out=torch.empty(4, 4)),
    "backward": lambda x: x.requires_grad_().sum(0).backward(torch.ones(4)),
    "generator": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator()),
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_operators_on_tensors_of_different_devices_raise_an_error(name):
    with simulate(3):
        x = torch.randn(4, 4, device="sim:1")
        with pytest.raises((RuntimeError, TypeError), match=r"device"):
            WRONG_PLACES[name](x)


def test_combinations_of_devices_that_cuda_accepts_are_accepted():
    with simulate(2):
        x = torch.randn(4, 4, device="sim:1")
        number = torch.tensor(2.0)
        for allowed in (x * number, number + x, x.clamp(min=number), torch.where(x > 0, x, number), x[torch.tensor([0, 2])]):
            assert allowed.device == torch.device("sim:1")
        x[torch.tensor([1])] = number
        x[1] = 3.0
        x.masked_fill_(x > 0, number)
        assert x[1].eq(2).all()


def test_strict_false_copies_and_warns():
    with simulate(2, strict=False) as cluster:
        x = torch.ones(4, 4, device="sim:1")
        with pytest.warns(UserWarning, match="got mat2 is on cpu, different from other tensors on sim:1.*not strict"):
            y = x @ torch.ones(4, 4)
        assert y.device == torch.device("sim:1")
        assert y.eq(4).all()
        assert cluster.moved["cpu", "sim:1"] == 64


def test_missing_operators_raise_an_error_with_name_and_fix():
    with simulate(1):
        x = torch.ones(3, device="sim:0")
        with pytest.raises(
            NotImplementedError, match=r"'aten::_to_sparse' has none.*torch.library.impl\('aten::_to_sparse', 'PrivateUse1'\)"
        ):
            x.to_sparse()
        with pytest.raises(NotImplementedError, match=r"aten::_cudnn_init_dropout_state"):
            torch.ops.aten._cudnn_init_dropout_state(0.1, True, 0, dtype=torch.uint8, device="sim:0")


def test_missing_operators_can_be_added_with_torch_library():
    with simulate(1), torch.library._scoped_library("aten", "IMPL") as library:
        x = torch.ones(3, device="sim:0")
        with pytest.raises(NotImplementedError, match="batch_norm_stats"):
            torch.batch_norm_stats(x[None], 1e-5)
        library.impl("batch_norm_stats", lambda x, eps: (x.mean(0), (x.var(0, correction=0) + eps).rsqrt()), "PrivateUse1")
        assert torch.batch_norm_stats(torch.stack([x, x]), 1.0)[1].eq(1).all()


def test_custom_operators_of_other_libraries_run():
    with torch.library._scoped_library("some_library", "DEF") as library, simulate(1):
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        twice = torch.ops.some_library.twice(torch.ones(3, device="sim:0"))
        assert twice.device == torch.device("sim:0")
        assert twice.eq(2).all()


def test_each_device_has_its_own_random_state():
    with simulate(2):
        torch.manual_seed(5)
        zero, one = (torch.rand(8, device=device) for device in ("sim:0", "sim:1"))
        assert zero.cpu().equal(one.cpu())  # the same seed for all devices, as in CUDA
        host = torch.get_rng_state()
        state = torch.sim.get_rng_state(1)
        first = nn.functional.dropout(one, 0.5)
        assert torch.get_rng_state().equal(host)
        assert torch.sim.get_rng_state(0).equal(state)  # the same number of draws
        torch.sim.set_rng_state(state, 1)
        assert nn.functional.dropout(one, 0.5).equal(first)
        generator = torch.Generator("sim:1").manual_seed(3)
        drawn = torch.rand(4, device="sim:1", generator=generator)
        assert torch.rand(4, device="sim:1", generator=generator.manual_seed(3)).equal(drawn)
        with torch.random.fork_rng([0, 1], device_type="sim"):
            inside = torch.rand(3, device="sim:0")
        assert torch.rand(3, device="sim:0").equal(inside)


def test_manual_seed_before_the_block_seeds_the_devices():
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        with simulate(1):
            drawn.append(torch.rand(5, device="sim:0").cpu())
    assert drawn[0].equal(drawn[1])


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
        assert torch.ones(2).pin_memory().to("sim:0", non_blocking=True).device == torch.device("sim:0")


def test_pinned_memory_is_known():
    with simulate(1):
        pinned = torch.ones(2).pin_memory()
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert not pinned.clone().is_pinned()
        assert not torch.ones(2).is_pinned()


def test_moving_a_module_keeps_tied_parameters():
    with simulate(1):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        before = net[0].weight
        net.to("sim:0")
        assert net[0].weight is before is net[1].weight
        assert before.device == torch.device("sim:0")


LATE = """
import torch
x = torch.ones(3, requires_grad=True)
(x * 2).sum().backward()                      # torch starts its autograd threads here, one per device: none
import balanced_parallel
from balanced_parallel import simulate
for devices in (2, 5):
    with simulate(devices):
        last = torch.ones(3, device=f"sim:{devices - 1}", requires_grad=True)
        (last.to("sim:0") * 3).sum().backward()
        assert last.grad.eq(3).all()
(x * 2).sum().backward()
import os
if not os.fork():
    (x * 2).sum().backward()
    os._exit(0)
assert os.wait()[1] == 0
print(x.grad.tolist())
"""


def test_clusters_work_after_a_backward_and_in_forked_processes():
    quiet = ["-W", "error", "-W", "ignore:The AccumulateGrad node's stream:UserWarning"]  # as in pyproject.toml
    done = subprocess.run([sys.executable, *quiet, "-c", LATE], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4.0, 4.0, 4.0]\n", "")


def test_concurrent_loads_compile_once(tmp_path, monkeypatch):
    built = []

    def build(path):
        built.append(path)
        path.write_bytes(b"")

    monkeypatch.setattr(compilation, "build", build)
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation.ctypes, "CDLL", lambda path: mock.MagicMock())
    threads = [threading.Thread(target=compilation.load_native.__wrapped__) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_missing_compiler_raises_an_error_with_the_packages_to_install(monkeypatch):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"found no compiler \(looked for c\+\+, g\+\+, clang\+\+\): install one, with 'apt install g\+\+'"
    ):
        compilation.find_compiler()


def test_a_failing_compiler_raises_an_error_with_its_message(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\ncat > /dev/null\necho 'x.cpp:1: error: no such thing' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compilation, "find_compiler", lambda: str(compiler))
    with pytest.raises(RuntimeError, match=r"(?s)could not compile.*exit status 3.*C\+\+20.*x.cpp:1: error: no such thing"):
        compilation.build(tmp_path / "simulation.so")
    assert list(tmp_path.iterdir()) == [compiler]


def test_a_read_only_home_falls_back_to_a_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.Path, "home", lambda: tmp_path / "file")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compilation.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert compilation.cache_folder() == tmp_path


def test_functions_of_data_parallel_dispatch_by_device():
    dispatched = torch_data_parallel._dispatch(lambda tensors: "simulated", lambda tensors: "original")
    with simulate(1):
        assert dispatched([torch.ones(1, device="sim:0")]) == "simulated"
        assert dispatched(torch.ones(1, device="meta")) == "original"


def test_devices_can_be_used_from_several_threads():
    with simulate(4) as cluster:
        net = nn.Linear(8, 8).to("sim:0")
        results = {}

        def work(index):
            copied = copy.deepcopy(net).to(f"sim:{index}")
            copied(torch.ones(2, 8, device=f"sim:{index}")).sum().backward()
            results[index] = copied.weight.grad.cpu()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result.eq(2).all() for result in results.values())
        del threads
        gc.collect()
        assert cluster.live[1:] == [0, 0, 0]


def test_simulation_emits_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with simulate(2):
            nn.Linear(2, 2).to("sim:1")(torch.ones(1, 2, device="sim:1")).sum().backward()
