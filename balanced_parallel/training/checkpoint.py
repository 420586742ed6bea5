"""``Checkpoints``: the state of a run in a folder, written in the background, complete or not there."""

import json
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ..runtime import collectives
from ..runtime.argument_checks import check_number, check_type
from .state_trees import Path as TreePath
from .state_trees import join_tensors, split_tensors, tensor_paths

__all__: list[str] = []


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved, as ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state: tensors, numbers, strings, and lists, tuples and dictionaries of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes a state."""


class Checkpoints:
    """Checkpoints of a run in one folder, by ``torch.distributed.checkpoint``.

    :meth:`save` copies the state to the host and writes it in the background. The folder of a checkpoint gets its name when it is
    complete. A damaged one is recognised when it is read, and the one before it is used. The files are safetensors and JSON, so
    reading them runs no code. A run may go on in another layout: one device, replicas, or any number of ranks. Every rank makes
    the same calls, and all see the same folder.

    Args:
        folder: has a subfolder for each checkpoint.
        keep: complete checkpoints that stay, the newest ones.
        parts: objects with ``state_dict()`` and ``load_state_dict()``, by a name of your choice: a :class:`TrainStep`, which has
            model, optimizers, schedulers and random numbers; a :class:`RankBatchSampler`; objects of your own. Numbers and
            strings of a part may differ between ranks, tensors are the same on all.

    Raises:
        ImportError: the package safetensors is missing.
        TypeError: a part without state.
        ValueError: no parts, or ``keep`` below 1.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> folder, net = TemporaryDirectory(), torch.nn.Linear(4, 2)
        >>> checkpoints = Checkpoints(folder.name, keep=2, net=net)
        >>> checkpoints.load_latest() is None  # a new run
        True
        >>> checkpoints.save(100)
        >>> checkpoints.load_latest()
        100
        >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, **parts: Stateful) -> None:
        check_number("keep", keep, "an integer, the checkpoints that stay", whole=True)
        for name, part in parts.items():
            check_type(name, part, Stateful, "an object with state_dict() and load_state_dict()")
        if not parts or keep < 1:
            raise ValueError(f"{len(parts)} parts and keep={keep}, expected at least one of each: Checkpoints(folder, step=step)")
        try:
            import safetensors.torch  # noqa: F401  an error now, not after the first hours
        except ImportError as error:
            raise ImportError("checkpoints are written as safetensors, expected the package: pip install safetensors") from error
        self.folder, self.keep, self.parts = Path(folder), keep, parts
        self._writing: Future[Any] | None = None
        self._number = 0

    def save(self, number: int) -> None:
        """Saves the present state in the background, after the save before has ended.

        Args:
            number: of the updates so far, for the name of the folder and the return value of :meth:`load_latest`.

        Raises:
            OSError: the save before has failed, for example on a full disk. Earlier checkpoints are still there.
            TypeError: the number is not an integer, or a state is not made of tensors, numbers, strings and containers.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save  # takes seconds, as the files' imports do

        from .checkpoint_files import Writer

        check_number("number", number, "the number of updates so far", at_least=0, whole=True)
        self.wait()
        tree, tensors = split_tensors({name: part.state_dict() for name, part in self.parts.items()})
        rank, ranks = collectives.rank(), collectives.world_size()
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(self.folder / f"step-{number:08}", tree, rank, ranks, self.keep)
        group = _group()
        self._number = number
        self._writing = cast(
            "Future[Any]", async_save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        )

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
            OSError: it has failed.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        from torch.distributed.checkpoint.api import CheckpointException

        from .checkpoint_files import PARTIAL, complete, remove

        try:
            writing.result()
        except (CheckpointException, Exception) as error:  # the first is not an Exception
            failures = getattr(error, "failures", {})
            if failures and collectives.rank() == 0:  # every rank has ended its writing
                remove(self.folder / f"step-{self._number:08}{PARTIAL}")
            known = complete(self.folder)
            left = f"{known[0].name} is the last good one" if known else "there is no earlier one"
            reasons = ", ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures.items()) or str(error)
            raise OSError(f"the checkpoint at {self._number} in {self.folder} was not written ({reasons}); {left}") from error

    def load_latest(self) -> int | None:
        """Loads the newest checkpoint that is undamaged into the parts. Returns its number, or None if there is none.

        A damaged one is renamed, with a warning.

        Raises:
            RuntimeError: all checkpoints are damaged.
        """
        self.wait()
        if not any(collectives.gather_objects(self.folder.is_dir())):
            return None
        from .checkpoint_files import DAMAGED, complete, damage, step_of

        rank, ranks = collectives.rank(), collectives.world_size()
        found = collectives.gather_objects([path.name for path in complete(self.folder)])[0]  # as rank 0 sees them
        for name in found:
            folder = self.folder / name
            reasons = [reason for reason in collectives.gather_objects(damage(folder, rank, ranks)) if reason]
            if not reasons:
                self._load(folder)
                return step_of(folder)
            if rank == 0:
                warnings.warn(f"{folder} is damaged ({'; '.join(reasons)}): the checkpoint before it is used", stacklevel=2)
                folder.rename(f"{folder}{DAMAGED}")
        if found:
            raise RuntimeError(f"all checkpoints in {self.folder} are damaged ({', '.join(found)}): begin anew in another folder")
        return None

    def _load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        from .checkpoint_files import rank_file

        mine = rank_file(folder, collectives.rank())
        same = len(json.loads((folder / "checkpoint.json").read_text())["files"]) == collectives.world_size()
        tree = json.loads((mine if same else rank_file(folder, 0)).read_text())["state"]
        reader = HuggingFaceStorageReader(str(folder))
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for path in tensor_paths(tree):
            key = "/".join(path)
            tensors[key] = self._target(path, saved[key].size, saved[key].properties.dtype)
        group = _group()
        load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        state = join_tensors(tree, tensors.__getitem__)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def _target(self, path: TreePath, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns memory for a saved tensor: the part's own idea of it, or on the host."""
        place: Callable[..., Tensor | None] | None = getattr(self.parts.get(path[0]), "load_target", None)
        target = None if place is None else place(path[1:], size, dtype)
        return torch.empty(size, dtype=dtype) if target is None else target


def _group() -> collectives.Group:
    """Returns the process group for DCP. Without one, its warning is ignored: the thread that writes would raise it each time."""
    group = collectives.checkpoint_group()
    if group is None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    return group
