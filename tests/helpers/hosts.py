"""Two hosts on this machine: network namespaces with a cable (a veth pair) between them."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import Script
from helpers.torchrun import launch

ADDRESSES = ["10.83.0.1", "10.83.0.2"]


def run_on_two_hosts(script, *arguments, ranks_per_host=2, timeout=120):
    """Runs a script with torchrun on two hosts. Returns a ``subprocess.CompletedProcess`` for each of them."""
    with network_namespaces(f"bp{os.getpid()}") as hosts:

        def start(host, address):
            launcher = [
                "--nnodes=2",
                f"--nproc-per-node={ranks_per_host}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={ADDRESSES[0]}:29400",
                # a namespace has the name of the machine, which does not resolve to its address
                f"--rdzv-conf=is_host={int(address == ADDRESSES[0])}",
                f"--local-addr={address}",
            ]
            environment = {"GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1"}
            return Script(Path(__file__), host, *launcher, script, *arguments, **environment)

        try:
            scripts = list(map(start, hosts, ADDRESSES))
            return [script.wait(timeout) for script in scripts]
        finally:
            kill_processes(hosts)


@contextlib.contextmanager
def network_namespaces(prefix):
    """Yields the names of two connected network namespaces, which are also the names of their interfaces.

    The test is skipped if they are not permitted.
    """
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command ip, which is not installed (package iproute2)")
    hosts = [f"{prefix}-{number}" for number in range(2)]
    first, second = hosts
    try:
        for host in hosts:
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            first,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            second,
            "netns",
            second,
        )
        for host, address in zip(hosts, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", host, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


def ip(*arguments):
    """Runs the command ``ip``. Skips the test if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            f"two hosts need network namespaces, but ip {' '.join(arguments)} failed: {done.stderr.strip()}"
        )


def kill_processes(hosts):
    """Kills what is still running in these namespaces, as ranks whose torchrun was killed."""
    for host in hosts:
        listing = subprocess.run(
            ["ip", "netns", "pids", host], capture_output=True, text=True
        ).stdout
        for pid in listing.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _enter(namespace):
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns is of Python 3.12
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns({namespace}) failed")


if __name__ == "__main__":
    _enter(sys.argv[1])
    launch(sys.argv[2:])
