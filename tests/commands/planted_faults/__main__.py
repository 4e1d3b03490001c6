"""`python -m commands.planted_faults`: run a suite of tests for each drawn fault, until its first failure; print which faults it finds.

It continues where it was stopped: results are kept in .planted_faults/, by suite and commit. The tests that are most likely to find a fault
run first.
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

from support.paths import TESTS

from . import COUNT, FOLDERS, drawn, faults_of

# The arguments of pytest that make the suite.
SUITES = {"quick": ["--quick"], "usual": ["-m", "not slow and not gpu"], "everything": ["--everything", "-m", "not gpu"]}
# pytest's exit statuses: all tests passed, some failed.
PASSED, FAILED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    names = options.names or drawn()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    kept = Path(".planted_faults") / f"{options.suite}-{commit}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    known = {line["fault"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    lacking = [name for name in names if name not in known]
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda name: result_of(name, options.suite, options.tests), lacking):
            known[str(found["fault"])] = found
            with kept.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{found['fault']}: {found['by'] or 'missed'} ({found['seconds']:.0f} s)", flush=True)
    missed = [name for name in names if not known[name]["by"]]
    print(f"{len(names) - len(missed)} of {len(names)} found" + "".join(f"\nmissed: {name}" for name in missed))
    return int(len(missed) > len(names) * 0.2)


def result_of(name: str, suite: str, tests: Sequence[str]) -> dict[str, object]:
    """The fault; the first test that fails with it, or "" ; the seconds until then. Raises RuntimeError if pytest did not run its tests."""
    files = tests or files_of(suite, next(folder for source, folder in FOLDERS.items() if name in faults_of(source)))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--planted", name, *SUITES[suite], *files]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = [line.split(" ", 2)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (PASSED, FAILED) or bool(failed) != bool(done.returncode):
        raise RuntimeError(f"pytest with {name} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {"fault": name, "by": failed[0] if failed else "", "seconds": time.monotonic() - start}


def files_of(suite: str, folder: str) -> list[str]:
    """A suite's files, those of a folder first."""
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    if suite == "quick":
        files = [path for path in files if "pytest.mark.quick" in (TESTS / path).read_text()]
    return [str(TESTS / path) for path in sorted(files, key=lambda path: (path.parts[0] != folder, len(path.parts)))]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m commands.planted_faults", description="Exits with 1 if more than a fifth is missed.")
    made.add_argument("--suite", choices=list(SUITES), default="quick")
    made.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    made.add_argument("--tests", nargs="*", default=[], help="files of tests, instead of all")
    made.add_argument("names", nargs="*", help=f"faults, instead of the {COUNT} drawn ones")
    return made


if __name__ == "__main__":
    sys.exit(main())
