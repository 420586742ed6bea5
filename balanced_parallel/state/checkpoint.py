"""``Checkpoints``: the state of a run in a folder, written in the background, complete or not
there::

    step-00000040/
        shard-00001-model-00001-of-00001.safetensors    tensors that rank 0 has written; shard-00002 is rank 1's
        rank-00000.json                                 other values of rank 0, and digests of its files and parameters
        checkpoint.json                                 number of ranks, digests of the parameters and of every file, written last

The folder is ``step-00000040.partial`` until everything is on the disk. One that it replaces is
``step-00000040.old`` meanwhile. torch's own format has its metadata as a pickle, so the tensors are
in the format of Hugging Face.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from ..runtime import collectives, torch_private, values
from .state import (
    TrainedState,
    TreePath,
    check_same_tensors,
    describe_bits,
    digest_lines,
    join_tensors,
    split_tensors,
    tensor_key,
)

MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
OLD = ".old"
REMOVED = ".removed"
_ONE_FOLDER = "one folder that all ranks see, on a disk that their hosts share"
# Saves of this process that nobody has waited for, and their folders. The end of the program
# reports them, when objects are gone.
_unreported: dict[Future[Any], Path] = {}


@runtime_checkable
class Part(Protocol):
    """A part of :class:`Checkpoints` that has objects with state, as a :class:`TrainStep`."""

    def trained_state(self) -> TrainedState:
        """Returns the state of these objects."""


class Checkpoints(values.SaysInstead):
    """Checkpoints of a run in one folder, by ``torch.distributed.checkpoint``.

    :meth:`save` copies the state to the host and writes it in the background. A checkpoint is
    complete or not there. A damaged one is passed over. The files are safetensors and JSON, so
    reading them runs no code. A run may go on in another layout: one device, replicas, or any
    number of ranks. Every rank makes the same calls, and all see the same folder.

    Args:
        folder: has a subfolder for each checkpoint.
        keep: complete checkpoints that stay, the newest ones.
        parts: objects with ``state_dict()`` and ``load_state_dict()``, by a name of your choice: a
            :class:`TrainStep`, which has model, optimizers, schedulers and random numbers; a
            :class:`RankBatchSampler`; objects of your own. Their tensors are the same on all ranks.
            The digest in ``checkpoint.json`` is of the parameters of steps, unless ranks have
            shards of them.

    Raises:
        ImportError: the package safetensors is missing.
        TypeError, ValueError: a part without state; no parts, or ``keep`` below 1.

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

    instead: ClassVar[Mapping[str, str]] = {
        "load": "call load_latest()",
        "restore": "call load_latest()",
    }

    @values.naming_arguments
    def __init__(self, folder: str | Path, *, keep: int = 3, **parts: Stateful) -> None:
        values.check_type(
            "folder",
            folder,
            str | os.PathLike,
            "the path of a folder: Checkpoints(folder, step=step)",
        )
        values.check_number("keep", keep, "an integer, the checkpoints that stay", whole=True)
        for name, part in parts.items():
            values.check_type(
                name, part, Stateful, "an object with state_dict() and load_state_dict()"
            )
        if not parts or keep < 1:
            raise ValueError(
                f"{len(parts)} parts and keep={keep}, expected at least one of each: Checkpoints(folder, step=step)"
            )
        try:
            import safetensors.torch  # noqa: F401  an error now, not after the first hours
        except ImportError as error:
            raise ImportError(
                "checkpoints are written as safetensors, expected the package: pip install safetensors"
            ) from error
        # os.chdir() does not change it
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.parts = parts
        self._writing: Future[Any] | None = None
        self._damaged: set[int] = set()

    def __repr__(self) -> str:
        """Returns the folder, the number of checkpoints that stay, and the names of the parts."""
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep}, parts={[*self.parts]})"

    @values.naming_arguments
    def save(self, number: int) -> None:
        """Saves the present state in the background, after the save before.

        One of the same number is then replaced.

        Args:
            number: of the updates so far, for the name of the folder and the return value of
                :meth:`load_latest`.

        Raises:
            OSError: the save before has failed, for example on a full disk. Earlier checkpoints are
                still there.
            TypeError: the number is not an integer, or a state is not made of tensors, numbers,
                strings and containers.
            ValueError: the folder has a higher number, of another run; or ranks gave different
                numbers.
        """
        values.check_number(
            "number", number, "the number of updates so far", at_least=0, whole=True
        )
        self.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = collectives.rank()
        answers = self._on_all_ranks(
            "save()", lambda: (number, tidy(self.folder) if rank == 0 else [])
        )
        numbers = {number for number, _ in answers}
        if len(numbers) > 1:
            raise ValueError(
                f"ranks call save() with {sorted(numbers)}, expected the same number on all"
            )
        newest = max({*answers[0][1]} - self._damaged | {number})
        if newest > number:
            raise ValueError(
                f"the number is {number}, and {self.folder} has a checkpoint at {newest}, expected no higher one: call "
                "load_latest() to go on with that run, or give a new run a folder of its own"
            )
        self._damaged.discard(number)
        states = {name: part.state_dict() for name, part in self.parts.items()}
        tree, tensors = split_tensors(states)
        folder = self.folder / f"step-{number:08}"
        group = _group()
        parameters = self._parameters()
        writer = Writer(
            folder, tree, rank, collectives.world_size(), self.keep, self._damaged, parameters
        )
        writing = async_save(
            tensors, storage_writer=writer, process_group=group, no_dist=group is None
        )
        self._writing = cast("Future[Any]", writing)
        _unreported[self._writing] = folder

    def _parameters(self) -> dict[str, str]:
        """Returns the keys of the parameters of steps, by their keys in the whole state."""
        names: dict[str, str] = {}
        for name, part in self.parts.items():
            if isinstance(part, Part):
                keys = part.trained_state().parameters()
                names |= {f"{tensor_key([name])}/{key}": key for key in keys}
        return names

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises ``OSError`` if it has failed; otherwise the end of the program does.
        """
        for thread in torch_private.checkpoint_threads():  # Ctrl-C may have interrupted its save().
            thread.join()
        if self._writing is None:
            return
        error = self._writing.exception()
        folder = _unreported.pop(self._writing)
        self._writing = None
        if error is None:
            return
        message = _explain(folder, error)
        # every rank has ended its writing
        if getattr(error, "failures", None) and collectives.rank() == 0:
            remove(folder.with_suffix(PARTIAL))
        raise OSError(message) from error

    def load_latest(self) -> int | None:
        """Loads the newest checkpoint that is undamaged into the parts.

        Returns its number, or None if there is none.

        A damaged one is passed over with a warning, and stays as it is.

        Raises:
            OSError: the files could not be read. They may be undamaged. Or ranks see different
                folders.
            RuntimeError: all checkpoints are damaged.
            ValueError: the checkpoint does not have all parts. The parts have not changed.
        """
        self.wait()
        call = "load_latest()"
        folders = self._on_all_ranks(
            call, lambda: [path.name for path in complete(self.folder).values()]
        )
        if any(other != folders[0] for other in folders):
            listing = collectives.by_value([", ".join(other) or "none" for other in folders])
            raise OSError(
                f"ranks see different checkpoints in {self.folder}, expected {_ONE_FOLDER}: {listing}"
            )
        names = folders[0]
        for name in names:
            folder = self.folder / name
            damages = self._on_all_ranks(call, partial(damage, folder))
            reasons = [reason for reason in damages if reason]
            if not reasons:
                self._load(folder)
                return step_of(folder)
            self._damaged.add(step_of(folder))
            if collectives.rank() == 0:
                warnings.warn(
                    f"{folder} is damaged ({'; '.join(reasons)}), and passed over",
                    stacklevel=2,
                )
        if names:
            raise RuntimeError(
                f"all checkpoints in {self.folder} are damaged ({', '.join(names)}): begin anew in another folder"
            )
        return None

    def _load(self, folder: Path) -> None:
        trees: list[Any] = []
        self._on_all_ranks("load_latest()", lambda: trees.append(read_tree(folder)))
        saved = dict(trees[0]["dict"])
        if missing := self.parts.keys() - saved:
            raise ValueError(
                f"{folder} has the parts {', '.join(saved)}, expected {', '.join(sorted(missing))} as well: load it into "
                "Checkpoints of the parts that it has, and give the others when you save"
            )
        tensors: dict[str, Tensor] = {}

        def memory(path: TreePath, size: torch.Size, dtype: torch.dtype) -> Tensor:
            part = self.parts[path[0]]
            state = part.trained_state() if isinstance(part, Part) else None
            target = state.load_target(path[1:], size, dtype) if state else None
            return tensors.setdefault(
                tensor_key(path), torch.empty(size, dtype=dtype) if target is None else target
            )

        state = {name: join_tensors(saved[name], memory) for name in self.parts}
        reader = HuggingFaceStorageReader(str(folder))
        group = _group()
        reader.fs = ListedFiles()
        try:
            load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # KeyboardInterrupt is no Exception.
            raise OSError(f"{folder} could not be read ({_reasons(error)}): try again") from error
        for name, part in self.parts.items():
            if isinstance(part, Part):
                part.trained_state().check(state[name])
            elif isinstance(part, nn.Module):
                check_same_tensors(name, part.state_dict(), state[name])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def _on_all_ranks(self, call: str, find: Callable[[], Any]) -> list[Any]:
        """Returns the result of each rank. If one cannot read the files, all raise an error.

        They also do if they are in different calls.
        """
        result = None
        problem = ""
        try:
            result = find()
        except OSError as error:
            problem = f"rank {collectives.rank()}: {error}"
        try:
            answers = collectives.gather_objects((call, result, problem), _group())
        except RuntimeError as error:
            error.add_note(
                "Checkpoints: every rank must call save() and load_latest(), and at the same steps"
            )
            raise
        calls = [other for other, _, _ in answers]
        if len({*calls}) > 1:
            raise RuntimeError(
                f"ranks call {collectives.by_value(calls)}, expected the same call on all, at the same steps"
            )
        if problems := [problem for _, _, problem in answers if problem]:
            raise OSError(
                f"the checkpoints in {self.folder} could not be read ({'; '.join(problems)}): try again"
            )
        return [result for _, result, _ in answers]


def _group() -> collectives.Group:
    """Returns the process group for DCP, with the CPU's backend: it moves objects.

    Without one, its warning is ignored: the thread that writes would raise it each time.
    """
    if collectives.batch_group() is not None:  # Each group of ranks would write to the same files.
        raise ValueError(
            f"Checkpoints with mesh= of {collectives.world_size()} of {torch.distributed.get_world_size()} ranks, expected all "
            "ranks: save step.state_dict() with torch.distributed.checkpoint"
        )
    group = collectives.second_group("checkpoints", "gloo")
    if group is None:
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
    return group


def _reasons(error: BaseException) -> str:
    failures = getattr(error, "failures", {}).items()
    return ", ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures) or str(error)


def _explain(folder: Path, error: BaseException) -> str:
    last = next(iter(complete(folder.parent).values()), None)
    left = f"{last.name} is the last good one" if last else "there is no earlier one"
    return f"the checkpoint at {step_of(folder)} in {folder.parent} was not written ({_reasons(error)}); {left}"


@atexit.register
def _report_failures() -> None:
    """Ends the program with exit code 1 if its last save has failed without a ``wait()``.

    Python has ended the threads before.
    """
    failures = [
        _explain(folder, error)
        for save, folder in _unreported.items()
        if save.done() and (error := save.exception())
    ]
    if failures:
        print("OSError:", *failures, file=sys.stderr)
        sys.stdout.flush()
        os._exit(1)  # an exception would not change the exit code here


class Writer(HuggingFaceStorageWriter):
    """Writes one checkpoint, with the ``tree`` of this rank, in a thread.

    ``keep`` undamaged checkpoints stay. ``parameters`` are those that the digest is of.
    """

    def __init__(
        self,
        folder: Path,
        tree: object,
        rank: int,
        ranks: int,
        keep: int,
        damaged: Collection[int],
        parameters: Mapping[str, str],
    ) -> None:
        super().__init__(f"{folder}{PARTIAL}", save_distributed=True)
        self.folder = folder
        self.partial = Path(f"{folder}{PARTIAL}")
        self.tree = tree
        self.number = rank
        self.ranks = ranks
        self.keep = keep
        self.damaged = damaged
        self.parameters = parameters

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Writes the tensors of this rank, and its other values."""
        written = super().write_data(plan, planner)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        lines = []
        for item in plan.items:
            name = self.parameters.get(item.index.fqn)
            if name is not None and item.type is WriteItemType.TENSOR:  # It is no shard.
                lines.append(describe_bits(name, cast("Tensor", planner.resolve_data(item))))
        entries = {"files": digests(self.partial, names), "lines": lines, "state": self.tree}
        write_json(rank_file(self.partial, self.number), entries)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes the checkpoint after all ranks have written, and removes old ones.

        Rank 0 runs this.
        """
        files: dict[str, list[str | int]] = {}
        lines: list[str] = []
        for rank in range(self.ranks):
            path = rank_file(self.partial, rank)
            if not path.exists():
                raise FileNotFoundError(
                    f"rank {rank} has written to another folder, expected {_ONE_FOLDER}"
                )
            entries = read_json(path)
            files |= entries["files"] | digests(self.partial, [path.name])
            lines += entries["lines"]
        # Shards have none: no rank has the whole parameter.
        digest = digest_lines(lines) if lines and len(lines) == len(self.parameters) else None
        manifest = {"digest": digest, "ranks": self.ranks, "files": files}
        write_json(self.partial / MANIFEST, manifest, indent=1)
        sync(self.partial)
        old = Path(f"{self.folder}{OLD}")
        if os.path.lexists(self.folder):
            self.folder.rename(old)
        self.partial.rename(self.folder)
        sync(self.folder.parent)
        remove(old)
        folders = complete(self.folder.parent)
        newest = [number for number in folders if number not in self.damaged][: self.keep]
        for number, path in folders.items():
            if number < newest[-1]:
                remove(path)


class ListedFiles(FileSystem):
    """The files that a manifest names, for a reader of DCP: others in the folder do not belong to
    the checkpoint.
    """

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Returns their paths."""
        return [str(Path(path) / name) for name in read_json(Path(path) / MANIFEST)["files"]]


def tidy(parent: Path) -> list[int]:
    """Removes what an interrupted run has left, before any rank writes.

    Returns the numbers of the complete checkpoints.
    """
    for path in parent.iterdir():
        if re.fullmatch(rf"step-[0-9]+({OLD}|{PARTIAL}|{REMOVED})", path.name):
            if path.suffix == OLD and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))  # The next one did not get this far.
            else:
                remove(path)
    return [*complete(parent)]


def complete(parent: Path) -> dict[int, Path]:
    """Returns the folders of complete checkpoints by number, the highest number first."""
    try:
        paths = [
            path
            for path in parent.iterdir()
            if re.fullmatch(rf"step-[0-9]+({OLD})?", path.name) and path.is_dir()
        ]
    except FileNotFoundError:
        return {}
    paths.sort(key=lambda path: (step_of(path), path.suffix == OLD), reverse=True)
    return {step_of(path): path for path in paths}  # the one without OLD, if both exist


def step_of(folder: Path) -> int:
    """Returns the number in a folder's name."""
    return int(folder.stem.removeprefix("step-"))


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the file with a rank's values."""
    return folder / f"rank-{rank:05}.json"


def read_tree(folder: Path) -> Any:
    """Returns the values of this rank, or those of rank 0 if there were other ranks."""
    is_same_layout = read_json(folder / MANIFEST)["ranks"] == collectives.world_size()
    return read_json(rank_file(folder, collectives.rank() if is_same_layout else 0))["state"]


def read_json(path: Path) -> Any:
    """Returns the value in a file."""
    return json.loads(path.read_text())


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """Writes a file to the disk."""
    path.write_text(json.dumps(value, indent=indent))
    sync(path)


def sync(path: Path) -> None:
    """Writes the contents of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digests(folder: Path, names: Iterable[str]) -> dict[str, list[str | int]]:
    """Returns digest and size of each file."""
    entries: dict[str, list[str | int]] = {}
    for name in names:
        with _open_plain(folder, name) as file:
            entries[name] = [hashlib.file_digest(file, "sha256").hexdigest(), file.tell()]
    return entries


def damage(folder: Path) -> str:
    """Returns a sentence about damaged files, or nothing.

    Each rank looks at its part of them. Files may fail to be read.
    """
    try:
        with _open_plain(folder, MANIFEST) as file:
            manifest = json.load(file)
        files = manifest["files"]
        for number in range(max(1, manifest["ranks"])):
            if rank_file(folder, number).name not in files:
                raise ValueError(f"{MANIFEST} does not list {rank_file(folder, number).name}")
        for name, written in islice(
            files.items(), collectives.rank(), None, collectives.world_size()
        ):
            if digests(folder, [name])[name] != written:
                raise ValueError(f"{name} has other contents than were written")
    # It may be other JSON.
    except (
        FileNotFoundError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _open_plain(folder: Path, name: str) -> BufferedReader:
    """Opens a file of the folder, but not a device, a pipe, a link or a file elsewhere, which a
    manifest might name.
    """
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
