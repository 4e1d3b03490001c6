"""`python -m commands.gpu_report --output DIR`: the driver. Its exit code is 1 if a part or test failed, 2 if a package is missing."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.paths import ROOT

from . import environment

# The maximum number of lines of the summary, and of characters of a line: some machines keep only the end of a command's output.
SUMMARY_LINES = 100
SUMMARY_WIDTH = 400


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    end = time.monotonic() + 60 * options.minutes
    missing = environment.missing()
    for sentence in missing:
        print(f"missing: {sentence}", flush=True)
    if missing:
        return 2
    from . import facts, runs  # these import torch

    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output.resolve() / "facts.jsonl"
    with tempfile.TemporaryDirectory() as scratch, (options.output / "log.txt").open("ab") as log:
        own = {facts.FILE_VARIABLE: str(file), facts.START_VARIABLE: str(time.time()), facts.DEVICE_VARIABLE: options.device}
        os.environ.update(own)
        facts.write(
            "driver", "start", date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", commit=_commit(),
            python=f"{platform.python_version()} {sys.executable}", processors=os.cpu_count(), gpu=_gpu(),
        )  # fmt: skip
        wanted = [run for run in runs.RUNS if not options.only or run.name in options.only.split(",")]
        runs.run_all(wanted, options.tests, environment.variables(Path(scratch), os.environ), end, log, options.jobs)
    known_facts = facts.read(file)
    print("\n".join(summary(known_facts)))
    return 1 if any(_is_bad(fact) for fact in known_facts) else 0


def summary(facts: list[dict[str, Any]]) -> list[str]:
    """Returns at most SUMMARY_LINES lines: the parts' facts, the runs that failed, and the tests that did not pass."""
    lines = []
    for fact in facts:
        if fact["part"] not in ("pytest", "driver") or fact["what"] == "start" or (fact["part"] == "driver" and not fact["ok"]):
            lines.append(json.dumps({name: value for name, value in fact.items() if name != "traceback"})[:SUMMARY_WIDTH])
    ended = [fact for fact in facts if "outcome" in fact]
    bad = [fact for fact in ended if fact["outcome"] == "failed"]
    unfinished = sorted({fact["id"] for fact in facts if "id" in fact} - {fact["id"] for fact in ended})
    lines += [f"failed: {fact['id']}: {_reason(fact.get('error', ''))}"[:SUMMARY_WIDTH] for fact in bad]
    lines += [f"began and did not end: {name}" for name in unfinished]
    left_out = len(lines) - SUMMARY_LINES + 2
    if left_out > 0:
        lines = [*lines[: SUMMARY_LINES - 2], f"({left_out} more lines are in facts.jsonl)"]
    return [*lines, f"tests: {dict(Counter(fact['outcome'] for fact in ended))}"]


def _reason(error: str) -> str:
    """Returns the first line of the exception in pytest's report, or the report's last line."""
    lines = error.strip().splitlines() or [""]
    return next((line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1])


def _is_bad(fact: dict[str, Any]) -> bool:
    return fact.get("ok") is False or fact.get("outcome") == "failed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commands.gpu_report", description="The first minutes on an NVIDIA GPU.")
    parser.add_argument("--output", type=Path, default=Path("bench-results/gpu"), help="for facts.jsonl and log.txt (%(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (%(default)s)")
    parser.add_argument("--jobs", type=int, default=5, help="runs that share the GPU where none measures (%(default)s)")
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument("--device", default="cuda", help="cpu for a rehearsal without a GPU")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests" / "gpu", help="the directory of the tests")
    return parser


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return _output(command) if shutil.which("git") else "unknown"


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version,compute_mode", "--format=csv,noheader"]
    return _output(command) if shutil.which("nvidia-smi") else "there is no nvidia-smi"


def _output(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return "; ".join((process.stdout or process.stderr).strip().splitlines()) or "unknown"


if __name__ == "__main__":
    sys.exit(main())
