"""Graphs are captured by one thread at a time: torch's tracers keep their state in globals.

The lock is TorchDynamo's own: graphs that TorchDynamo captures and others exclude each other. A thread may take it again while it has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import private


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Inside, no other thread records or captures a graph."""
    return private.capture_lock


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, this thread alone captures a graph.

    As in TorchDynamo, `torch.compiler.is_compiling()` is true meanwhile, in all threads: if it were not, torch would take a call of any
    compiled function, in whatever thread, for one that is to be traced, and refuse it.
    """
    with private.capture_lock, private.checks_have_an_effect():
        before = private.compiling_flag()
        private.set_compiling_flag(True)
        try:
            yield
        finally:
            private.set_compiling_flag(before)
