"""The process group that torchrun prepared."""

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import run_ranks

from balanced_parallel import parallelize


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
