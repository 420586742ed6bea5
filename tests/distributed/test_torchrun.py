"""Environment variables of torchrun."""

import pytest
import torch

from balanced_parallel import simulate
from balanced_parallel.distributed.process_group import rank_device
from balanced_parallel.distributed.torchrun import TorchrunEnvironment

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


def test_environment_without_torchrun_is_none(environment):
    assert TorchrunEnvironment.detect() is None


def test_environment_has_the_values_of_torchrun(environment):
    environment()
    assert TorchrunEnvironment.detect() == TorchrunEnvironment(rank=3, world_size=4, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, "lacks LOCAL_RANK, MASTER_PORT: start the script with torchrun"),
        ({"RANK": "one"}, "has RANK='one', .*expected integers"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http', expected integers"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999, expected 1 to 65535"),
        ({"RANK": "4"}, "RANK=4 of WORLD_SIZE=4 .*expected each rank below"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9, expected"),
    ],
)
def test_invalid_environment_raises_an_error(environment, changes, message):
    environment(**changes)
    with pytest.raises(ValueError, match=message):
        TorchrunEnvironment.detect()


def test_device_follows_the_local_rank():
    second = TorchrunEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)
    cpu = torch.device("cpu")
    assert rank_device(second, ["cpu"]) == cpu
    assert rank_device(second, ["cpu", "cpu"]) == cpu
    third = TorchrunEnvironment(rank=2, world_size=3, local_rank=2, local_world_size=3)
    with pytest.raises(
        ValueError, match=r"started 3 processes on this machine for 2 devices \(cpu, cpu\).*lower --nproc-per-node"
    ):
        rank_device(third, ["cpu", "cpu"])


@pytest.mark.parametrize(
    "environment",
    [
        TorchrunEnvironment(rank=1, world_size=2, local_rank=0, local_world_size=2),  # torchrun --virtual-local-rank
        TorchrunEnvironment(rank=7, world_size=8, local_rank=3, local_world_size=4),  # Slurm, one GPU per task
    ],
)
@pytest.mark.parametrize("device_ids", [None, [0], ["sim:0"]])
def test_a_rank_that_can_see_one_device_uses_it(environment, device_ids):
    with simulate(1):
        assert rank_device(environment, device_ids) == torch.device("sim:0")


def test_fewer_devices_than_ranks_are_an_error_that_names_both():
    third = TorchrunEnvironment(rank=2, world_size=4, local_rank=2, local_world_size=4)
    with simulate(2):
        with pytest.raises(ValueError, match=r"4 processes .* for 2 devices \(sim:0, sim:1\), and this is LOCAL_RANK=2"):
            rank_device(third, None)
        second = TorchrunEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)
        assert rank_device(second, None) == torch.device("sim:1")
        with pytest.raises(ValueError, match=r"2 processes .* for 1 devices \(sim:0\), and this is LOCAL_RANK=1"):
            rank_device(second, [0])  # two are visible, so the ranks would share it
