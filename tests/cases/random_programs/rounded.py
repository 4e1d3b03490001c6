"""Programs under `sizes="buckets"`: every size is rounded up, and padding spoils all that depends on it."""

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

# Of a graph with sizes that change: a program for rounded ones serves it.
ROUNDED = "rounded"


@contextmanager
def everywhere() -> Iterator[list[str]]:
    """Inside, sizes that may be are rounded up, by two, and XLA compiles quickly.

    Gives a list: for each graph with sizes that change ROUNDED, or why it is compiled for exact ones.
    """
    engine_for, pad = backend.engine_for, pipeline.PADDING
    seen: list[str] = []

    def engine(options: Any, **settings: Any) -> Any:
        return engine_for(dataclasses.replace(options, sizes="buckets"), **settings)

    def noticed(graph: Any) -> Any:
        found = pad(graph)
        if found is not None:
            seen.append(ROUNDED if isinstance(found, PaddedGraph) else str(found).split(" (")[0])
        return found

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline, "PADDING", noticed))
        quick_compilation.apply(stack.enter_context(pytest.MonkeyPatch.context()))
        stack.enter_context(mock.patch.object(backend, "engine_for", engine))
        stack.enter_context(mock.patch.object(round_up, "round_up_size", lambda size: size + 2 if size > 1 else size))
        stack.enter_context(rounded_sizes.poisoned())
        yield seen
