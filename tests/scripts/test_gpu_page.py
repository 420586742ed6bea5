"""The page about tests on GPUs, written from tests on simulated devices."""

import re

import pytest
import torch
from helpers.processes import run_script
from helpers.scripts import SCRIPT

PARTS = ["correctness", "memory", "time", "two processes"]


def gpu_page(out, *flags):
    settings = ("-p", "no:cacheprovider", "-n", "0", "-W", "ignore:Module already imported")
    done = run_script(SCRIPT.with_name("gpu_page.py"), "--out", out, *settings, *flags)
    assert out.exists(), done.stdout + done.stderr
    return done, out.read_text()


def test_the_page_has_numbers_limits_and_versions(tmp_path):
    done, page = gpu_page(tmp_path / "page.md", "--simulate", "-k", "share or never_wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "- simulated devices: no GPU was used" in page
    assert re.search(r"- torch 2\.\S+, Python 3\.", page)
    assert re.search(r"- commit \w+, 20\d\d-\d\d-\d\d \d\d:\d\d UTC", page)
    assert re.search(
        r"replicas on one device share .* \(limit 1\.15\); .* \| passed +\| \d+\.\d", page
    )
    assert page.count("| updates never wait[") >= 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="would test the GPU")
def test_a_run_of_skipped_tests_is_a_failure_with_a_reason(tmp_path):
    done, page = gpu_page(tmp_path / "page.md", "-k", "never_wait")
    assert done.returncode == 1
    assert "skipped: needs a GPU: torch.cuda.is_available() is False" in page
    assert "| passed" not in page


@pytest.mark.parametrize("broken", [None, "correctness", "memory", "time", "two processes"])
def test_parts_report_beside_one_that_breaks(tmp_path, broken):
    flags = ("--break-part", broken) if broken else ()
    select = "overflow or encoder or gpt2 or OFF"
    done, page = gpu_page(
        tmp_path / "page.md", "--simulate", "--minutes", "8", *flags, "-k", select
    )
    parts = dict(zip(PARTS, page.split("\n## ")[1:], strict=True))
    for name, part in parts.items():
        assert part.startswith(name.capitalize())
        assert "If a number is off, look first at " in part
        assert ("ended with code 3" in part) == (name == broken)
        assert ("| passed" in part) == (name not in (broken, "memory"))
    assert "TrainStep: host " in parts["time"] or broken == "time"
    assert done.returncode == 1


def test_a_part_ends_in_its_time(tmp_path):
    done, page = gpu_page(tmp_path / "page.md", "--simulate", "--minutes", "0.001")
    assert page.count("stopped after 0 s") == len(PARTS)
    assert done.returncode == 1
