"""Saves and loads that fail: nothing is silent, nothing is loaded in part, nobody waits longer than the group's timeout."""

import datetime
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.checkpoints import load, names, save
from helpers.ranks import on_ranks, run_ranks
from helpers.steps import make_step as make_any_step
from torch import nn

from balanced_parallel import Checkpoints, parallelize
from balanced_parallel.state import checkpoint

PROGRAM = """
import sys
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from balanced_parallel import Checkpoints

create_stream = FileSystem.create_stream
FileSystem.create_stream = lambda self, path, mode: create_stream(self, sys.argv[2], mode)
Checkpoints(sys.argv[1], net=nn.Linear(4, 3)).save(1)
print("the end")
"""


def test_failed_last_save_without_wait_ends_with_a_message_and_exit_code_1(tmp_path):
    """It ended with exit code 0, in silence."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, "/dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == "the end\n"
    assert "OSError: the checkpoint at 1 in" in done.stderr
    assert "No space left on device); there is no earlier one" in done.stderr


class Slow:
    """Lets a write begin, and wait until it may end."""

    def __init__(self, monkeypatch):
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        write = checkpoint.Writer.write_data

        def slow(*arguments):
            self.has_begun.set()
            assert self.may_end.wait(30)
            return write(*arguments)

        monkeypatch.setattr(checkpoint.Writer, "write_data", slow)


def test_ctrl_c_while_waiting_does_not_forget_the_write(tmp_path, monkeypatch):
    """The next save removed the files that were being written."""
    write = Slow(monkeypatch)
    checkpoints = Checkpoints(tmp_path, net=nn.Linear(4, 3))
    checkpoints.save(1)
    assert write.has_begun.wait(30)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    timer.join()
    assert names(tmp_path) == ["step-00000001.partial"]
    write.may_end.set()
    checkpoints.save(2)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    "begins", [True, False], ids=["after the write has begun", "before it begins"]
)
def test_ctrl_c_before_a_write_is_recorded_does_not_forget_it(begins, tmp_path, monkeypatch):
    """The next save removed the files that were being written: the checkpoint was lost."""
    write = Slow(monkeypatch)
    start = checkpoint.async_save

    def interrupted(*arguments, **options):
        if begins:
            start(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "async_save", interrupted)
    checkpoints = Checkpoints(tmp_path, net=nn.Linear(4, 3))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1)
    monkeypatch.setattr(checkpoint, "async_save", start)
    timer = threading.Timer(0.2, write.may_end.set)
    timer.start()
    checkpoints.save(2)
    checkpoints.wait()
    timer.join()
    assert names(tmp_path) == ["step-00000001", "step-00000002"][not begins :]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    """After ``os.chdir`` nothing was found there, so that a new run began."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    checkpoints = Checkpoints("runs", net=nn.Linear(4, 3))
    checkpoints.save(1)
    monkeypatch.chdir(second)
    assert checkpoints.load_latest() == 1
    assert list(second.iterdir()) == []


def save_on_rank_0(rank, folder):
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    if rank == 1:
        time.sleep(8)
        return None
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out") as caught:
        Checkpoints(folder, net=nn.Linear(4, 3)).save(1)
    assert time.monotonic() - began < 8
    return caught.value.__notes__


@pytest.mark.slow
def test_save_by_one_rank_alone_ends_after_the_timeout_of_the_group(tmp_path):
    """It waited for 30 minutes: a further group has torch's own timeout."""
    notes, _ = run_ranks(2, save_on_rank_0, tmp_path, fresh=True)
    assert notes == [
        "Checkpoints: every rank must call save() and load_latest(), and at the same steps"
    ]


@on_ranks(2)
def test_failure_of_one_rank_is_that_of_all(rank, tmp_path):
    model, _ = parallelize(nn.Linear(4, 3), nn.MSELoss())
    checkpoints = Checkpoints(tmp_path, net=model)
    with pytest.raises(
        ValueError, match=r"ranks call save\(\) with \[1, 2\], expected the same number"
    ):
        checkpoints.save(rank + 1)
    other = checkpoints.load_latest if rank else functools.partial(checkpoints.save, 1)
    with pytest.raises(
        RuntimeError,
        match=r"save\(\) on rank 0 and load_latest\(\) on rank 1, expected the same call on all",
    ):
        other()
    checkpoints.save(3)
    checkpoints.wait()

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(checkpoint.hashlib, "file_digest", fail)
        with pytest.raises(
            OSError,
            match=r"could not be read \(rank 1: \[Errno 5\] Input/output error\): try again",
        ):
            checkpoints.load_latest()
    assert checkpoints.load_latest() == 3


def make_step(optimizer=torch.optim.AdamW, width=3, scheduler=None):
    torch.manual_seed(width)
    net = nn.Linear(4, width)
    own = optimizer(net.parameters(), lr=0.1)
    step = make_any_step(net, optimizer=own, devices=1, scheduler=scheduler and scheduler(own))
    step(torch.ones(2, 4), torch.tensor([0, 1]))
    return step


STEPPED = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2)


@pytest.mark.parametrize(
    ("saved", "loaded", "error", "message"),
    [
        (
            {"optimizer": torch.optim.SGD},
            {},
            ValueError,
            r"the state has the optimizers \['SGD'\], expected \['AdamW'\]",
        ),
        (
            {},
            {"optimizer": torch.optim.Adam},
            ValueError,
            r"the optimizers \['AdamW'\], expected \['Adam'\]",
        ),
        (
            {"scheduler": STEPPED},
            {"scheduler": COSINE},
            ValueError,
            r"the schedulers \['StepLR'\], expected \['CosineAnn",
        ),
        (
            {"width": 5},
            {},
            RuntimeError,
            r"weight of model was saved with shape \[5, 4\], expected \[3, 4\]",
        ),
    ],
    ids=["another optimizer", "its base class", "another scheduler", "another width"],
)
def test_state_of_another_program_is_refused_and_nothing_is_loaded(
    tmp_path, saved, loaded, error, message
):
    """Another optimizer was a KeyError one step later."""
    save(tmp_path, 1, step=make_step(**saved), net=nn.Linear(2, 2))
    step = make_step(**loaded)
    net = nn.Linear(2, 2)
    before = {
        name: tensor.clone()
        for name, tensor in {**step.model.state_dict(), **net.state_dict()}.items()
    }
    for parts in ({"net": net, "step": step}, {"step": step, "net": net}):
        with pytest.raises(error, match=message):
            load(tmp_path, **parts)
    after = {**step.model.state_dict(), **net.state_dict()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    step(torch.ones(2, 4), torch.tensor([0, 1]))


def test_part_that_was_not_saved_is_named_and_nothing_is_loaded(tmp_path):
    """It was ``KeyError: 'ema'`` after the other parts were loaded."""
    net = nn.Linear(2, 2)
    ema = nn.Linear(2, 2)
    save(tmp_path, 1, net=nn.Linear(2, 2), more=nn.Linear(2, 2))
    before = net.weight.clone()
    with pytest.raises(
        ValueError,
        match=r"has the parts net, more, expected ema as well: load it into Checkpoints of the parts",
    ):
        load(tmp_path, net=net, ema=ema)
    assert torch.equal(net.weight, before)
    assert load(tmp_path, net=net) == 1
    assert not torch.equal(net.weight, before)


def test_module_of_other_shapes_is_refused_and_nothing_is_loaded(tmp_path):
    save(tmp_path, 1, net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    before = net[0].weight.clone()
    with pytest.raises(
        RuntimeError, match=r"1.weight of net was saved with shape \[2, 2\], expected \[3, 2\]"
    ):
        load(tmp_path, net=net)
    with pytest.raises(
        RuntimeError,
        match=r"the state of net has 4 entries, expected 2, and only one has 0.bias, .*: build model and optimizer",
    ):
        load(tmp_path, net=nn.Linear(2, 2))
    assert torch.equal(net[0].weight, before)


def test_state_that_is_not_a_steps_is_refused():
    with pytest.raises(
        ValueError,
        match=r"the state lacks criterion, .*weight_before, expected what a TrainStep's state_dict",
    ):
        make_step().load_state_dict({})


@on_ranks(2, timeout=60)
def test_ranks_that_see_different_folders_are_told(rank, tmp_path):
    """Rank 1 has a folder of its own, as on a disk of its host."""
    parallelize(nn.Linear(4, 3), strategy="ddp")
    shared, alone = (
        Checkpoints(path, net=nn.Linear(4, 3))
        for path in (tmp_path / "shared", tmp_path / f"alone{rank}")
    )
    alone.save(1)
    with pytest.raises(
        OSError,
        match="rank 1 has written to another folder, expected one folder that all ranks see",
    ):
        alone.wait()
    shared.save(1)
    shared.wait()
    other = shared if rank == 0 else alone
    with pytest.raises(
        OSError,
        match="ranks see different checkpoints in .*: step-00000001 on rank 0 and none on rank 1$",
    ):
        other.load_latest()
