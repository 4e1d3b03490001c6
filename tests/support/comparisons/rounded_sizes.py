"""The comparison for rounded sizes (`sizes="buckets"`): poisoned padding makes every result that depends on it differ."""

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

# Batch and length: four pairs of one bucket, (6, 12).
SIZES = [(5, 10), (6, 11), (5, 12), (6, 9)]


def poison(padding: torch.Tensor) -> None:
    """NaN, indices of no element, truth."""
    if padding.dtype.is_floating_point or padding.dtype.is_complex:
        padding.fill_(float("nan"))
    else:
        padding.fill_(True if padding.dtype == torch.bool else torch.iinfo(padding.dtype).max // 3)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, padding is poison."""
    with mock.patch.object(scheduler, "Bucket", functools.partial(Bucket, fill=poison)):
        yield


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(
        function, backend="dynaxla", **{"fullgraph": True, "dynamic": True, **settings}, options={"sizes": "buckets", "compile": "now"}
    )


def counts() -> tuple[int, int]:
    """Programs compiled so far, and calls for exact sizes."""
    now = metrics.snapshot()
    return now.get("compile", 0), now.get("exact_sizes", 0)


def assert_one_program(functions: Sequence[Callable[..., Any]], inputs: Callable[[int, int], Sequence[Any]]) -> None:
    """Functions of the same inputs, in one graph, have eager mode's results for all SIZES, with one executable."""

    def together(*given: Any) -> tuple[Any, ...]:
        return tuple(function(*given) for function in functions)

    before = counts()
    with poisoned():
        run = compiled(together)
        for sizes in SIZES:
            given = inputs(*sizes)
            for index, (found, expected) in enumerate(zip(run(*given), together(*given), strict=True)):
                assert found.stride() == expected.stride(), f"function {index} with sizes {sizes}"
                assert_equal(found, expected)
    assert counts() == (before[0] + 1, before[1])


def features(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """x: floats with 4 features; y: floats; n: indices below 7; t: a table for them."""
    return torch.randn(batch, length, 4), torch.randn(batch, length), torch.randint(0, 7, (batch, length)), torch.randn(7, 4)
