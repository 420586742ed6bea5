"""The files of a checkpoint: safetensors and JSON, complete or not there.

    step-00000040/
        shard-00001-model-00001-of-00001.safetensors    tensors that rank 0 has written; shard-00002 is rank 1's
        rank-00000.json                                 other values of rank 0, and the digests of its tensors
        checkpoint.json                                 the number of ranks, and size and digest of every file, written last

The folder is ``step-00000040.partial`` until everything is on the disk. One that it replaces is ``step-00000040.old`` meanwhile.
torch's own format has its metadata as a pickle, so the tensors are in the format of Hugging Face.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Collection, Iterable
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

MANIFEST, PARTIAL, OLD, REMOVED = "checkpoint.json", ".partial", ".old", ".removed"


class Writer(HuggingFaceStorageWriter):
    """Writes one checkpoint, with the ``tree`` of this rank, in a thread. ``keep`` undamaged checkpoints stay."""

    def __init__(self, folder: Path, tree: Any, rank: int, ranks: int, keep: int, damaged: Collection[int] = ()) -> None:
        super().__init__(f"{folder}{PARTIAL}", save_distributed=True)
        self.folder, self.partial = folder, Path(f"{folder}{PARTIAL}")
        self.tree, self.number, self.ranks, self.keep, self.damaged = tree, rank, ranks, keep, damaged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes the tensors of this rank, and its other values."""
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        write_json(rank_file(self.partial, self.number), {"files": digests(self.partial, names), "state": self.tree})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint after all ranks have written, and removes old ones. Rank 0 runs this."""
        files = {}
        for rank in range(self.ranks):
            path = rank_file(self.partial, rank)
            files.update(json.loads(path.read_text())["files"] | digests(self.partial, [path.name]))
        write_json(self.partial / MANIFEST, {"ranks": self.ranks, "files": files})
        sync_folder(self.partial)
        old = Path(f"{self.folder}{OLD}")
        if os.path.lexists(self.folder):
            self.folder.rename(old)
        self.partial.rename(self.folder)
        sync_folder(self.folder.parent)
        remove(old)
        folders = complete(self.folder.parent)
        last = [number for path in folders if (number := step_of(path)) not in self.damaged][: self.keep][-1]
        for path in folders[self.keep :]:
            if step_of(path) < last:
                remove(path)


class ListedFiles(FileSystem):
    """The files that a manifest names, for a reader of DCP: others in the folder do not belong to the checkpoint."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Returns their paths."""
        return [str(Path(path) / name) for name in json.loads((Path(path) / MANIFEST).read_text())["files"]]


def tidy(parent: Path) -> list[int]:
    """Removes what an interrupted run has left, before any rank writes. Returns the numbers of the complete checkpoints."""
    for path in parent.iterdir():
        if re.fullmatch(rf"step-[0-9]+({OLD}|{PARTIAL}|{REMOVED})", path.name):
            if path.suffix == OLD and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))  # its successor did not get this far
            else:
                remove(path)
    return [step_of(path) for path in complete(parent)]


def complete(parent: Path) -> list[Path]:
    """Returns the folders of complete checkpoints, the highest number first."""
    try:
        paths = sorted(path for path in parent.iterdir() if re.fullmatch(rf"step-[0-9]+({OLD})?", path.name) and path.is_dir())
    except FileNotFoundError:
        return []
    by_number = {step_of(path): path for path in reversed(paths)}  # where there are both, without OLD
    return [by_number[number] for number in sorted(by_number, reverse=True)]


def step_of(folder: Path) -> int:
    """Returns the number in a folder's name."""
    return int(folder.name.removesuffix(OLD)[5:])


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the file with a rank's values."""
    return folder / f"rank-{rank:05}.json"


def read_tree(folder: Path, rank: int, ranks: int) -> Any:
    """Returns the values of this rank, or those of rank 0 if there were other ranks."""
    saved = json.loads((folder / MANIFEST).read_text())["ranks"]
    return json.loads(rank_file(folder, rank if saved == ranks else 0).read_text())["state"]


def write_json(path: Path, value: Any) -> None:
    """Writes a file to the disk."""
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def digests(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Returns digest and size of each file."""
    entries = {}
    for name in names:
        with (folder / name).open("rb") as file:
            entries[name] = [hashlib.file_digest(file, "sha256").hexdigest(), file.tell()]
    return entries


def damage(folder: Path, rank: int, ranks: int) -> str:
    """Returns a sentence about damaged files, or nothing. Each rank looks at its part of them. Files may fail to be read."""
    try:
        with _open_plain(folder, MANIFEST) as file:
            manifest = json.load(file)
        files = manifest["files"]
        for number in range(max(1, manifest["ranks"])):
            if rank_file(folder, number).name not in files:
                raise ValueError(f"{MANIFEST} does not list {rank_file(folder, number).name}")
        for name, (digest, size) in islice(files.items(), rank, None, ranks):
            with _open_plain(folder, name) as file:
                if (length := os.fstat(file.fileno()).st_size) != size:
                    raise ValueError(f"{name} has {length} bytes, expected {size}")
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise ValueError(f"{name} has other contents than were written")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # or it is other JSON
        return f"{type(error).__name__}: {error}"
    return ""


def _open_plain(folder: Path, name: str) -> BufferedReader:
    """Opens a file of the folder, but not a device, a pipe, a link or a file elsewhere, which a manifest might name."""
    path = folder / name
    if path.name != name or not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{name!r} is not a plain file of the folder")
    return path.open("rb")


def remove(path: Path) -> None:
    """Removes a folder or a file, if it is there. A complete checkpoint is never there in part."""
    try:
        if not path.suffix and path.exists():
            path = path.rename(f"{path}{REMOVED}")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
