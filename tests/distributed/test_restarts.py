"""Restarts of the ranks: none of them meets processes that have ended."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from balanced_parallel.distributed.restarts import store_of_this_start
from balanced_parallel.distributed.torchrun import TorchrunEnvironment


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(server, rank, ranks, seconds=20.0):
    environment = TorchrunEnvironment(rank, ranks, rank, ranks, "127.0.0.1", server.port)
    return store_of_this_start(environment, timedelta(seconds=seconds))


def test_each_start_has_an_empty_store_that_its_ranks_share(server):
    for ranks in (2, 2, 1, 3):  # also with another number of ranks
        with ThreadPoolExecutor(ranks) as pool:
            stores = list(pool.map(lambda rank, ranks=ranks: start(server, rank, ranks), range(ranks)))
        assert not any(store.check(["address of 0"]) for store in stores)
        stores[0].set("address of 0", f"{ranks}")
        assert {store.get("address of 0") for store in stores} == {f"{ranks}".encode()}


def test_rank_that_came_alone_and_ended_is_not_waited_for_again(server):
    with ThreadPoolExecutor(3) as pool:
        ended = pool.submit(start, server, 1, 2, 1.0)
        with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
            ended.result()
        stores = [pool.submit(start, server, rank, 2) for rank in (0, 1)]
        stores[0].result().set("key", "value")
        assert stores[1].result().get("key") == b"value"


def test_missing_rank_is_named(server):
    with pytest.raises(RuntimeError, match="ranks 1, 2 have not started within 0 s"):
        start(server, 0, 3, 0.2)
