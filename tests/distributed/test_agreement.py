"""The comparison of all ranks at the start. Each rank raises the error, which names the ranks and their values."""

import hashlib
import re
import sys
import types

import pytest
import torch
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import parallelize
from balanced_parallel.distributed import agreement
from balanced_parallel.runtime import comparison


def error_of_rank(rank, folder, change):
    """Returns the error of ``parallelize`` on a rank whose code or versions differ, and the number of all-gathers."""
    torch.manual_seed(rank)  # the values of the parameters may differ
    script = folder / f"host{rank // 2}" / "train.py"
    helper = types.ModuleType("model")
    helper.__file__ = str(script.with_name("model.py"))
    calls, gather_objects = [], comparison.gather_objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        patch.setitem(sys.modules, "model", helper)
        patch.setattr(comparison, "gather_objects", lambda value: calls.append(value) or gather_objects(value))
        if change == "torch" and rank == 2:
            patch.setattr(torch, "__version__", "2.11.0")
        if change == "package" and rank == 2:
            patch.setattr(agreement, "_package_digest", lambda: "0123456789ab")
        if change == "import" and rank == 0:
            only_here = types.ModuleType("writer")
            only_here.__file__ = str(script.with_name("writer.py"))
            patch.setitem(sys.modules, "writer", only_here)
        elsewhere = types.ModuleType("elsewhere")
        elsewhere.__file__ = str(folder / f"host{rank // 2}-other" / "elsewhere.py")
        patch.setitem(sys.modules, "elsewhere", elsewhere)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + (change == "shape" and rank == 2)))
        net[0].weight.requires_grad_(not (change == "frozen" and rank == 2))
        if change == "missing" and rank == 2:
            net = net[:1]
        try:
            parallelize(net, nn.MSELoss(), ["cpu"])
        except ValueError as error:
            return str(error), len(calls)
    return None, len(calls)


@pytest.fixture
def hosts(tmp_path):
    """Writes the folder of a script for each of two hosts. Ranks 0 and 1 are on the first, rank 2 on the second."""
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        for name in ("train", "model", "writer"):
            (tmp_path / host / f"{name}.py").write_text(f"# {name}")
        (tmp_path / f"{host}-other").mkdir()
        (tmp_path / f"{host}-other" / "elsewhere.py").write_text(f"# {host}")
    return tmp_path


@pytest.mark.parametrize("change", ["nothing", "import"])
def test_equal_ranks_agree_in_one_all_gather(hosts, change):
    assert run_ranks(3, error_of_rank, hosts, change) == [(None, 1)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("torch", f"torch: {re.escape(torch.__version__)} on ranks 0, 1 and 2.11.0 on rank 2"),
        ("package", "balanced_parallel: .* on ranks 0, 1 and 0123456789ab on rank 2"),
        ("shape", r"the module: 1.weight \[2, 3\] torch.float32 trained on ranks 0, 1 and 1.weight \[3, 3\] .* on rank 2"),
        ("frozen", r"0.weight \[3, 4\] torch.float32 trained on ranks 0, 1 and 0.weight \[3, 4\] torch.float32 on rank 2"),
        ("missing", r"1.weight \[2, 3\] torch.float32 trained on ranks 0, 1 and no more parameters on rank 2"),
    ],
)
def test_different_ranks_raise_one_error_on_all_of_them(hosts, change, message):
    errors = {error for error, _ in run_ranks(3, error_of_rank, hosts, change)}
    assert len(errors) == 1, errors
    assert re.search(f"^the ranks differ, expected the same code, versions and settings on all hosts: .*{message}$", errors.pop())


def test_different_code_is_named_with_its_digest(hosts):
    (hosts / "host1" / "model.py").write_text("# changed")
    first, second = (hashlib.sha256(text).hexdigest()[:12] for text in (b"# model", b"# changed"))
    errors = {error for error, _ in run_ranks(3, error_of_rank, hosts, "nothing")}
    assert len(errors) == 1
    assert errors.pop().endswith(f"hosts: model.py: {first} on ranks 0, 1 and {second} on rank 2")
