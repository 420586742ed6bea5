"""The data of the tasks, and their comparison over the ranks."""

import sys

from helpers.ranks import run_ranks
from helpers.scripts import SCRIPT


def error_of_rank(rank, words_of_last_rank):
    import runpy

    import torch
    import torch.distributed as dist

    from balanced_parallel import parallelize

    parallelize(torch.nn.Linear(1, 1), torch.nn.MSELoss(), ["cpu"])  # starts the process group
    folder = str(SCRIPT.parent)
    sys.path.insert(0, folder)
    try:
        tasks = runpy.run_path(str(SCRIPT.with_name("tasks.py")))
    finally:
        sys.path.remove(folder)
    words = torch.arange(12).view(4, 3)
    rows = tasks["Rows"](words, words if rank < dist.get_world_size() - 1 else torch.tensor(words_of_last_rank).view(4, 3))
    try:
        tasks["check_same_data"](tasks["Task"]("text", torch.nn.Linear(1, 1), rows, rows, 0.1, 1))
    except ValueError as error:
        return str(error)
    return None


def test_data_of_the_ranks_are_compared():
    assert run_ranks(3, error_of_rank, list(range(12))) == [None] * 3
    (error,) = set(run_ranks(3, error_of_rank, list(range(1, 13))))
    assert error.startswith("the data differ, expected the same on all hosts: ")
    digests = [part.split(" on rank ")[0] for part in error.partition("hosts: ")[2].partition(";")[0].split(", ")]
    assert digests[0] == digests[1] != digests[2]
