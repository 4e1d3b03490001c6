"""`python -m planted_faults`: run a suite of tests once for each drawn fault, until its first failure; print which faults it finds.

It goes on where it was stopped: results are kept in .planted_faults/, by suite and commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import COUNT, drawn

# The arguments of pytest that make the suite.
SUITES = {"quick": ["--quick"], "usual": ["-m", "not slow and not gpu"], "everything": ["--everything", "-m", "not gpu"]}
# pytest's exit status when tests failed.
TESTS_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    names = options.names or drawn()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    kept = Path(".planted_faults") / f"{options.suite}-{commit}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    known = {line["fault"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    for name in names:
        if name not in known:
            known[name] = found = result_of(name, [*SUITES[options.suite], *options.tests])
            with kept.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{name}: {found['by'] or 'missed'} ({found['seconds']:.0f} s)", flush=True)
    missed = [name for name in names if not known[name]["by"]]
    print(f"{len(names) - len(missed)} of {len(names)} found" + "".join(f"\nmissed: {name}" for name in missed))
    return int(len(missed) > len(names) * 0.2)


def result_of(name: str, arguments: Sequence[str]) -> dict[str, object]:
    """The fault; the first test that fails with it, or "" ; the seconds until then. Raises RuntimeError if pytest did not run its tests."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-x", "-q", "-p", "no:cacheprovider", "--planted", name]
    start = time.monotonic()
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, TESTS_FAILED):
        raise RuntimeError(f"pytest with {name} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = [line.split(" ", 2)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {"fault": name, "by": failed[0] if failed else "", "seconds": time.monotonic() - start}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m planted_faults", description="Exits with 1 if more than a fifth is missed.")
    made.add_argument("--suite", choices=list(SUITES), default="quick")
    made.add_argument("--tests", nargs="*", default=[], help="files of tests, instead of all")
    made.add_argument("names", nargs="*", help=f"faults, instead of the {COUNT} drawn ones")
    return made


if __name__ == "__main__":
    sys.exit(main())
