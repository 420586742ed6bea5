"""A comparison of all ranks at the start. Ranks with different code or versions would hang, or train different models."""

import functools
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from ..runtime.collectives import gather_objects

__all__: list[str] = []

_PACKAGE = Path(__file__).parents[1]
_SHOWN = 8  # ranks in a message


def check_agreement(module: nn.Module) -> None:
    """Compares the versions, the script and the module of all ranks, in one small all-gather.

    Files are those of this package, the script, and the modules beside the script that every rank has imported. Values of
    parameters are not compared: they are copied from rank 0 later.

    Raises:
        ValueError: on every rank, if they differ. The message names the ranks and their values.
    """
    lines = _module_lines(module)
    own = {"torch": str(torch.__version__), "balanced_parallel": _package_digest(), **_script_digests()}
    ranks = gather_objects(own | {"the module": digest(line.encode() for line in lines)})
    different = [name for name in ranks[0] if len({rank.get(name, ranks[0][name]) for rank in ranks}) > 1]
    if not different:
        return
    if "the module" in different:  # every rank sees the same difference, so all of them take part
        for rank, line in zip(ranks, _first_difference(gather_objects(lines)), strict=True):
            rank["the module"] = line
    facts = "; ".join(f"{name}: {_by_value([rank.get(name) for rank in ranks])}" for name in different)
    raise ValueError(f"the ranks differ, expected the same code and versions on all hosts: {facts}")


def digest(parts: Iterable[bytes]) -> str:
    """Returns the first digits of the SHA-256 of ``parts``. For a file they are those of ``sha256sum``."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:12]


@functools.cache
def _package_digest() -> str:
    return digest(path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py")))


def _script_digests() -> dict[str, str]:
    """Returns a digest of the script, and of each imported module in its folder that is not installed."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # an interactive session
        return {}
    folder = Path(script).absolute().parent
    files = {Path(script).absolute()}
    for imported in list(sys.modules.values()):
        name = getattr(imported, "__file__", None)
        if isinstance(name, str) and name.startswith(f"{folder}/") and "-packages/" not in name:  # of pip, or of Debian
            files.add(Path(name))
    return {str(path.relative_to(folder)): digest([path.read_bytes()]) for path in sorted(files) if path.is_file()}


def _module_lines(module: nn.Module) -> list[str]:
    """Returns a line for the type of a module, and for each parameter and buffer."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    details = (f"{name} {list(tensor.shape)} {tensor.dtype}{' trained' * tensor.requires_grad}" for name, tensor in tensors)
    return [type(module).__qualname__, *details]


def _first_difference(ranks: list[list[str]]) -> list[str]:
    """Returns the first line in which the ranks differ, from each of them."""
    longest = max(map(len, ranks))
    padded = [[*lines, *["no more parameters"] * (longest - len(lines))] for lines in ranks]
    return list(next(lines for lines in zip(*padded, strict=True) if len(set(lines)) > 1))


def _by_value(values: list[str | None]) -> str:
    """Describes the value of each rank: ``"2.13.0 on ranks 0, 1 and 2.11.0 on rank 2"``."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {_names(ranks)}" for value, ranks in groups.items() if value is not None)


def _names(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
