"""The processes of a report, each with a time limit, and the order in which they start."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from support.paths import ROOT

from . import environment, facts, pytest_facts

# Seconds that pytest has to print its summary after an interrupt.
GRACE = 3.0
# Seconds after which a single test is ended together with its process, and after which it prints the stacks of its threads.
TEST_LIMIT, TEST_TRACEBACK = 60, 45
# The minimum number of seconds left for which a test file is started again after a crash.
SHORTEST_RUN = 15.0


@dataclass(frozen=True)
class Run:
    """A part of the report, or a file of tests.

    Attributes:
        name: the part's name in `parts.PARTS`, or the test file's.
        limit: the maximum number of seconds, including restarts after crashes.
        alone: True if no other run may use the GPU at the same time, because the run measures times or memory.
        is_needed: True if the report ends here unless the run's first fact is good, because no later run could work.
    """

    name: str
    limit: float
    alone: bool = False
    is_needed: bool = False

    @property
    def is_tests(self) -> bool:
        return self.name.endswith(".py")


# The runs with the most important facts come first. The tests of attention come late, because they compile by far the most programs.
RUNS = [
    Run("versions", 60, alone=True),
    Run("hand_over", 60, alone=True),
    Run("add", 90, alone=True, is_needed=True),
    Run("call_time", 90, alone=True),
    Run("test_cuda.py", 150, alone=True),
    Run("public_ways", 90),
    Run("linear", 90),
    Run("train_model", 120),
    Run("train_step", 150),
    Run("test_training_cuda.py", 150),
    Run("attention", 120),
    Run("resnet18", 150),
    Run("resnet18_step", 200),
    Run("test_models_cuda.py", 180),
    Run("test_ops_cuda.py", 180),
    Run("test_gpu_layouts.py", 120),
    Run("test_crossing_devices.py", 100),
    Run("callbacks", 90),
    Run("graph_capture", 60),
    Run("test_cuda_attention.py", 180),
    Run("profile_step", 120, alone=True),
    Run("many_calls", 60, alone=True),
    Run("out_of_memory", 60, alone=True),
]


def run_all(runs: Sequence[Run], tests: Path, variables: Mapping[str, str], end: float, log: IO[bytes], jobs: int) -> None:
    """Starts the runs until `end`, a time of time.monotonic(). Up to `jobs` runs share the GPU, except for those that must be alone.

    The facts, rather than exceptions, report runs that fail.
    """
    pending = list(runs)
    while pending:
        count = 1 if pending[0].alone else next((i for i, run in enumerate(pending) if run.alone), len(pending))
        group, pending = pending[:count], pending[count:]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda run: _run(run, tests, variables, end, log), group))
        if any(run.is_needed and not _works(run) for run in group):
            facts.write("driver", "end", ok=False, reason=f"{group[0].name} failed: nothing after it can work")
            return


def _works(run: Run) -> bool:
    own_facts = [fact for fact in facts.read(Path(os.environ[facts.FILE_VARIABLE])) if fact["part"] == run.name]
    return bool(own_facts) and own_facts[0]["ok"]


def _run(run: Run, tests: Path, variables: Mapping[str, str], end: float, log: IO[bytes]) -> None:
    start = time.monotonic()
    end = min(end, start + run.limit)
    if end - start < 1:
        facts.write("driver", run.name, ok=False, exit="not started: no time left", took_seconds=0)
        return
    code = _run_tests(run, tests, variables, end, log) if run.is_tests else _process(part_line(run.name), variables, end, log)
    facts.write("driver", run.name, ok=code == 0, exit=code, took_seconds=round(time.monotonic() - start, 1))


def _run_tests(run: Run, tests: Path, variables: Mapping[str, str], end: float, log: IO[bytes]) -> int | str:
    """Runs a file of tests. After a crash, a new process runs the tests that had not begun."""
    begun_tests: set[str] = set()
    while True:
        code = _process([*pytest_line(tests / run.name), *(f"--deselect={name}" for name in sorted(begun_tests))], variables, end, log)
        file = Path(os.environ[facts.FILE_VARIABLE])
        ids = {fact["id"] for fact in facts.read(file) if fact["what"] == pytest_facts.BEGIN and run.name in fact["id"]}
        # pytest's own exit codes: 0 all passed, 1 some failed, 5 no tests left.
        if code in (0, 1, 5, "stopped at its time limit") or ids <= begun_tests or end - time.monotonic() < SHORTEST_RUN:
            return 1 if code in (0, 5) and begun_tests else code
        begun_tests |= ids


def part_line(name: str) -> list[str]:
    return [sys.executable, "-X", "faulthandler", "-m", "commands.gpu_report.parts", name]


def pytest_line(file: Path) -> list[str]:
    """Returns the command of a test file. xdist is disabled, since its workers would share the GPU.

    Without pytest-timeout, its setting in pyproject.toml causes a warning, which is ignored.
    """
    options = ["-q", "--tb=short", "-p", "commands.gpu_report.pytest_facts", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-o", f"faulthandler_timeout={TEST_TRACEBACK}"]
    options += [f"--timeout={TEST_LIMIT}"] if environment.has("pytest_timeout") else ["-W", "ignore::pytest.PytestConfigWarning"]
    return [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, str(file)]


def _process(line: Sequence[str], variables: Mapping[str, str], end: float, log: IO[bytes]) -> int | str:
    """Returns the exit code. A process that runs at `end` is stopped with all processes that it has started."""
    process = subprocess.Popen(line, env=dict(variables), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # pytest prints its summary
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return "stopped at its time limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
