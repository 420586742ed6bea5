"""Faults of ranks, scripted: nothing is lost, nothing is trained twice, nobody hangs."""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import run_ranks
from helpers.scripts import SCRIPT, SENTENCES
from helpers.steps import parallel_step
from helpers.torchrun import run_torchrun
from torch import nn

FAULTS = SCRIPT.parents[1] / "benchmarks" / "faults" / "inject.py"
# 17, 17 and 1 row: one rank has none. With a larger learning rate, AdamW turns the rounding of two ranks and of one into 1e-4.
FLAGS = [
    "--batch-size",
    17,
    "--steps",
    12,
    "--checkpoint-every",
    2,
    "--resume",
    "--learning-rate",
    3e-4,
]
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SENTENCES)
    return path


def program(faults, text, out):
    return [FAULTS, out / "faults", faults, SCRIPT, "--data", text, "--out", out, *FLAGS]


def lines_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    done = run_torchrun(*program("none:0:0", text, out))
    assert done.returncode == 0, done.stderr
    lines = lines_of(out)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    return lines


@pytest.mark.slow  # the start after a fault is that of tests/scripts/test_train_resume.py, and has a store of its own
def test_ranks_that_die_anywhere_are_restarted_and_nothing_is_lost_or_trained_twice(
    undisturbed, text, tmp_path
):
    faults = ["forward:1:4", "backward:0:3", "checkpoint:1:2", "exchange:0:3", "loader:1:2"]
    flags = f"--max-restarts={len(faults)}", "--monitor-interval=0.1"
    done = run_torchrun(*flags, *program(",".join(faults), text, tmp_path))
    assert done.returncode == 0, done.stderr
    assert [name[2:] for name in sorted(os.listdir(tmp_path / "faults"))] == [
        fault.split(":")[0] for fault in faults
    ]
    assert "LookupError: the loader of this rank fails" in done.stderr
    assert lines_of(tmp_path) == undisturbed


def hang(rank):
    """Rank 1 hangs in the forward of its third step. Returns the error of the other rank."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    net = build_net()
    step = parallel_step(net, nn.MSELoss())
    batch = torch.ones(2, 4), torch.ones(2, 5)
    for _ in range(2):
        step(*batch)
    if rank == 1:
        time.sleep(8)
        return None
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout") as caught:
        step(*batch)
    return caught.value.__notes__, caught.value.__context__


@pytest.mark.slow
def test_timeout_names_the_flight_recorder_of_torch():
    ((of_telling, note), cause), _ = run_ranks(2, hang, fresh=True)
    assert note.startswith("rank 0 waits in a collective that another rank has not come to")
    assert "TORCH_FR_BUFFER_SIZE=2000" in note
    assert cause is None  # One error is printed, with a note about that of telling the other ranks.
    assert of_telling.startswith("after this error, ")


def wait_for_listener(port):
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


@pytest.mark.slow
def test_number_of_ranks_changes_at_a_restart(undisturbed, text, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    quick = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=2",
    ]
    launcher += [
        "--monitor-interval=0.1",
        f"--rdzv-id={port}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        quick,
    ]
    whole = list(map(str, [*launcher, *program("hang:1:7", text, tmp_path)]))
    hosts = [subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)]
    try:
        wait_for_listener(port)  # the first has the store
        hosts.append(subprocess.Popen(whole, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 100
        folder = tmp_path / "faults"
        while not folder.exists() or not (
            hanging := "".join(path.read_text() for path in folder.iterdir())
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts[1].kill()  # the whole host: torchrun and its rank
        os.kill(int(hanging), signal.SIGKILL)
        _, errors = hosts[0].communicate(timeout=120)
        assert hosts[0].returncode == 0, errors
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert json.loads((tmp_path / "summary.json").read_text())["ranks"] == 1
    for found, expected in zip(lines_of(tmp_path), undisturbed, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
