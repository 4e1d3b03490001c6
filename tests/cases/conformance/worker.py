"""Runs cases in this process, or as a process that pool.py starts: it reads each case, and writes each result, as a line of JSON."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import torch
from torch._dynamo import guards

from . import calls, judge, observed
from .entries import Case, Trial, tolerance_of, trials, uninitialised
from .trial import Runner, quiet

Result = dict[str, Any]
R = TypeVar("R", bound=Runner)


def run_case(
    case: Case,
    max_samples: int | None = None,
    together: int = 1,
    progress: Callable[[int], None] = lambda index: None,
    runner: Runner | None = None,
) -> Result:
    """Returns counts, and the first failure of each label.

    Args:
        together: The number of calls that may be compiled as one function.
        runner: Runs the calls, if not the runner that compiles them.

    Returns:
        passed: The number of calls that passed.
        skipped, failed, notes: The number of skipped calls by reason, of failed calls by label, of passed calls by note.
        examples: The first call of each label, with its message.
        executed, fallback: The ATen ops that XLA ran, and those that torch's kernels ran because there is no lowering.
        complete: True if all samples ran.
    """
    started = time.perf_counter()
    torch._dynamo.reset()
    before = observed.counts()
    verdicts: Counter[tuple[str, str]] = Counter()
    examples: dict[str, dict[str, str]] = {}
    runner = runner or runner_of(case)
    database = _Database(itertools.islice(trials(case), max_samples), progress)
    for trial, outcome in runner.outcomes(database, together):
        verdicts[outcome.verdict, outcome.label] += 1
        if outcome.verdict != "pass" and outcome.label not in examples:
            examples[outcome.label] = {"sample": f"{trial.number}: {trial.call.describe()[:400]}", "message": outcome.text}
    if database.error:
        label = f"the database raises {type(database.error).__name__}"
        verdicts["skip", label] = 1
        examples[label] = {"sample": "", "message": str(database.error)[:300]}
    executed, fallback = observed.since(before)
    return {
        "case": str(case),
        "passed": sum(count for (verdict, _), count in verdicts.items() if verdict == "pass"),
        "skipped": {label: count for (verdict, label), count in verdicts.items() if verdict == "skip"},
        "failed": {label: count for (verdict, label), count in verdicts.items() if verdict == "fail"},
        "notes": {label: count for (verdict, label), count in verdicts.items() if verdict == "pass" and label},
        "examples": examples,
        "executed": executed,
        "fallback": fallback,
        "complete": max_samples is None,
        "seconds": round(time.perf_counter() - started, 2),
    }


def runner_of(case: Case, kind: type[R] = Runner) -> R:
    """Returns a runner with the case's tolerances."""
    override = tolerance_of(case)

    def tolerance(dtype: torch.dtype) -> judge.Tolerance:
        default = judge.default_tolerance(dtype)
        return max(default[0], override[0]), max(default[1], override[1]) if default != (0, 0) else default

    return kind(tolerance, uninitialised=uninitialised(case))


class _Database:
    """The trials of a case. Their numbers are reported as they are made.

    Attributes:
        error: The exception that making a trial raised, or None.
    """

    def __init__(self, trials: Iterator[Trial], progress: Callable[[int], None]) -> None:
        self.trials, self.progress = trials, progress
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Trial]:
        try:
            for trial in self.trials:
                self.progress(trial.number)
                yield trial
        except Exception as error:
            self.error = error


def prepare() -> None:
    """Prepares this process for cases: one thread, no warnings about torch's samples, and no unnecessary work in compilation."""
    torch.set_num_threads(1)
    quiet()
    gc.freeze()  # garbage collections need not visit the objects that imports have created
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0  # it flushes the CPU's caches to time each new guard


def clean() -> None:
    """Drops everything that was compiled."""
    torch._dynamo.reset()
    jax.clear_caches()
    calls.forget_sources()
    gc.collect()


def main(runner: Callable[[Case], Runner] = runner_of, cases_between: int = 1) -> None:
    """Reads cases from stdin. Writes {"sample": i} before each call, then the result, to the descriptor that the last argument names.

    Args:
        cases_between: The number of cases between two cleanings.
    """
    answers = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
    prepare()

    def send(message: Result) -> None:
        answers.write(json.dumps(message) + "\n")

    send({"ready": True})
    for number, line in enumerate(sys.stdin, 1):
        request = json.loads(line)
        case = Case(*request["case"])
        result = run_case(case, request["max_samples"], request["together"], lambda index: send({"sample": index}), runner(case))
        if not number % cases_between:
            clean()
        send(result | {"kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})


if __name__ == "__main__":
    main()
