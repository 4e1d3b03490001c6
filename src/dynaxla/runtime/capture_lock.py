"""Graphs are captured by one thread at a time: torch's tracers keep their state in globals.

The lock is TorchDynamo's own: graphs that TorchDynamo captures and others exclude each other. A thread may take it again while it has it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from . import private


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Inside, no other thread records or captures a graph."""
    return private.capture_lock


_thread = threading.local()  # depth: how many `capturing` this thread is in; kept: what these keep alive


def is_capturing() -> bool:
    """Whether this thread is inside of `capturing`: whoever traces now, the graph is for dynaxla."""
    return getattr(_thread, "depth", 0) > 0


def keep(value: Any) -> None:
    """Keep alive what a graph names, until this thread has left `capturing`: by then a program of the graph holds it."""
    _thread.kept.append(value)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, this thread alone captures a graph.

    As in TorchDynamo, `torch.compiler.is_compiling()` is true meanwhile, in all threads: if it were not, torch would take a call of any
    compiled function, in whatever thread, for one that is to be traced, and refuse it.
    """
    with private.capture_lock, private.checks_have_an_effect():
        before = private.compiling_flag()
        private.set_compiling_flag(True)
        _thread.depth = getattr(_thread, "depth", 0) + 1
        if _thread.depth == 1:
            _thread.kept = []
        try:
            yield
        finally:
            _thread.depth -= 1
            if not _thread.depth:
                del _thread.kept
            private.set_compiling_flag(before)
