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

# Seconds for which pytest may print its summary after it was interrupted.
GRACE = 3.0
# Seconds after which a single test ends its process, and after which it prints where its threads are.
TEST_LIMIT, TEST_TRACEBACK = 60, 45
# A test file is not started again after a crash with fewer seconds than this left.
SHORTEST_RUN = 15.0


@dataclass(frozen=True)
class Run:
    """One part, or one file of tests.

    Attributes:
        name: the part's name in `parts.PARTS`, or the test file's.
        limit: seconds that it may take, all restarts after crashes included.
        alone: True if no other run may use the GPU meanwhile, because it measures times or memory.
        is_needed: True if nothing else can work unless the run's first fact is good: the report ends there.
    """

    name: str
    limit: float
    alone: bool = False
    is_needed: bool = False

    @property
    def is_tests(self) -> bool:
        return self.name.endswith(".py")


# In the order of what they tell. Attention comes last: it has the most programs by far.
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
    """Run everything until `end`, a time of time.monotonic(). Up to `jobs` runs share the GPU, except for those that must be alone.

    Raises: nothing for a run that fails; the facts say so.
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
    found = [fact for fact in facts.read(Path(os.environ[facts.FILE_VARIABLE])) if fact["part"] == run.name]
    return bool(found) and found[0]["ok"]


def _run(run: Run, tests: Path, variables: Mapping[str, str], end: float, log: IO[bytes]) -> None:
    start = time.monotonic()
    end = min(end, start + run.limit)
    if end - start < 1:
        facts.write("driver", run.name, ok=False, exit="not started: no time left", took_seconds=0)
        return
    code = _run_tests(run, tests, variables, end, log) if run.is_tests else _process(part_line(run.name), variables, end, log)
    facts.write("driver", run.name, ok=code == 0, exit=code, took_seconds=round(time.monotonic() - start, 1))


def _run_tests(run: Run, tests: Path, variables: Mapping[str, str], end: float, log: IO[bytes]) -> int | str:
    """Run a file of tests. After a crash, the tests that had not begun are run by a new process."""
    begun: set[str] = set()
    while True:
        code = _process([*pytest_line(tests / run.name), *(f"--deselect={name}" for name in sorted(begun))], variables, end, log)
        file = Path(os.environ[facts.FILE_VARIABLE])
        ids = {fact["id"] for fact in facts.read(file) if fact["what"] == pytest_facts.BEGIN and run.name in fact["id"]}
        # pytest's own exit codes: 0 all passed, 1 some failed, 5 no tests left.
        if code in (0, 1, 5, "stopped at its time limit") or ids <= begun or end - time.monotonic() < SHORTEST_RUN:
            return 1 if code in (0, 5) and begun else code
        begun |= ids


def part_line(name: str) -> list[str]:
    return [sys.executable, "-X", "faulthandler", "-m", "commands.gpu_report.parts", name]


def pytest_line(file: Path) -> list[str]:
    """xdist's workers would share one GPU. Without pytest-timeout, its setting in pyproject.toml is unknown and warns."""
    options = ["-q", "--tb=short", "-p", "commands.gpu_report.pytest_facts", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-o", f"faulthandler_timeout={TEST_TRACEBACK}"]
    options += [f"--timeout={TEST_LIMIT}"] if environment.has("pytest_timeout") else ["-W", "ignore::pytest.PytestConfigWarning"]
    return [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, str(file)]


def _process(line: Sequence[str], variables: Mapping[str, str], end: float, log: IO[bytes]) -> int | str:
    """Returns the exit code. A process that is not done at `end` is stopped with all processes that it has started."""
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
