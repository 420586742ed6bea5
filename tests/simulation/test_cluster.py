"""A cluster of simulated devices: its devices, its table, errors, and cleanup at the end of the block.

Categories of memory at the peak.
"""

import copy
import importlib
import re
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run_script
from torch import nn

import balanced_parallel
from balanced_parallel import simulate

MIB = 2**20


def floats(mebibytes, device):
    return torch.empty(mebibytes * MIB // 4, device=device)


def test_devices_exist_inside_the_block_only():
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with simulate(3) as cluster:
        assert cluster.devices == [torch.device("sim", index) for index in range(3)]
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")
        assert (torch.accelerator.device_count(), torch.sim.device_count()) == (3, 3)
        with pytest.raises(
            RuntimeError,
            match="invalid device ordinal: there is no sim:3, the cluster has sim:0 to sim:2",
        ):
            torch.ones(1, device="sim:3")
        with torch.accelerator.device_index(2):
            assert torch.ones(1, device="sim").device == torch.device("sim:2")
    assert torch.accelerator.current_accelerator(check_available=True) is None
    with pytest.raises(RuntimeError, match="only inside `with simulate"):
        torch.ones(1, device="sim:0")


def test_the_table_and_all_numbers_are_readable_after_the_block():
    with simulate(2, memory=["2GiB", "1GiB"]) as cluster:
        torch.ones(MIB).to("sim:1")
        inside = str(cluster)
        expected = cluster.live, cluster.peak, cluster.moved, cluster.categories(1)
    assert str(cluster) == inside
    assert (cluster.live, cluster.peak, cluster.moved, cluster.categories(1)) == expected
    lines = inside.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip())[:5] == [
        "device",
        "memory",
        "now",
        "peak",
        "parameters",
    ]
    assert re.split(r"\s{2,}", lines[3].strip())[:4] == ["sim:1", "1.00 GiB", "0 B", "4.00 MiB"]
    with pytest.raises(RuntimeError, match="peaks can be read, expected changes inside of it"):
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
        (
            (2, "24 gigs"),
            "'24 gigs' is not a memory size, expected a positive number of bytes, or text with a unit",
        ),
        ((2, -1), "-1 is not a memory size"),
        ((2, 1.5), "1.5 is not a memory size"),
        ((2, {"sim:0": 1, "sim:1": 2}), "{'sim:0': 1, 'sim:1': 2} is not a memory size"),
        ((2, torch.device("cpu")), "device(type='cpu') is not a memory size"),
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


def state_of_torch():
    """Returns what a simulation may change: names, hooks, backends and random numbers of torch."""
    # torch.optim has no attribute for this module.
    optimizer = importlib.import_module("torch.optim.optimizer")
    modules = nn.modules.module, nn.parallel.comm, torch.cuda.nccl, optimizer
    places = torch, torch._C, torch.Tensor, nn.Module, *modules
    names = [{name for name in dir(place) if not name.startswith("__")} for place in places]
    hooks = nn.modules.module._global_forward_pre_hooks, optimizer._global_optimizer_pre_hooks
    backends = dist.Backend.default_device_backend_map, dist.Backend.backend_capability
    found = names, [*map(len, hooks)], backends, torch.cuda.nccl.is_available
    return *copy.deepcopy(found), torch.get_rng_state().tolist()


def test_the_end_of_the_block_removes_patches_hooks_and_devices():
    net = nn.Linear(2, 2)
    with simulate(1):
        pass  # makes the changes that torch cannot undo
    modules = set(sys.modules)
    state = state_of_torch()
    with simulate(2):
        torch.rand(3, device="sim:1")
        assert nn.DataParallel(net.to("sim:0"))(torch.ones(2, 2)).shape == (2, 2)
    assert state_of_torch() == state
    assert set(sys.modules) - modules <= {name for name in sys.modules if name.startswith("torch.")}


def test_programs_after_the_block_find_no_accelerator():
    with simulate(2):
        pass
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
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


LATE = """
import warnings, torch
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # as in pyproject.toml
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


def test_clusters_work_after_a_backward_and_in_forked_processes(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    done = run_script(tmp_path / "late.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4.0, 4.0, 4.0]\n", "")


def test_a_capacity_that_nothing_reaches_is_as_none():
    """It was 0 bytes: the native code has 64 bits."""
    with simulate(1, memory=2**70) as cluster:
        assert torch.ones(4, device="sim:0").sum() == 4
    assert cluster.memory == [2**70]


def test_other_wrong_arguments_are_named():
    with (
        pytest.raises(TypeError, match="strict='no', expected True or False"),
        simulate(1, strict="no"),
    ):
        pass
    message = r"fail_allocation\(.*\), expected 1 for the next allocation, or a larger number"
    with simulate(1) as cluster:
        for bad in (1.5, "a", None, 0):
            with pytest.raises(ValueError, match=message):
                cluster.fail_allocation(bad)


def test_nn_data_parallel_runs_in_clusters_of_different_sizes():
    """torch caches a list of streams with the length of the first cluster."""
    net = nn.Linear(2, 2)
    for devices in (2, 4, 3):
        with simulate(devices) as cluster:
            assert nn.DataParallel(net.to("sim:0"))(torch.ones(8, 2)).shape == (8, 2)
            assert cluster.categories(1)["parameters"] >= sum(
                parameter.nbytes for parameter in net.parameters()
            )
        net.cpu()
    assert nn.parallel._functions._streams is None


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
        assert list(parts) == [
            "parameters",
            "gradients",
            "optimizer state",
            "inputs",
            "activations",
            "temporaries",
        ]
        assert sum(parts.values()) == cluster.peak[0]
        assert (parts["parameters"], parts["inputs"]) == (size, 2 * 64 * 4)
        assert parts["gradients"] == size
        assert (
            2 * size <= parts["optimizer state"] <= 2 * size + 4 * 512
        )  # Each parameter has a step count.
        adam_step(cluster, net, rows=8192)
        parts = cluster.categories(0)  # now the peak is in the backward
        assert parts["activations"] >= 8192 * 1024 * 4
        assert parts["temporaries"] >= 8192 * 1024 * 4  # the gradient of an activation
        assert (parts["parameters"], parts["inputs"]) == (size, 8192 * 64 * 4)


def test_categories_without_an_optimizer_have_gradients_and_frozen_parameters():
    with simulate(1) as cluster:
        net = (
            nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512))
            .requires_grad_(False)
            .to("sim:0")
        )
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
        expected = cluster.categories(0)
        peak = cluster.peak
        del inputs
        small = torch.ones(4, device="sim:0")
        for _ in range(70_000):  # longer than the ledger's log
            small + small
        assert (cluster.peak, cluster.categories(0)) == (peak, expected)


def test_recomputed_activations_have_the_category_activations():
    from torch.utils.checkpoint import checkpoint

    with simulate(1) as cluster:
        net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 4)).to("sim:0")
        checkpoint(
            net, torch.ones(512, 64, requires_grad=True).to("sim:0"), use_reentrant=False
        ).sum().backward()
        assert cluster.categories(0)["activations"] >= 512 * 2048 * 4
