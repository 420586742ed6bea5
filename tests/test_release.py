"""Releases: the wheel and the sdist work in a new environment, and the files around them agree with the package."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import balanced_parallel
from balanced_parallel.memory import estimate
from balanced_parallel.strategies.launch import check_agreement

ROOT = Path(__file__).parents[1]
SMOKE = """
import torch
from torch import nn
from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, memory, simulate
net = nn.Linear(4, 3)
with simulate(2) as cluster:
    model = DataParallelModel(net)
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(torch.randn(7, 4), torch.arange(7) % 3).isfinite()
assert memory.estimate(nn.Linear(4, 3), nn.MSELoss(), torch.zeros(2, 4), torch.zeros(2, 3)).allocated[0] > 0
print(memory.__file__)
"""


def call(*command, **settings):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, **settings
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_environment(folder, **settings):
    """Returns the Python and the packages of a new environment, whose own pip would take seconds to install."""
    venv.create(folder / "env", **settings)
    python = folder / "env" / "bin" / "python"
    packages = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    return python, Path(packages.strip())


def install(python, *arguments):
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", *arguments)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a wheel and an sdist, made from a copy of the committed and the new files."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    files = call(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    call(
        "tar",
        "-cf",
        source / "files.tar",
        *(name for name in files if (ROOT / name).exists()),
        cwd=ROOT,
    )
    call("tar", "-xf", source / "files.tar", "-C", source)
    call(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source
    )  # the wheel is built from the sdist
    return out


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_distributions_run_in_a_new_environment(built, tmp_path, pattern):
    (archive,) = built.glob(pattern)
    python, packages = make_environment(tmp_path)
    (packages / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # torch, behind the packages of the new environment
    install(python, archive)
    where = call(python, "-c", SMOKE, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    assert "estimate" in call(python.with_name("balanced-parallel"), "--help", cwd=tmp_path)


@pytest.mark.slow
def test_an_editable_installation_shows_its_types(tmp_path):
    """A hook of imports, which setuptools makes otherwise, hides them from mypy."""
    python, _ = make_environment(tmp_path, system_site_packages=True)
    install(python, "--editable", ROOT)
    (tmp_path / "program.py").write_text("from balanced_parallel import TrainStep\nTrainStep(1)\n")
    # To read the types of torch takes a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "program.py"]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert 'Missing positional arguments "criterion", "optimizer"' in done.stdout


def test_a_checkout_runs_where_it_is_not_installed(monkeypatch, tmp_path):
    """A machine without a network has a copy of the repository, and no metadata of the package."""
    from_name = metadata.Distribution.from_name

    def refuse(name):
        assert name.replace("_", "-") != "balanced-parallel"
        return from_name(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", refuse)
    report = estimate(nn.Linear(4, 3), nn.MSELoss(), torch.zeros(2, 4), torch.zeros(2, 3))
    check_agreement(nn.Linear(4, 3), {})
    report.save_html(tmp_path / "page.html")
    assert balanced_parallel.__version__ in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_the_wheel_has_the_package_alone_and_the_sdist_what_the_tests_read(built):
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"balanced_parallel"}
    assert "balanced_parallel/py.typed" in names
    native = list((ROOT / "balanced_parallel" / "simulation" / "native").iterdir())
    assert sum(name.startswith("balanced_parallel/simulation/native/") for name in names) == len(
        native
    )
    with tarfile.open(sdist) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
    assert {"tests", "examples", "scripts", "benchmarks", "docs"} <= folders
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata), (
        "relative links lead nowhere on PyPI"
    )


def test_citation_and_pre_commit_have_the_versions_of_the_package_and_of_ruff():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (
        balanced_parallel.__version__,
        "Apache-2.0",
    )
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [one for one in repositories if one["repo"].endswith("ruff-pre-commit")]
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name
)
def test_files_of_github_are_valid(path):
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "workflows":
        assert content["permissions"] == {"contents": "read"}
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        actions = [step for step in steps if "uses" in step]
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]) for step in actions), (
            "a tag can be moved"
        )
        checkouts = [step for step in actions if step["uses"].startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    elif path.stem != "config":
        assert {"name", "description", "body"} <= content.keys()


def test_workflow_tests_every_supported_python_and_torch():
    matrix = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"][
        "tests"
    ]["strategy"]["matrix"]
    setup = (ROOT / "setup.py").read_text()
    assert all(f"Python :: {version}" in setup for version in matrix["python"])
    pinned = (ROOT / "constraints.txt").read_text()
    assert matrix["torch"][0].removesuffix(".0").replace("==", ">=") in setup  # the oldest
    assert set(matrix["torch"]) & set(pinned.splitlines())
