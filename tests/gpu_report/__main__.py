"""`python -m gpu_report`: what is there, the tests of GPUs, a short table. The exit code is 1 if some failed, 2 if something is missing."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import environment
from .stages import Stage, run_all, stages


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    end = time.monotonic() + 60 * options.minutes
    print(f"dynaxla on a GPU, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {_commit()}", flush=True)
    print(f"Python {platform.python_version()} ({sys.executable}), {os.cpu_count()} processors, GPU: {_gpu()}", flush=True)
    missing = environment.missing()
    for sentence in missing:
        print(f"missing: {sentence}", flush=True)
    if missing:
        return 2
    with tempfile.TemporaryDirectory() as metadata, tempfile.TemporaryDirectory() as results:
        variables = environment.variables(Path(metadata), os.environ)
        if run_all([Stage("dynaxla doctor --gpu", ["doctor", "--gpu"])], variables, end):
            print("Not gone further: what is broken has to be mended first.")
            return 2
        failed = run_all(stages(options.tests, Path(results)), variables, end)
    print(f"\n{'These failed: ' + ', '.join(failed) if failed else 'All went well.'}")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="gpu_report", description="What one run on a machine with a GPU tells, as one text.")
    found.add_argument("--minutes", type=float, default=9.5, help="for all of it (9.5)")
    found.add_argument("--tests", type=Path, default=environment.PROJECT / "tests" / "gpu", help="the directory of the tests")
    return found


def _commit() -> str:
    asked = ["git", "-C", str(environment.PROJECT), "describe", "--always", "--dirty"]
    return _answer(asked) if shutil.which("git") else "unknown"


def _gpu() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return _answer(asked) if shutil.which("nvidia-smi") else "there is no nvidia-smi"


def _answer(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "; ".join((done.stdout or done.stderr).strip().splitlines()) or "unknown"


if __name__ == "__main__":
    sys.exit(main())
