"""Programs under `sizes="buckets"`: every size is rounded up, and padding spoils all that depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import rounded_sizes

from dynaxla import backend
from dynaxla.capture import round_up
from dynaxla.engine.bucket import Bucket, BucketProgram
from dynaxla.observe import metrics

from .judge import Verdict, judge
from .observed import Expected
from .program import Program


@contextmanager
def everywhere() -> Iterator[None]:
    """Inside, sizes that may be are rounded up, by two."""
    engine_for = backend.engine_for

    def engine(options: Any, **settings: Any) -> Any:
        return engine_for(dataclasses.replace(options, sizes="buckets"), **settings)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "engine_for", engine))
        stack.enter_context(mock.patch.object(round_up, "rounded", lambda size: size + 2 if size > 1 else size))
        stack.enter_context(rounded_sizes.poisoned())
        yield


def judge_rounded(program: Program, expected: Expected) -> Verdict:
    """As `judge`, with symbolic sizes."""
    with everywhere():
        return judge(dataclasses.replace(program, dynamic=True), expected)


def is_rounded(program: Program, expected: Expected) -> bool:
    """Whether any graph of a program runs with rounded sizes."""
    calls = []
    run = BucketProgram.__call__

    def call(self: BucketProgram, args: list[Any]) -> Any:
        before = metrics.snapshot().get("exact_sizes", 0)
        results = run(self, args)
        calls.append(metrics.snapshot().get("exact_sizes", 0) == before)
        return results

    with mock.patch.object(BucketProgram, "__call__", call):
        judge_rounded(program, expected)
    return any(calls)


assert Bucket
