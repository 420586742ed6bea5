"""Runs test files of another library twice, as they are and with a class of this package in it, and compares the results.

A script ``of_<library>.py`` beside this file names the files, and is a plugin of pytest that changes the library if the
environment variable ``OURS`` says so.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Result(NamedTuple):
    """What has become of a test, and the last line of its error."""

    status: str
    message: str = ""


def run(
    plugin: str, ours: str, folder: Path, files: list[str], timeout: int = 120
) -> dict[str, Result]:
    """Runs test files in a folder of a checkout. Returns the result of each test by its name."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OURS": ours,
            "OMP_NUM_THREADS": "1",
        }
        options = ["-q", "-p", plugin, "-p", "no:cacheprovider"]
        options += ["--continue-on-collection-errors", f"--timeout={timeout}"]
        options += [f"--junitxml={report}", f"--basetemp={place}/temporary"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest ended without a report:\n{done.stdout}\n{done.stderr}")
        return read(report)


def read(report: Path) -> dict[str, Result]:
    """Reads a report of pytest."""
    results: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        result = Result("passed")
        for outcome in case:
            if outcome.tag in ("failure", "error", "skipped"):
                lines = (outcome.get("message") or outcome.text or "").strip().splitlines()
                result = Result(outcome.tag, lines[0] if lines else "")
        results[name] = result
    return results


def compare(theirs: dict[str, Result], ours: dict[str, Result]) -> dict[str, tuple[Result, Result]]:
    """Returns the tests of which one run has passed, and the other has not."""
    missing = Result("missing")
    names = [*theirs, *(name for name in ours if name not in theirs)]
    pairs = {name: (theirs.get(name, missing), ours.get(name, missing)) for name in names}
    return {
        name: pair
        for name, pair in pairs.items()
        if (pair[0].status == "passed") != (pair[1].status == "passed")
    }


def passed(results: dict[str, Result]) -> int:
    """Returns the number of tests that have passed."""
    return sum(result.status == "passed" for result in results.values())


def main(plugin: str, tests: str, files: list[str], kinds: list[str]) -> None:
    """Runs the files one after the other and prints a line for each, and each difference.

    Args:
        plugin: the module that changes the library.
        tests: the folder of the checkout in which pytest runs.
        files: the test files, seen from there.
        kinds: values of ``OURS``. Each is compared with the library as it is.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of the library's repository")
    parser.add_argument("files", nargs="*", help="test files in place of the list of this script")
    parser.add_argument("--kinds", nargs="*", default=kinds, help=f"of {kinds}")
    options = parser.parse_args()
    folder = options.checkout / tests
    for file in options.files or files:
        theirs = run(plugin, "", folder, [file])
        for kind in options.kinds:
            ours = run(plugin, kind, folder, [file])
            counts = f"{passed(theirs)} passed with theirs, {passed(ours)} with {kind}"
            print(f"{file}: {len(theirs)} tests, {counts}", flush=True)
            for name, (before, after) in compare(theirs, ours).items():
                print(f"    {name}: {before.status} -> {after.status}", flush=True)
                print(f"        {after.message or before.message}", flush=True)
