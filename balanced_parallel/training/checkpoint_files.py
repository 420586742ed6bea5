"""The files of a checkpoint: safetensors and JSON, complete or not there.

    step-00000040/
        shard-00001-model-00001-of-00001.safetensors    tensors that rank 0 has written; shard-00002 is rank 1's
        rank-00000.json                                 other values of rank 0, and the digests of its files
        checkpoint.json                                 the digests of all rank-*.json, written last

The folder is ``step-00000040.partial`` until everything is written. torch's own format has its metadata as a pickle, so the
tensors are in the format of Hugging Face, which DCP writes and reads as well.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

__all__: list[str] = []

PARTIAL, REMOVED, DAMAGED = ".partial", ".removed", ".damaged"


class Writer(HuggingFaceStorageWriter):
    """Writes one checkpoint. Every rank has one; the methods run in a thread, and in the order that DCP gives them.

    Args:
        folder: of the complete checkpoint.
        tree: of this rank, without tensors.
        rank, ranks: this process and the number of processes.
        keep: complete checkpoints that stay.
    """

    def __init__(self, folder: Path, tree: Any, rank: int, ranks: int, keep: int) -> None:
        super().__init__(f"{folder}{PARTIAL}", save_distributed=True)
        self.folder, self.partial = folder, Path(f"{folder}{PARTIAL}")
        self.tree, self.number, self.ranks, self.keep = tree, rank, ranks, keep

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Removes what an interrupted run has left. Rank 0 does so before any rank writes."""
        for path in self.folder.parent.glob(f"step-*{REMOVED}"):
            shutil.rmtree(path)
        for path in self.folder.parent.glob(f"step-*{PARTIAL}"):
            for file in path.iterdir():
                file.unlink()
            if path != self.partial:
                path.rmdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes the tensors of this rank, and its other values."""
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        write_json(rank_file(self.partial, self.number), {"files": digests(self.partial, names), "state": self.tree})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint after all ranks have written, and removes old ones. Rank 0 runs this."""
        names = [rank_file(self.partial, rank).name for rank in range(self.ranks)]
        write_json(self.partial / "checkpoint.json", {"files": digests(self.partial, names)})
        remove(self.folder)
        self.partial.rename(self.folder)
        sync_folder(self.folder.parent)
        for folder in complete(self.folder.parent)[self.keep :]:
            remove(folder)


def complete(parent: Path) -> list[Path]:
    """Returns the folders of complete checkpoints, the newest first."""
    return sorted((path for path in parent.glob("step-*") if path.name[5:].isdecimal()), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Returns the number in a folder's name."""
    return int(folder.name[5:])


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the file with a rank's values."""
    return folder / f"rank-{rank:05}.json"


def write_json(path: Path, value: Any) -> None:
    """Writes a file to the disk."""
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def digests(folder: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Returns size and digest of each file."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = [hashlib.file_digest(file, "sha256").hexdigest(), file.tell()]
    return found


def damage(folder: Path, rank: int, ranks: int) -> str:
    """Returns a sentence about damaged files, or nothing. Each rank looks at its part of them.

    Args:
        folder: of a complete checkpoint.
        rank, ranks: this process and the number of processes now.
    """
    try:
        top = json.loads((folder / "checkpoint.json").read_text())
        for number, (name, expected) in enumerate(top["files"].items()):
            if number % ranks == rank:
                _compare(folder, {name: expected})
                _compare(folder, json.loads((folder / name).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # what is not JSON, or is other JSON
        return f"{type(error).__name__}: {error}"
    return ""


def _compare(folder: Path, expected: dict[str, list[Any]]) -> None:
    for name, (digest, size) in expected.items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes, expected {size}")
        if digests(folder, [name])[name] != [digest, size]:
            raise ValueError(f"{name} has other contents than were written")


def remove(folder: Path) -> None:
    """Removes a checkpoint. It is never there in part."""
    if folder.exists():
        shutil.rmtree(folder.rename(f"{folder}{REMOVED}"))


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
