"""The sources of random cases. A source draws a case from a seed, and returns a description of the failure, or ""."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable

from support.paths import TESTS

Source = Callable[[int], str]

SAMPLES = 5


def programs(seed: int) -> str:
    from cases.random_programs import runner

    record = runner.run_one(seed)
    if record["outcome"] not in runner.BAD:
        return ""
    return "\n".join([record["outcome"], record["kind"], record["detail"], record["reproducer"]])


def python_state(seed: int) -> str:
    from cases.python_state.cases import draw_case, judge
    from cases.python_state.choices import SeededChoices

    case = draw_case(SeededChoices(seed))
    problem = judge(case, bool(seed % 2)).problem
    return problem and f"{problem} ({case.change[0]})\n{case.text}"


def number_programs(seed: int) -> str:
    from cases.number_programs.programs import difference

    return difference(seed)


def object_turns(seed: int) -> str:
    from cases.object_turns.programs import differences

    return differences(seed)


@functools.cache
def _cases() -> list[object]:
    from cases.conformance.entries import cases
    from cases.conformance.expected import by_case

    expected = by_case()
    return [case for case in cases() if str(case) not in expected]


def conformance(seed: int) -> str:
    """Compares the first samples of a case of PyTorch's databases."""
    from cases.conformance.trial import quiet
    from cases.conformance.worker import run_case

    case = random.Random(seed).choice(_cases())
    with warnings.catch_warnings():
        quiet()
        result = run_case(case, SAMPLES, together=SAMPLES)
    return f"{case}: {json.dumps(result['examples'], indent=2)}" if result["failed"] else ""


def properties(seed: int) -> str:
    """Runs all tests whose arguments hypothesis draws."""
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "@given" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis and not slow and not gpu", "-p", "no:cacheprovider", *files]
    command += ["--hypothesis-profile=explore", f"--hypothesis-seed={seed}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process.stdout if process.returncode else ""


SOURCES: dict[str, Source] = {
    source.__name__: source for source in (programs, python_state, number_programs, object_turns, conformance, properties)
}
