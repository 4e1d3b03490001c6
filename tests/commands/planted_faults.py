"""Shows which suite finds each planted fault: `make faults`.

`python -m commands.planted_faults [--suites quick usual] [--jobs 2] [NAME ...]` runs, for each drawn fault, the first suite until a test
fails; if none fails, the next suite. Results are stored in .planted_faults/ for each suite and commit, so an interrupted run continues. The
tests that are most likely to find a fault run first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from cases.faults import COUNT, FOLDERS, drawn, faults_of
from support import json_lines
from support.paths import TESTS

# The arguments of pytest for each suite: `make quick`, `make test` and `make test-all`.
SUITES = {"quick": ["--quick"], "usual": ["-m", "not slow and not gpu"], "everything": ["--everything", "-m", "not gpu"]}
# pytest's exit statuses: all tests passed, some failed.
PASSED, FAILED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    names = options.names or drawn()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    results = Results(Path(".planted_faults") / f"{commit}.jsonl")
    with ThreadPoolExecutor(options.jobs) as pool:
        finders = list(pool.map(lambda name: smallest_suite(name, options.suites, options.tests, results), names))
    for suite in options.suites:
        print(
            f"{suite} finds {finders.count(suite)} of {len(names)}"
            + (", which the suites before it miss" if suite != options.suites[0] else "")
        )
    for name, suite in zip(names, finders, strict=True):
        if suite != options.suites[0]:
            print(f"{name}: {f'found by {suite}' if suite else 'missed'}")
    return int(finders.count(options.suites[0]) < len(names) * 0.8)


class Results:
    """The results of a commit, in a file of JSON lines."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, Lock()
        self._finders = {(line["fault"], line["suite"]): line["by"] for line in json_lines.load(file)}

    def find(self, fault: str, suite: str) -> str | None:
        """Returns the test that finds a fault; "" if no test of the suite does, None if the suite has not run."""
        return self._finders.get((fault, suite))

    def add(self, fault: str, suite: str, by: str, seconds: float) -> None:
        with self._lock, json_lines.open_to_append(self._file) as file:
            file.write(json.dumps({"fault": fault, "suite": suite, "by": by, "seconds": round(seconds)}) + "\n")
            print(f"{fault}: {by or f'missed by {suite}'} ({seconds:.0f} s)", flush=True)


def smallest_suite(fault: str, suites: Sequence[str], tests: Sequence[str], results: Results) -> str:
    """Returns the first suite that finds a fault; "" if none does. tests: the files to run instead of all."""
    for suite in suites:
        by = results.find(fault, suite)
        if by is None:
            start = time.monotonic()
            by = first_failure(fault, suite, tests)
            results.add(fault, suite, by, time.monotonic() - start)
        if by:
            return suite
    return ""


def first_failure(fault: str, suite: str, tests: Sequence[str]) -> str:
    """Returns the first test that fails with a fault; "" if none does. Raises RuntimeError if pytest did not run the tests."""
    files = tests or files_of(suite, next(folder for module, folder in FOLDERS.items() if fault in faults_of(module)))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--planted", fault, *SUITES[suite], *files]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = [line.split(" ", 2)[1] for line in process.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode not in (PASSED, FAILED) or bool(failed) != bool(process.returncode):
        raise RuntimeError(f"pytest with {fault} ended with {process.returncode}:\n{process.stdout[-3000:]}{process.stderr[-3000:]}")
    return failed[0] if failed else ""


def files_of(suite: str, folder: str) -> list[str]:
    """Returns a suite's files, those of a folder first."""
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    if suite == "quick":
        files = [path for path in files if "pytest.mark.quick" in (TESTS / path).read_text()]
    return [str(TESTS / path) for path in sorted(files, key=lambda path: (path.parts[0] != folder, len(path.parts)))]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commands.planted_faults", description="Exits with 1 if the first suite misses more than a fifth of the faults."
    )
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=["quick", "usual"], help="the smallest first")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests, instead of all")
    parser.add_argument("names", nargs="*", help=f"faults, instead of the {COUNT} drawn ones")
    return parser


if __name__ == "__main__":
    sys.exit(main())
