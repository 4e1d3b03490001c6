"""Comparison with eager mode for rounded sizes (`sizes="buckets"`). Poisoned padding changes each result that depends on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from dynaxla.engine import scheduler
from dynaxla.engine.bucket import Bucket
from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal

# Pairs of batch size and length, all in the bucket (6, 12).
SIZES = [(5, 10), (6, 11), (5, 12), (6, 9)]


def poison(padding: torch.Tensor) -> None:
    """Fills padding with NaN, with indices out of range, or with True."""
    if padding.dtype.is_floating_point or padding.dtype.is_complex:
        padding.fill_(float("nan"))
    else:
        padding.fill_(True if padding.dtype == torch.bool else torch.iinfo(padding.dtype).max // 3)


@contextmanager
def poisoned() -> Iterator[None]:
    """In this context, padding is poisoned."""
    with mock.patch.object(scheduler, "Bucket", functools.partial(Bucket, fill=poison)):
        yield


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(
        function, backend="dynaxla", **{"fullgraph": True, "dynamic": True, **settings}, options={"sizes": "buckets", "compile": "now"}
    )


def counts() -> tuple[int, int]:
    """Returns the number of programs compiled so far, and of calls with exact sizes."""
    snapshot = metrics.snapshot()
    return snapshot.get("compile", 0), snapshot.get("exact_sizes", 0)


def assert_one_program(functions: Sequence[Callable[..., Any]], inputs: Callable[[int, int], Sequence[Any]]) -> None:
    """Checks functions of the same inputs in one graph: one executable has the results of eager mode for all SIZES."""

    def together(*args: Any) -> tuple[Any, ...]:
        return tuple(function(*args) for function in functions)

    before = counts()
    with poisoned():
        run = compiled(together)
        for sizes in SIZES:
            args = inputs(*sizes)
            for index, (found, expected) in enumerate(zip(run(*args), together(*args), strict=True)):
                assert found.stride() == expected.stride(), f"function {index} with sizes {sizes}"
                assert_equal(found, expected)
    assert counts() == (before[0] + 1, before[1])


def features(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Returns inputs: floats with 4 features; floats; indices below 7; a table for these indices."""
    return torch.randn(batch, length, 4), torch.randn(batch, length), torch.randint(0, 7, (batch, length)), torch.randn(7, 4)
