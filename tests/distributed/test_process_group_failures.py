"""A rank that fails ends the job, also while collectives are under way that never come to their end."""

import subprocess
import sys
import time

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

SCRIPT = """
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
if fails and case == "backward":
    net.register_forward_hook(fail)
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
@pytest.mark.parametrize(
    ("case", "how"), [("backward", "raise"), ("batch norm", "raise"), ("pending", "raise"), ("pending", "sys.exit")]
)
def test_a_rank_that_fails_ends_the_job_within_ten_seconds(tmp_path, case, how):
    script, moment = tmp_path / "script.py", tmp_path / "moment"
    script.write_text(SCRIPT)
    done = subprocess.run([*TORCHRUN, str(script), case, how, str(moment)], capture_output=True, text=True, timeout=200)
    ended = time.time()
    assert done.returncode != 0
    assert ("LookupError: this rank fails" in done.stderr) == (how == "raise"), done.stderr
    assert f"exitcode  : {3 if how == 'sys.exit' else 1} " in done.stderr, done.stderr
    assert ended - float(moment.read_text()) < 10
