"""The page about tests on GPUs, written from tests on simulated devices."""

import importlib.util
import re
import subprocess
import sys

import pytest
import torch
from helpers.processes import Script, run_script
from helpers.scripts import SCRIPT

PARTS = ["correctness", "memory", "time", "two processes"]


PROGRAM = SCRIPT.with_name("gpu_page.py")
SETTINGS = ("-p", "no:cacheprovider", "-n", "0", "-W", "ignore:Module already imported")


def gpu_page(out, *flags):
    """Runs the script as users do. Returns its exit code and the page."""
    done = run_script(PROGRAM, "--out", out, *SETTINGS, *flags)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, out.read_text()


def test_advice_names_files_that_exist():
    """It named a module that had moved."""
    named = re.findall(r"\w+/\w+\.py", PROGRAM.read_text(encoding="utf-8"))
    package = PROGRAM.parents[1] / "balanced_parallel"
    files = [name for name in named if not name.startswith("scripts/")]
    assert files
    assert all((package / name).exists() for name in files), named


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Runs the script in this process. Its parts are processes that start with torch imported."""
    run = subprocess.run

    def run_forked(command, env=None, **settings):
        if command[0] != sys.executable:
            return run(command, env=env, **settings)
        # A machine without a network has a checkout alone.
        assert env["PYTHONPATH"].startswith(f"{PROGRAM.parents[1]}:")
        return Script(PROGRAM, *command[2:], **env).wait(100)

    def page(*flags):
        spec = importlib.util.spec_from_file_location("gpu_page", PROGRAM)
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        out = tmp_path / "page.md"
        monkeypatch.setattr(subprocess, "run", run_forked)
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--out", str(out), *SETTINGS, *flags])
        with pytest.raises(SystemExit) as end:
            program.main()
        return int(end.value.code), out.read_text()

    return page


def test_the_page_has_numbers_limits_and_versions(page_of):
    code, page = page_of("--simulate", "-k", "share or never_wait")
    assert code == 0, page
    assert "- simulated devices: no GPU was used" in page
    assert re.search(r"- torch 2\.\S+, Python 3\.", page)
    assert re.search(r"- commit \w+, 20\d\d-\d\d-\d\d \d\d:\d\d UTC", page)
    assert re.search(
        r"replicas on one device share .* \(limit 1\.15\); .* \| passed +\| \d+\.\d", page
    )
    assert page.count("| updates never wait[") >= 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="would test the GPU")
def test_a_run_of_skipped_tests_is_a_failure_with_a_reason(page_of):
    code, page = page_of("-k", "never_wait")
    assert code == 1
    assert "skipped: needs a GPU: torch.cuda.is_available() is False" in page
    assert "| passed" not in page


def check_parts(code, page, broken):
    assert code == 1
    parts = dict(zip(PARTS, page.split("\n## ")[1:], strict=True))
    for name, part in parts.items():
        assert part.startswith(name.capitalize())
        assert "If a number is off, look first at " in part
        assert ("ended with code 3" in part) == (name in broken)
        assert ("| passed" in part) == (name not in (*broken, "memory"))
    assert ("TrainStep: host " in parts["time"]) == ("time" not in broken)


def flags_of(broken):
    breaks = [flag for name in broken for flag in ("--break-part", name)]
    return ["--simulate", "--minutes", "8", *breaks, "-k", "overflow or gpt2 or OFF"]


def test_parts_report_beside_others_that_break(page_of):
    broken = ["correctness", "two processes"]
    check_parts(*page_of(*flags_of(broken)), broken)


@pytest.mark.slow  # Each part starts Python.
@pytest.mark.parametrize("broken", [PARTS[::2], PARTS[1::2]], ids="".join)
def test_parts_of_the_script_report_beside_others_that_break(tmp_path, broken):
    check_parts(*gpu_page(tmp_path / "page.md", *flags_of(broken)), broken)


def test_a_part_ends_in_its_time(tmp_path):
    code, page = gpu_page(tmp_path / "page.md", "--simulate", "--minutes", "0.001")
    assert page.count("stopped after 0 s") == len(PARTS)
    assert code == 1
