"""The stages of a report, each a process of its own that is stopped when its time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import environment

# Parts of `dynaxla bench-gpu`, with a model that compiles soon, and minutes: a convolutional network and a transformer.
TABLES = (("float32-batch1", "resnet18", 1.6), ("bfloat16-batch32-training", "bert_base", 1.8))
# Seconds for what is around those minutes.
AROUND = 12.0
# A test that takes longer shows where all threads are.
SLOW_TEST = 100
# Seconds that a stage has to end by itself after it was told to.
GRACE = 5.0


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes: title; command (of dynaxla's, or of Python where it begins with -m); limit, seconds that it may take; reserve, seconds of
    all the time that it must leave to the stages after it.
    """

    title: str
    command: list[str]
    limit: float = 240.0
    reserve: float = 0.0

    @property
    def line(self) -> list[str]:
        own = self.command[0].startswith("-")
        return [sys.executable, *([] if own else ["-c", "from dynaxla.cli import main; main()"]), *self.command]


def stages(tests: Path, results: Path) -> list[Stage]:
    """The tests, file by file, and then the tables, for which time is kept."""
    files = sorted(tests.glob("test_*.py"))
    times = [60 * minutes + AROUND for _, _, minutes in TABLES]
    found = [Stage(f"pytest {file.name}", ["-m", "pytest", *_options(), str(file)], reserve=sum(times)) for file in files]
    for number, (part, model, minutes) in enumerate(TABLES):
        settings = ["--models", model, "--seconds", "1", "--minutes", str(minutes), "--output", str(results / part)]
        found.append(Stage(f"dynaxla bench-gpu {part}", ["bench-gpu", part, *settings], times[number], sum(times[number + 1 :])))
    return found


def _options() -> list[str]:
    """pytest's options that hold whatever plugins it has. xdist's workers would share one GPU; its setting `timeout` is unknown to a
    pytest without the plugin, which says so in a warning, and warnings are errors."""
    always = ["-q", "--tb=short", "--durations=5", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", f"faulthandler_timeout={SLOW_TEST}"]
    return always if environment.has("pytest_timeout") else [*always, "-W", "ignore::pytest.PytestConfigWarning"]


def run_all(wanted: Sequence[Stage], variables: Mapping[str, str], end: float) -> list[str]:
    """Run one after the other, their output among ours. The titles of those that failed or were stopped. end: by time.monotonic()."""
    failed = []
    for stage in wanted:
        limit = max(0.0, min(stage.limit, end - time.monotonic() - stage.reserve))
        print(f"\n== {stage.title}", flush=True)
        begun = time.monotonic()
        code = _run(stage.line, variables, limit)
        took = time.monotonic() - begun
        if code != 0:
            failed.append(stage.title)
        outcome = f"stopped: its {limit:.0f} s were over" if code is None else "well" if code == 0 else f"exit code {code}"
        print(f"== {outcome}, after {took:.0f} s", flush=True)
    return failed


def _run(line: Sequence[str], variables: Mapping[str, str], limit: float) -> int | None:
    """The exit code, or None if it was stopped. It is stopped with all the processes that it has started."""
    process = subprocess.Popen(line, env=dict(variables), cwd=environment.PROJECT, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # pytest then says what it has
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind, too
        process.wait()
