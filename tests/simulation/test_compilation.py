"""Compilation of the extension: once, with errors that name the compiler."""

import os
import threading
from unittest import mock

import pytest

from balanced_parallel.simulation import compilation


def test_concurrent_loads_compile_once(tmp_path, monkeypatch):
    built = []

    def build(path):
        built.append(path)
        path.write_bytes(b"")
        path.chmod(0o600)

    monkeypatch.setattr(compilation, "build", build)
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation, "CDLL", lambda path: mock.MagicMock())
    threads = [threading.Thread(target=compilation.load_native.__wrapped__) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_missing_compiler_raises_an_error_with_the_packages_to_install(monkeypatch):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError,
        match=r"found no compiler \(looked for c\+\+, g\+\+, clang\+\+\): install one, with 'apt install g\+\+'",
    ):
        compilation.find_compiler()


def test_a_failing_compiler_raises_an_error_with_its_message(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\ncat > /dev/null\necho 'x.cpp:1: error: no such thing' >&2\nexit 3\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(compilation, "find_compiler", lambda: str(compiler))
    with pytest.raises(
        RuntimeError,
        match=r"(?s)could not compile.*exit status 3.*C\+\+20.*x.cpp:1: error: no such thing",
    ):
        compilation.build(tmp_path / "simulation.so")
    assert list(tmp_path.iterdir()) == [compiler]


@pytest.fixture
def without_home(monkeypatch, tmp_path):
    """Leaves temporary folders alone."""
    monkeypatch.setattr(compilation.Path, "home", lambda: tmp_path / "file")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compilation.tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("without_home")
def test_processes_without_a_writable_home_share_a_folder_of_their_user(monkeypatch, tmp_path):
    """Each process compiled into a folder of its own."""
    folder = compilation.cache_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert compilation.cache_folder() == folder
    monkeypatch.setattr(
        compilation.os, "getuid", lambda: 12345
    )  # a folder of this name that another user has made
    (tmp_path / "balanced_parallel-12345").mkdir()
    other = compilation.cache_folder()
    assert other.parent == tmp_path
    assert other.name != "balanced_parallel-12345"


def open_to_all(path):
    path.chmod(0o777)


def give_away(path):
    if os.getuid():
        pytest.skip("root alone gives files away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("expose", [open_to_all, give_away])
def test_a_library_that_others_could_write_is_compiled_again(tmp_path, monkeypatch, expose):
    """The library of another user ran."""
    library = tmp_path / "simulation-0.so"

    def build(path):
        library.unlink(missing_ok=True)
        library.write_text("compiled")
        library.chmod(0o700)

    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation, "fingerprint", lambda: "0")
    monkeypatch.setattr(compilation, "build", build)
    monkeypatch.setattr(compilation, "CDLL", lambda path: mock.MagicMock())
    library.write_text("of another user")
    expose(library)
    compilation.load_native.__wrapped__()
    assert library.read_text() == "compiled"


@pytest.mark.parametrize("expose", [open_to_all, give_away])
def test_a_folder_that_others_could_write_is_not_used(tmp_path, monkeypatch, expose):
    home = tmp_path / "home"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(compilation.Path, "home", lambda: home)
    monkeypatch.setattr(compilation.tempfile, "tempdir", str(temporary))
    expected = home / ".cache" / "balanced_parallel"
    assert compilation.cache_folder() == expected
    expose(expected)
    folder = compilation.cache_folder()
    assert folder == temporary / f"balanced_parallel-{os.getuid()}"
    expose(folder)
    assert compilation.cache_folder() not in (expected, folder)


@pytest.mark.parametrize(
    "make", [lambda path, target: path.symlink_to(target), lambda path, target: path.write_text("")]
)
@pytest.mark.usefixtures("without_home")
def test_a_link_or_a_file_in_the_temporary_folder_is_not_used(tmp_path, make):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    path = tmp_path / f"balanced_parallel-{os.getuid()}"
    make(path, target)
    folder = compilation.cache_folder()
    assert folder.parent == tmp_path
    assert folder not in (path, target)


def test_modes_do_not_depend_on_the_umask(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation.Path, "home", lambda: tmp_path)
    before = os.umask(0)
    try:
        folder = compilation.cache_folder()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
