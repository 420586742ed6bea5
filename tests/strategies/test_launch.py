"""The start and the end of ranks: torchrun's environment, the process group, its store, and the comparison of all ranks."""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.hosts import run_on_two_hosts
from helpers.problems import build_net
from helpers.ranks import on_ranks, run_ranks
from helpers.scripts import SCRIPT, train
from helpers.slow import slow
from torch import nn

from balanced_parallel import parallelize, simulate
from balanced_parallel.runtime import collectives
from balanced_parallel.strategies import launch
from balanced_parallel.strategies.launch import (
    TorchrunEnvironment,
    await_gloo,
    end_process_group,
    join_process_group,
    rank_device,
    store_of_this_start,
)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMPLETE = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def environment(monkeypatch):
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)

    def set_to(**changes):
        for name, value in (COMPLETE | changes).items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_to


def test_environment_has_the_values_of_torchrun_or_is_none(environment):
    assert TorchrunEnvironment.detect() is None
    environment()
    assert TorchrunEnvironment.detect() == TorchrunEnvironment(3, 4, 1, 2, "localhost", 29500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_RANK": None}, "'LOCAL_RANK': None, .* Start the script with torchrun"),
        ({"MASTER_ADDR": None}, "'MASTER_ADDR': None}, expected an address"),
        ({"RANK": "one"}, "'RANK': 'one', .*expected .* integers"),
        ({"MASTER_PORT": "http"}, "'MASTER_PORT': 'http', .*expected .* a port from 1 to 65535"),
        ({"MASTER_PORT": "99999"}, "'MASTER_PORT': '99999', .*expected .* a port from 1 to 65535"),
        ({"RANK": "4"}, "'RANK': '4', 'WORLD_SIZE': '4', .*ranks below their world's size"),
        ({"LOCAL_WORLD_SIZE": "9"}, "'LOCAL_WORLD_SIZE': '9', .*ranks below"),
    ],
)
def test_invalid_environment_raises_an_error(environment, changes, message):
    environment(**changes)
    with pytest.raises(ValueError, match=message):
        TorchrunEnvironment.detect()


@pytest.mark.parametrize(
    "environment",
    [
        # torchrun --virtual-local-rank
        TorchrunEnvironment(1, 2, 0, 2, "localhost", 29500),
        # Slurm, one GPU per task
        TorchrunEnvironment(7, 8, 3, 4, "localhost", 29500),
    ],
)
@pytest.mark.parametrize("device_ids", [None, [0], ["sim:0"]])
def test_a_rank_that_can_see_one_device_uses_it(environment, device_ids):
    with simulate(1):
        assert rank_device(environment, device_ids) == torch.device("sim:0")


def on_one_machine(rank, ranks):
    return TorchrunEnvironment(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)


@pytest.mark.parametrize(
    ("rank", "ranks", "device_ids", "message"),
    [
        (
            2,
            3,
            ["cpu", "cpu"],
            r"started 3 processes on this machine for 2 devices \(cpu, cpu\).*lower --nproc-per-node",
        ),
        (2, 4, None, r"4 processes .* for 2 devices \(sim:0, sim:1\), and this is LOCAL_RANK=2"),
        (
            1,
            2,
            [0],
            r"2 processes .* for 1 devices \(sim:0\), and this is LOCAL_RANK=1",
        ),  # the ranks would share it
    ],
)
def test_fewer_devices_than_ranks_are_an_error_that_names_both(rank, ranks, device_ids, message):
    with simulate(2), pytest.raises(ValueError, match=message):
        rank_device(on_one_machine(rank, ranks), device_ids)


TEXT = " ".join(str(number * number % 61) for number in range(2600))  # rows that differ


@pytest.mark.slow
def test_losses_on_two_hosts_equal_those_of_one_process(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--data", tmp_path / "text.txt", "--steps", 4, "--batch-size", 13, "--devices", "cpu"]
    hosts = run_on_two_hosts(SCRIPT, *flags, "--out", tmp_path / "hosts")
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(host.stderr for host in hosts)
    _, expected, one = train(tmp_path / "one", *flags)
    summary = json.loads((tmp_path / "hosts" / "summary.json").read_text())
    lines = [
        json.loads(line) for line in (tmp_path / "hosts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert summary["ranks"] == 4
    assert hosts[1].stdout == ""  # rank 0 prints, on the first host
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in expected], rel=1e-5
    )
    assert summary["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)


@on_ranks(2, fresh=True)
def test_process_group_different_from_the_environment_raises_an_error(rank):
    dist.init_process_group("gloo")
    model, _ = parallelize(build_net(), nn.MSELoss())  # the running group fits: it is used
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = "5", "5"
    with pytest.raises(
        ValueError, match="rank . of 2, but torchrun's environment says rank . of 5"
    ):
        parallelize(build_net(), nn.MSELoss())
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(
        ValueError, match="2 ranks is running, but torchrun's environment is not there"
    ):
        parallelize(build_net(), nn.MSELoss())
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "address", "in_use", "cause", "remedy"),
    [
        (0, "127.0.0.1", True, "EADDRINUSE.* already in use", "port {port} must be free"),
        slow(0, "127.0.0.1", False, "1/2 clients joined", "all other ranks must be running"),
        slow(
            1,
            "192.0.2.1",
            False,
            "client socket has",
            "rank 0 must be running, .* accept connections to port {port}",
        ),
        (
            1,
            "no-such-host.invalid",
            False,
            "client socket has",
            "rank 0 must be running, .* accept connections to port {port}",
        ),
    ],
)
def test_ranks_that_cannot_meet_raise_one_line_within_the_timeout(
    monkeypatch, rank, address, in_use, cause, remedy
):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if not in_use:
            listener.close()
        values = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": address,
        }
        for name, value in (values | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, str(value))
        start = time.monotonic()
        with pytest.raises(torch.distributed.DistError) as caught:
            join_process_group(
                TorchrunEnvironment.detect(), torch.device("cpu"), timedelta(seconds=0.1)
            )
    expected = f"rank {rank} of 2 could not join the process group at MASTER_ADDR={address}, MASTER_PORT={port}: "
    assert re.match(
        f"{re.escape(expected)}.*{cause}.*{remedy.format(port=port)}.*GLOO_SOCKET_IFNAME[^\n]*$",
        str(caught.value),
    )
    assert time.monotonic() - start < 30  # torch tries twice, and waits in between


def check_end(rank):

    with simulate(2):
        parallelize(nn.Linear(4, 3))
        end_process_group()


def test_the_group_of_simulated_devices_ends_without_a_warning(capfd):
    """torch left the group without a default backend, and printed "No backend of type 0 found" at its end."""
    run_ranks(2, check_end, fresh=True)
    assert "No backend" not in capfd.readouterr().err


RESTARTED = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from balanced_parallel import TrainStep, convert_sync_batchnorm, parallelize

case, how, moment = sys.argv[1:]
fails = os.environ["RANK"] == "0"


def fail(*_):
    time.sleep(1)  # the other rank waits by then
    with open(moment, "w") as file:
        file.write(str(time.time()))
    if how == "sys.exit":
        sys.exit(3)
    raise LookupError("this rank fails")


net = nn.Linear(4, 3)
if case == "batch norm":
    net = convert_sync_batchnorm(nn.Sequential(net, nn.BatchNorm1d(3)))
model, criterion = parallelize(net, nn.MSELoss())
step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
step(torch.randn(2, 4), torch.randn(2, 3))
if fails and case == "batch norm":  # in the backward, where the other rank waits in the layer
    net.register_forward_hook(lambda module, arguments, output: output.register_hook(fail) and None)
if fails and case == "pending":
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    fail()
if case == "pending":
    time.sleep(40)  # and takes no part in the collectives
step(torch.randn(2, 4), torch.randn(2, 3))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "how"), [("batch norm", "raise"), ("pending", "sys.exit")])
def test_a_rank_that_fails_ends_the_job_within_ten_seconds(tmp_path, case, how):
    script = tmp_path / "script.py"
    moment = tmp_path / "moment"
    script.write_text(RESTARTED)
    done = subprocess.run(
        [*TORCHRUN, str(script), case, how, str(moment)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    ended = time.time()
    assert done.returncode != 0
    assert ("LookupError: this rank fails" in done.stderr) == (how == "raise"), done.stderr
    assert f"exitcode  : {3 if how == 'sys.exit' else 1} " in done.stderr, done.stderr
    assert ended - float(moment.read_text()) < 10


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(server, rank, ranks, seconds=20.0):
    environment = TorchrunEnvironment(rank, ranks, rank, ranks, "127.0.0.1", server.port)
    return store_of_this_start(environment, timedelta(seconds=seconds))


def test_each_start_has_an_empty_store_that_its_ranks_share(server):
    for ranks in (2, 2, 1, 3):
        with ThreadPoolExecutor(ranks) as pool:
            stores = list(
                pool.map(lambda rank, ranks=ranks: start(server, rank, ranks), range(ranks))
            )
        assert not any(store.check(["address of 0"]) for store in stores)
        stores[0].set("address of 0", f"{ranks}")
        assert {store.get("address of 0") for store in stores} == {f"{ranks}".encode()}


def test_rank_that_came_alone_and_ended_is_not_waited_for_again(server):
    with ThreadPoolExecutor(3) as pool:
        ended = pool.submit(start, server, 1, 2, 0.5)
        with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
            ended.result()
        stores = [pool.submit(start, server, rank, 2) for rank in (0, 1)]
        stores[0].result().set("key", "value")
        assert stores[1].result().get("key") == b"value"


def test_missing_rank_is_named(server):
    with pytest.raises(RuntimeError, match="ranks 1, 2 have not started within 0 s"):
        start(server, 0, 3, 0.2)


def error_of_rank(rank, folder, change):
    """Returns the error of ``parallelize`` on a rank whose code or versions differ, and the number of all-gathers."""
    torch.manual_seed(rank)  # the values of the parameters may differ
    script = folder / f"host{rank // 2}" / "train.py"
    calls = []
    gather_objects = collectives.gather_objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        patch.setattr(
            collectives,
            "gather_objects",
            lambda value, group=None: calls.append(value) or gather_objects(value),
        )
        if change == "torch" and rank == 2:
            patch.setattr(torch, "__version__", "2.11.0")
        if change == "package" and rank == 2:
            patch.setattr(launch, "__version__", "0.0.1")
        if change == "code" and rank == 2:
            script.write_text("# changed")
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + (change == "shape" and rank == 2)))
        net[0].weight.requires_grad_(not (change == "frozen" and rank == 2))
        if change == "missing" and rank == 2:
            net = net[:1]
        try:
            parallelize(net, nn.MSELoss(), ["cpu"], strategy="ddp")
        except ValueError as error:
            return str(error), len(calls)
    return None, len(calls)


@pytest.fixture
def hosts(tmp_path):
    """Writes the folder of a script for each of two hosts. Ranks 0 and 1 are on the first, rank 2 on the second."""
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "train.py").write_text("# train")
    return tmp_path


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_equal_ranks_agree_in_one_all_gather(hosts):
    assert run_ranks(3, error_of_rank, hosts, "nothing") == [(None, 1)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "code",
            "the script: {} on ranks 0, 1 and {} on rank 2".format(
                *(digest_of(text) for text in ("# train", "# changed"))
            ),
        ),
        ("torch", f"torch: {re.escape(torch.__version__)} on ranks 0, 1 and 2.11.0 on rank 2"),
        ("package", "balanced_parallel: .* on ranks 0, 1 and 0.0.1 on rank 2"),
        (
            "shape",
            r"tensor 1.weight: \[2, 3\] torch.float32 trained on ranks 0, 1 and \[3, 3\] .* on rank 2",
        ),
        (
            "frozen",
            r"tensor 0.weight: \[3, 4\] torch.float32 trained on ranks 0, 1 and \[3, 4\] torch.float32 on rank 2",
        ),
        (
            "missing",
            r"tensor 1.weight: \[2, 3\] torch.float32 trained on ranks 0, 1 and nothing on rank 2; .*",
        ),
    ],
)
def test_different_ranks_raise_one_error_on_all_of_them(hosts, change, message):
    errors = {error for error, _ in run_ranks(3, error_of_rank, hosts, change)}
    assert len(errors) == 1, errors
    assert re.search(
        f"^the ranks differ, expected the same code, versions and settings on all hosts: .*{message}$",
        errors.pop(),
    )


def check_exit_of_a_group_of_the_user(rank):
    parallelize(nn.Linear(4, 3), nn.MSELoss(), ["cpu"])
    registered = []
    with mock.patch("atexit.register", registered.append), mock.patch("atexit.unregister"):
        parallelize(nn.Linear(4, 3), nn.MSELoss(), ["cpu"])  # The group runs already.
    assert registered == [await_gloo]


def test_a_group_of_the_user_ends_when_gloo_has_released_its_tensors():
    """A thread of gloo that released them later aborted the process: "terminate called without an active exception"."""
    run_ranks(2, check_exit_of_a_group_of_the_user)
