"""Runs cases: in this process, or as the process that pool.py starts (case by case, one line of JSON each way)."""

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
    """Counts and the first failure of each label.

    together: how many calls may be compiled as one function; runner: what runs the calls, if not the one that compiles them.
    Result: passed; skipped (by reason), failed (by label), notes (on passed calls): counts; examples: label -> first call and message;
    executed, fallback: the ATen ops that XLA ran, and those that torch's kernels ran for want of a lowering; complete: all samples ran.
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
    """With the case's tolerances."""
    override = tolerance_of(case)

    def tolerance(dtype: torch.dtype) -> judge.Tolerance:
        default = judge.default_tolerance(dtype)
        return max(default[0], override[0]), max(default[1], override[1]) if default != (0, 0) else default

    return kind(tolerance, uninitialised=uninitialised(case))


class _Database:
    """A case's trials, reported as they are made; error: what making one raised."""

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
    """Make this process ready for cases: one thread, no warnings about torch's own samples, no work that compiling them does not need."""
    torch.set_num_threads(1)
    quiet()
    gc.freeze()  # collections need not look again at what importing has made
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0  # it flushes the CPU's caches to time each new guard


def clean() -> None:
    """Let go of everything compiled."""
    torch._dynamo.reset()
    jax.clear_caches()
    calls.forget_sources()
    gc.collect()


def main(runner: Callable[[Case], Runner] = runner_of, cases_between: int = 1) -> None:
    """Read cases from descriptor 0, write to the descriptor that the last argument names: {"sample": i} before each call, then the result.

    cases_between: how many cases there are from one cleaning to the next.
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
