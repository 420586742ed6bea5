"""Compilation of the extension: once, with errors that name the compiler."""

import threading
from unittest import mock

import pytest

from balanced_parallel.simulation import compilation


def test_concurrent_loads_compile_once(tmp_path, monkeypatch):
    built = []

    def build(path):
        built.append(path)
        path.write_bytes(b"")

    monkeypatch.setattr(compilation, "build", build)
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation.ctypes, "CDLL", lambda path: mock.MagicMock())
    threads = [threading.Thread(target=compilation.load_native.__wrapped__) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_missing_compiler_raises_an_error_with_the_packages_to_install(monkeypatch):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"found no compiler \(looked for c\+\+, g\+\+, clang\+\+\): install one, with 'apt install g\+\+'"
    ):
        compilation.find_compiler()


def test_a_failing_compiler_raises_an_error_with_its_message(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\ncat > /dev/null\necho 'x.cpp:1: error: no such thing' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compilation, "find_compiler", lambda: str(compiler))
    with pytest.raises(RuntimeError, match=r"(?s)could not compile.*exit status 3.*C\+\+20.*x.cpp:1: error: no such thing"):
        compilation.build(tmp_path / "simulation.so")
    assert list(tmp_path.iterdir()) == [compiler]


def test_a_read_only_home_falls_back_to_a_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.Path, "home", lambda: tmp_path / "file")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compilation.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert compilation.cache_folder() == tmp_path
