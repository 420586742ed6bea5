"""The folder of a run at every moment of a save: a process is killed before each of its calls that change the disk."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from helpers.checkpoints import Part, names
from helpers.checkpoints import load as load_parts
from helpers.checkpoints import save as save_parts
from helpers.processes import start_process
from helpers.slow import slow

from balanced_parallel import Checkpoints
from balanced_parallel.state import checkpoint

CALLS = ("rename", "fsync", "mkdir", "unlink", "rmdir", "open")


def save(folder, number, value=None, **settings):
    value = number if value is None else value
    save_parts(
        folder,
        number,
        part=Part({"value": value, "tensor": torch.full((3,), float(value))}),
        **settings,
    )


def save_two(folder):
    save(folder, 1)
    save(folder, 2)


def load(folder):
    part = Part({"value": 0, "tensor": torch.zeros(3)})
    number = load_parts(folder, part=part)
    assert part.state["tensor"].tolist() == [part.state["value"]] * 3
    return number, part.state["value"]


def save_until(folder, number, value, keep, limit):
    """Saves, and kills this process before the call number ``limit``."""
    count = 0

    def counting(call):
        def counted(*arguments, **kwargs):
            nonlocal count
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    save(folder, number, value, keep=keep)


@pytest.mark.parametrize(
    ("number", "keep", "every"), [(2, 3, 6), (3, 1, 8), slow(2, 3, 1), slow(3, 1, 1)]
)
def test_process_killed_before_any_call_leaves_the_old_or_the_new_state(
    tmp_path, number, keep, every
):
    """35 of 150 kills lost the checkpoint that was to be replaced."""
    outcomes = []
    for limit in range(1, 60, every):
        folder = tmp_path / str(limit)
        save_two(folder)
        process = start_process(save_until, (folder, number, 20, keep, limit))
        process.join(60)
        before = names(folder)
        outcomes.append(load(folder))
        assert names(folder) == before  # loading changes nothing
        assert outcomes[-1] in [(2, 2), (number, 20)], before
        if outcomes[-1] == (2, 2):
            save(folder, number, 30)
            assert load(folder) == (number, 30)
        save(folder, 4, keep=1)
        assert names(folder) == ["step-00000004"]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    assert len(outcomes) > 8 // every
    assert outcomes == sorted(outcomes)  # the new state is there from one moment on
    assert outcomes[0] != outcomes[-1]


def test_new_run_in_the_folder_of_another_is_refused_before_it_prunes(tmp_path):
    """Checkpoints of the new run were pruned at once, since their numbers were lower."""
    for number in (100, 200):
        save(tmp_path, number, keep=2)
    with pytest.raises(
        ValueError,
        match=r"the number is 10, and .* has a checkpoint at 200, .* a new run a folder of its own",
    ):
        save(tmp_path, 10, keep=2)
    assert names(tmp_path) == ["step-00000100", "step-00000200"]


def damage(folder, number):
    (folder / f"step-{number:08}" / "rank-00000.json").write_text("{}")


def test_damaged_checkpoint_is_passed_over_each_time_and_replaced_by_the_next_save(tmp_path):
    """A second one with the number could not be renamed, and nothing loaded."""
    for number in (1, 2, 3):
        save(tmp_path, number)
    for value in (30, 31):
        damage(tmp_path, 3)
        checkpoints = Checkpoints(
            tmp_path, part=Part({"value": value, "tensor": torch.full((3,), float(value))}), keep=2
        )
        with pytest.warns(UserWarning, match="step-00000003 is damaged"):
            assert checkpoints.load_latest() == 2
        checkpoints.save(
            2
        )  # is not refused, and prunes no undamaged one in favour of the damaged one
        checkpoints.wait()
        assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
        checkpoints.save(3)
        checkpoints.wait()
        assert names(tmp_path) == ["step-00000002", "step-00000003"]
        assert load(tmp_path)[0] == 3
        shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000001")


def test_all_damaged_raises_at_each_start(tmp_path):
    """The second start began anew in the folder."""
    save(tmp_path, 1)
    damage(tmp_path, 1)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="is damaged"),
            pytest.raises(RuntimeError, match="all checkpoints in .* are damaged"),
        ):
            load(tmp_path)


@pytest.mark.parametrize(
    ("code", "place"),
    [
        (errno.EIO, "lstat"),
        (errno.ESTALE, "file_digest"),
        (errno.EACCES, "listing"),
        (errno.EIO, "file_digest"),
    ],
)
def test_file_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, code, place):
    """The good newest checkpoint was renamed for ever."""
    save_two(tmp_path)

    def fail(*arguments, **kwargs):
        raise OSError(code, os.strerror(code))

    owner, name = {
        "lstat": (checkpoint.Path, "lstat"),
        "file_digest": (checkpoint.hashlib, "file_digest"),
        "listing": (checkpoint.Path, "iterdir"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match=r"could not be read \(rank 0: .*try again"):
            load(tmp_path)
    assert load(tmp_path) == (2, 2)


LISTED = {  # additions to the files of a manifest, and the error
    "/dev/zero": "'/dev/zero' is not a plain file of the folder",
    "../step-00000001/checkpoint.json": "is not a plain file",
    "..": "is not a plain file",
    "pipe": "'pipe' is not a plain file",
    "link": "'link' is not a plain file",
    None: "checkpoint.json does not list rank-00000.json",
}


@pytest.mark.parametrize("name", LISTED)
def test_manifest_of_other_files_is_damage(tmp_path, name):
    """A device or a pipe was read for ever, and a manifest of no files was good."""
    save_two(tmp_path)
    os.mkfifo(tmp_path / "step-00000002" / "pipe")
    os.symlink("/dev/zero", tmp_path / "step-00000002" / "link")
    path = tmp_path / "step-00000002" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = manifest["files"] | {name: ["0", 0]} if name else {}
    path.write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match=LISTED[name]):
        assert load(tmp_path) == (1, 1)


@pytest.mark.parametrize(
    "harm",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)],
    ids=["pipe", "folder", "link"],
)
def test_manifest_that_is_not_a_plain_file_is_damage(tmp_path, harm):
    save_two(tmp_path)
    path = tmp_path / "step-00000002" / "checkpoint.json"
    path.unlink()
    harm(path)
    with pytest.warns(UserWarning, match="'checkpoint.json' is not a plain file"):
        assert load(tmp_path) == (1, 1)


def test_file_that_the_manifest_does_not_list_is_not_loaded(tmp_path):
    """Tensors of that file took the place of those of the checkpoint."""
    from safetensors.torch import save_file

    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    for name in ("a.safetensors", "zzz.safetensors"):
        save_file({"part/tensor": torch.full((3,), 666.0)}, folder / name)
    assert load(tmp_path) == (1, 1)
    shard = next(path for path in folder.iterdir() if path.name.startswith("shard"))
    edits = json.loads((folder / "checkpoint.json").read_text())
    del edits["files"][shard.name]
    (folder / "checkpoint.json").write_text(json.dumps(edits))
    with pytest.raises(
        OSError, match=r"could not be read .*Missing key in checkpoint state_dict: part/tensor"
    ):
        load(tmp_path)


def test_files_that_others_have_left_disturb_neither_saving_nor_loading(tmp_path):
    """A folder in ``.partial`` or a file of that name made every later save fail."""
    save(tmp_path, 1)
    (tmp_path / "step-00000002.partial" / "folder").mkdir(parents=True)
    (tmp_path / "step-00000003.partial").write_text("a file")
    (tmp_path / "step-best.partial").write_text("of the user")
    (tmp_path / "step-00000009.removed" / "folder").mkdir(parents=True)
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000004.removed").symlink_to(tmp_path / "step-00000001")
    assert load(tmp_path) == (1, 1)
    for number in (2, 3, 7):
        save(tmp_path, number)
    assert load(tmp_path) == (7, 7)
    assert names(tmp_path) == [
        "step-00000002",
        "step-00000003",
        "step-00000007",
        "step-best.partial",
    ]


def test_folder_that_is_read_only_loads_the_one_before_a_damaged_one(tmp_path, monkeypatch):
    """Renaming the damaged one failed."""
    save_two(tmp_path)
    damage(tmp_path, 2)

    def refuse(*arguments, **kwargs):
        raise OSError(
            errno.EROFS, "Read-only file system"
        )  # as for root, who may write to a folder without permissions

    for name in ("rename", "unlink", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert load(tmp_path) == (1, 1)


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def refuse(path, **kwargs):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(
        UserWarning, match=r"step-00000001.removed could not be removed: .*Permission denied"
    ):
        checkpoint.remove(tmp_path / "step-00000001")
