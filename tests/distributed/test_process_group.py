"""The process group that torchrun prepared."""

import contextlib
import re
import socket
import time
from datetime import timedelta

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import run_ranks

from balanced_parallel import parallelize, simulate
from balanced_parallel.distributed.process_group import end_process_group, join_process_group
from balanced_parallel.distributed.torchrun import TorchrunEnvironment


def check_disagreement(rank):
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, _ = parallelize(build_net(), torch.nn.MSELoss())  # the running group fits: it is used
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = "5", "5"
    with pytest.raises(ValueError, match="rank . of 2, but torchrun's environment says rank . of 5"):
        parallelize(build_net(), torch.nn.MSELoss())
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(ValueError, match="2 ranks is running, but torchrun's environment is not there"):
        parallelize(build_net(), torch.nn.MSELoss())
    dist.destroy_process_group()
    return True


def test_process_group_different_from_the_environment_raises_an_error():
    assert run_ranks(2, check_disagreement, fresh=True) == [True, True]


@pytest.mark.parametrize(
    ("rank", "address", "in_use", "cause", "remedy"),
    [
        (0, "127.0.0.1", True, "EADDRINUSE.* already in use", "port {port} must be free"),
        (0, "127.0.0.1", False, "1/2 clients joined", "all other ranks must be running"),
        # an address without a host, RFC 5737
        (
            1,
            "192.0.2.1",
            False,
            "client socket has",
            "Rank 0 must be running, .* accept connections to port {port}",
        ),
        (1, "no-such-host.invalid", False, "client socket has", "Rank 0 must be running"),
    ],
)
def test_ranks_that_cannot_meet_raise_one_line_within_the_timeout(monkeypatch, rank, address, in_use, cause, remedy):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if not in_use:
            listener.close()
        values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": address}
        for name, value in (values | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, str(value))
        start = time.monotonic()
        with pytest.raises(torch.distributed.DistError) as caught:
            join_process_group(TorchrunEnvironment.detect(), torch.device("cpu"), timedelta(seconds=1))
    expected = f"rank {rank} of 2 could not join the process group at MASTER_ADDR={address}, MASTER_PORT={port}: "
    assert re.match(f"{re.escape(expected)}.*{cause}.*{remedy.format(port=port)}.*GLOO_SOCKET_IFNAME[^\n]*$", str(caught.value))
    assert time.monotonic() - start < 30  # torch tries twice, and waits in between


def check_end(rank):
    import torch.testing._internal.distributed.fake_pg  # as torch._dynamo does: it registers a backend

    with simulate(2):
        parallelize(torch.nn.Linear(4, 3))
        end_process_group()


def test_the_group_of_simulated_devices_ends_without_a_warning(capfd):
    """torch left the group without a default backend, and printed "No backend of type 0 found" at its end."""
    run_ranks(2, check_end, fresh=True)
    assert "No backend" not in capfd.readouterr().err
