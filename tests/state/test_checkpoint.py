"""Checkpoints: exact resumption, damaged files, a full disk, and no pickles."""

import errno
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import Part, contents, load, names, save
from torch import nn

from balanced_parallel import (
    BalancedOptimizer,
    ByCost,
    Checkpoints,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
)

GENERATORS = [torch.Generator().manual_seed(number) for number in range(8)]
BATCHES = [
    (torch.randn(9, 4, generator=one, dtype=torch.float32), torch.arange(9) % 3)
    for one in GENERATORS
]


def make_step(devices=("cpu",), optimizer="balanced", dropout=0.3, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3))
    model = DataParallelModel(net, list(devices))
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    groups = [
        {"params": list(model.parameters())[:2], "weight_decay": 0.1},
        {"params": list(model.parameters())[2:]},
    ]
    if optimizer == "balanced":
        adam = BalancedOptimizer(model, torch.optim.AdamW, groups, lr=0.05)
    else:
        adam = torch.optim.AdamW(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(adam, [3, 6])
    return TrainStep(model, criterion, adam, scheduler=scheduler, max_grad_norm=1.0, **settings)


def run(step, begin, end, batches=BATCHES):
    return [step(*batch).item() for batch in batches[begin:end]]


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (["cpu"], {"precision": "fp16", "micro_batch_size": 4}),
        (["cpu"] * 3, {"dropout": 0.0, "micro_batch_size": "auto"}),
        (["cpu"], {"optimizer": "plain"}),
    ],
)
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, devices, settings):
    expected = make_step(devices, **settings)
    losses = run(expected, 0, 8)
    draws = torch.rand(2), random.random(), np.random.rand()

    before = make_step(devices, **settings)
    random.seed(3)
    checkpoints = Checkpoints(tmp_path, step=before)
    found = run(before, 0, 5)
    checkpoints.save(5)
    random_after = random.random()
    run(before, 6, 8)  # while it is written
    checkpoints.wait()

    after = make_step(devices, **settings)
    torch.rand(5)
    assert load(tmp_path, step=after) == 5
    assert random.random() == random_after
    assert found + run(after, 5, 8) == losses
    for mine, other in zip(contents(after)[0].items(), contents(expected)[0].items(), strict=True):
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1]), mine[0]
    assert contents(after)[1:] == contents(expected)[1:]
    assert torch.equal(torch.rand(2), draws[0])


@pytest.fixture
def three(tmp_path):
    """Checkpoints at 1, 2 and 3."""
    step = make_step()
    checkpoints = Checkpoints(tmp_path, step=step)
    for number in (1, 2, 3):
        run(step, number, number + 1)
        checkpoints.save(number)
    checkpoints.wait()
    return tmp_path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [truncate, change, Path.unlink])
@pytest.mark.parametrize(
    "name", ["checkpoint.json", "rank-00000.json", "shard-00001-model-00001-of-00001.safetensors"]
)
def test_damaged_checkpoint_is_passed_over_with_a_warning(three, harm, name):
    harm(three / "step-00000003" / name)
    with pytest.warns(UserWarning, match="step-00000003 is damaged .*, and passed over"):
        assert load(three, step=make_step()) == 2


def test_interrupted_checkpoint_does_not_count_and_is_removed(three):
    (three / "step-00000003").rename(three / "step-00000003.partial")
    (three / "step-00000001").rename(three / "step-00000001.removed")
    assert load(three, step=make_step()) == 2
    save(three, 2, keep=1, step=make_step())
    assert names(three) == ["step-00000002"]


def test_full_disk_is_one_clear_error_and_leaves_the_last_good_checkpoint(three, monkeypatch):
    from torch.distributed.checkpoint.filesystem import FileSystem

    create_stream = FileSystem.create_stream
    monkeypatch.setattr(
        FileSystem, "create_stream", lambda self, path, mode: create_stream(self, "/dev/full", mode)
    )
    checkpoints = Checkpoints(three, step=make_step())
    checkpoints.save(4)
    message = (
        rf"checkpoint at 4 in .* was not written \(rank 0: \[Errno {errno.ENOSPC}\] No space left .*; "
        "step-00000003 is the last"
    )
    with pytest.raises(OSError, match=message):
        checkpoints.wait()
    assert sorted(path.name for path in three.iterdir()) == [
        f"step-0000000{number}" for number in (1, 2, 3)
    ]
    assert load(three, step=make_step()) == 3


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("with_digests", [False, True])
def test_planted_pickle_does_not_run(three, tmp_path, with_digests):
    from balanced_parallel.state.checkpoint import digests

    planted = tmp_path / "exploded"
    folder = three / "step-00000003"
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3
    for name in [*names, ".metadata", "extra.pt", "extra.distcp"]:
        if with_digests and name in ("checkpoint.json", "rank-00000.json"):
            continue
        torch.save(Bomb(planted), folder / name) if name.endswith("safetensors") else (
            folder / name
        ).write_bytes(pickle.dumps(Bomb(planted)))
    if with_digests:  # as somebody who knows the format
        for name in ("rank-00000.json", "checkpoint.json"):
            entries = json.loads((folder / name).read_text())
            entries["files"] = digests(folder, list(entries["files"]))
            (folder / name).write_text(json.dumps(entries))
        with pytest.raises(Exception, match="(?i)safetensor|header|metadata is None"):
            load(three, step=make_step())
    else:
        with pytest.warns(UserWarning, match="is damaged"):
            assert load(three, step=make_step()) == 2
    assert not planted.exists()
    pickle.loads(pickle.dumps(Bomb(planted)))
    assert planted.exists()


def test_states_that_cannot_be_saved_raise_an_error_that_names_the_place(tmp_path):
    part = Part()
    part.state = {"hooks": [print]}
    with pytest.raises(
        TypeError, match=r"part/hooks/0 is a builtin_function_or_method, expected tensors, numbers"
    ):
        save(tmp_path, 1, part=part)
    step = make_step()
    step.add(*BATCHES[0])
    with pytest.raises(RuntimeError, match=r"expected apply\(\) before state_dict\(\)"):
        save(tmp_path, 1, step=step)
    with pytest.raises(ValueError, match=r"0 parts and keep=3, expected at least one"):
        Checkpoints(tmp_path)


def test_state_of_other_parameters_raises_an_error():
    state = make_step().state_dict()
    group = state["optimizers"][0]["param_groups"][0]
    group["params"] = group["params"][:1]
    with pytest.raises(
        ValueError,
        match="param group 0 of the state has 1 parameters, expected 2, .* has model.0.bias: build model and optimizer",
    ):
        make_step().load_state_dict(state)


def test_limit_of_rows_is_not_taken_as_a_cost():
    cut = ByCost(len, collate=tuple)
    saved, same, by_cost = (
        make_step(micro_batch_size="auto", cut=each) for each in (None, None, cut)
    )
    saved.micro_batch_size = 2
    for step in (same, by_cost):
        step.load_state_dict(saved.state_dict())
    assert (same.micro_batch_size, by_cost.micro_batch_cost) == (2, None)
