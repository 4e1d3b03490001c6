"""Runs programs with `sizes="buckets"`: all sizes are rounded up, and padding has values that spoil results that depend on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from dynaxla import backend
from dynaxla.passes import pipeline
from dynaxla.passes.padding import round_up
from dynaxla.passes.padding.padded_graph import PaddedGraph
from support.comparisons import rounded_sizes
from support.timing import quick_compilation

# Recorded for a graph with dynamic sizes that is compiled for rounded sizes.
ROUNDED = "rounded"


@contextmanager
def everywhere() -> Iterator[list[str]]:
    """In this context, sizes are rounded up by two if the graph allows it, and XLA compiles quickly.

    Yields a list. For each graph with dynamic sizes it gets ROUNDED, or the reason why the graph is compiled for exact sizes.
    """
    engine_for, pad = backend.engine_for, pipeline.PADDING
    outcomes: list[str] = []

    def engine(options: Any, **settings: Any) -> Any:
        return engine_for(dataclasses.replace(options, sizes="buckets"), **settings)

    def recorded(graph: Any) -> Any:
        result = pad(graph)
        if result is not None:
            outcomes.append(ROUNDED if isinstance(result, PaddedGraph) else str(result).split(" (")[0])
        return result

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline, "PADDING", recorded))
        quick_compilation.apply(stack.enter_context(pytest.MonkeyPatch.context()))
        stack.enter_context(mock.patch.object(backend, "engine_for", engine))
        stack.enter_context(mock.patch.object(round_up, "round_up_size", lambda size: size + 2 if size > 1 else size))
        stack.enter_context(rounded_sizes.poisoned())
        yield outcomes
