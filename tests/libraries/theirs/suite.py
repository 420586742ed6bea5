"""Runs test files of another library twice, as they are and with a class of this package in it, and compares the results.

A script ``of_<library>.py`` beside this file names the files, and is a plugin of pytest that changes the library if the
environment variable ``OURS`` says so. It prints its section of ``benchmarks/theirs/README.md``.
"""

import argparse
import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Result(NamedTuple):
    """The outcome of a test, and the first line of its error."""

    status: str
    message: str = ""


class Suite(NamedTuple):
    """Tests of a library.

    Args:
        plugin: the module that changes the library.
        tests: the folder of a checkout in which pytest runs.
        files: test files, seen from there.
        kinds: values of ``OURS``, and how the page calls them.
        reasons: patterns of the name and the error of a test, and why the runs differ.
    """

    plugin: str
    tests: str
    files: list[str]
    kinds: dict[str, str]
    reasons: dict[str, str]


Results = dict[str, Result]  # by the name of the test


def run(plugin: str, ours: str, folder: Path, files: list[str], timeout: int = 120) -> Results:
    """Runs test files in a folder of a checkout."""
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


def read(report: Path) -> Results:
    """Reads a report of pytest."""
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        result = Result("passed")
        for outcome in case:
            if outcome.tag in ("failure", "error", "skipped"):
                lines = (outcome.get("message") or outcome.text or "").strip().splitlines()
                result = Result(outcome.tag, lines[0] if lines else "")
        results[f"{case.get('classname')}::{case.get('name')}"] = result
    return results


def differences(theirs: Results, ours: Results) -> dict[str, tuple[Result, Result]]:
    """Returns the tests of which one run has passed, and the other has not."""
    missing = Result("missing")
    names = [*theirs, *(name for name in ours if name not in theirs)]
    pairs = {name: (theirs.get(name, missing), ours.get(name, missing)) for name in names}
    return {
        name: pair
        for name, pair in pairs.items()
        if (pair[0].status == "passed") != (pair[1].status == "passed")
    }


def passed(results: Results) -> int:
    """Returns the number of tests that have passed."""
    return sum(result.status == "passed" for result in results.values())


def of_file(results: Results, file: str) -> Results:
    """Returns the results of one file."""
    place = file.removesuffix(".py").replace("/", ".")
    return {
        name: result
        for name, result in results.items()
        if re.search(rf"(^|\.){re.escape(place)}(\.|::)", name)
    }


class Runs:
    """The results of each file, for each kind. Those of a folder are kept for the next start."""

    def __init__(self, suite: Suite, checkout: Path, kept: Path | None) -> None:
        self.suite = suite
        self.folder = checkout / suite.tests
        self.kept = kept

    def of(self, kind: str, files: list[str]) -> dict[str, Results]:
        """Returns the results of some files, of which those that are new run in one process."""
        done = {file: self._read(kind, file) for file in files}
        new = [file for file in files if done[file] is None]
        if new:
            results = run(self.suite.plugin, kind, self.folder, new)
            for file in new:
                done[file] = of_file(results, file)
                self._write(kind, file, done[file])
        return done

    def _path(self, kind: str, file: str) -> Path:
        return self.kept / f"{kind or 'theirs'}__{file.replace('/', '__')}.json"

    def _read(self, kind: str, file: str) -> Results | None:
        if self.kept is None or not self._path(kind, file).exists():
            return None
        entries = json.loads(self._path(kind, file).read_text())
        return {name: Result(*values) for name, values in entries.items()}

    def _write(self, kind: str, file: str, results: Results) -> None:
        if self.kept is not None:
            self._path(kind, file).write_text(json.dumps(results))


def reason_of(suite: Suite, name: str, pair: tuple[Result, Result]) -> str:
    """Returns why the runs of a test differ, or an empty text."""
    text = f"{name} {pair[0].status} {pair[1].status} {pair[1].message}"
    matching = (reason for pattern, reason in suite.reasons.items() if re.search(pattern, text))
    return next(matching, "")


def main(suite: Suite) -> None:
    """Runs the files, folder by folder, and prints a section of the page. Differences without a reason come last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of the library's repository")
    parser.add_argument("files", nargs="*", help="test files in place of the list of the script")
    parser.add_argument("--kept", type=Path, help="a folder of results: what is there does not run")
    parser.add_argument("--kinds", nargs="*", default=[*suite.kinds], help="values of OURS")
    options = parser.parse_args()
    runs = Runs(suite, options.checkout, options.kept)
    names = [suite.kinds[kind] for kind in options.kinds]
    print("| file | tests | theirs | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 3) + "|")
    totals: collections.Counter[str] = collections.Counter()
    explained: dict[str, list[str]] = collections.defaultdict(list)
    for _, group in itertools.groupby(options.files or suite.files, os.path.dirname):
        files = [*group]
        theirs = runs.of("", files)
        ours = {kind: runs.of(kind, files) for kind in options.kinds}
        for file in files:
            columns = [passed(theirs[file]), *(passed(ours[kind][file]) for kind in ours)]
            print(f"| {file} | {len(theirs[file])} | {' | '.join(map(str, columns))} |", flush=True)
            totals.update(dict(enumerate([len(theirs[file]), *columns])))
            for kind in ours:
                for name, pair in differences(theirs[file], ours[kind][file]).items():
                    reason = reason_of(suite, name, pair)
                    text = f"`{name.rpartition('::')[2]}`" + ("" if reason else f": {pair[1]}")
                    explained[reason].append(text)
    print("| all | " + " | ".join(str(totals[number]) for number in sorted(totals)) + " |")
    for reason, tests in explained.items():
        if reason:
            print(f"\n- {reason} ({len(tests)}): {', '.join(dict.fromkeys(tests))}")
    print(f"\n{len(explained[''])} differences have no reason.")
    print("\n".join(explained[""]))
    sys.exit(bool(explained[""]))
