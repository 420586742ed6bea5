"""A comparison of all ranks at the start. Ranks with different code or versions would hang, or train different models."""

import functools
import hashlib
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..runtime.collectives import gather_objects
from ..runtime.comparison import compare_ranks

__all__: list[str] = []

_PACKAGE = Path(__file__).parents[1]


def check_agreement(module: nn.Module, settings: Mapping[str, Hashable]) -> None:
    """Compares the versions, the script, the module and the settings of all ranks, in one small all-gather.

    Files are those of this package, the script, and the modules beside the script that every rank has imported. Values of
    parameters are not compared: they are copied from rank 0 later.

    Args:
        module: before it is moved.
        settings: of :func:`parallelize`.

    Raises:
        ValueError: on every rank, if they differ. The message names the ranks and their values.
    """
    lines = _module_lines(module)
    facts = {"torch": str(torch.__version__), "balanced_parallel": _package_digest(), **_script_digests(), **settings}

    def explain(name: str, values: Sequence[str | None]) -> Sequence[str | None]:
        """Exchanges the lines of the modules: every rank sees the same difference, so all of them take part."""
        return _first_difference(gather_objects(lines)) if name == "the module" else values

    module_digest = digest(line.encode() for line in lines)
    compare_ranks(facts | {"the module": module_digest}, "the same code, versions and settings on all hosts", explain)


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
