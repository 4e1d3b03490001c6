"""A lock with which only one thread at a time captures graphs, because torch's tracers keep their state in globals.

The lock is TorchDynamo's own, so captures by TorchDynamo and by dynaxla exclude each other. It is reentrant.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from . import private


def exclusive() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which no other thread records or captures a graph."""
    return private.capture_lock


# Attributes: `depth`, the number of this thread's active `capturing` contexts; `kept`, the objects that these contexts keep alive.
_thread = threading.local()


def is_capturing() -> bool:
    """True if this thread is inside `capturing`, so that dynaxla, not another tracer, traces the current graph."""
    return getattr(_thread, "depth", 0) > 0


def keep(value: Any) -> None:
    """Keeps an object, to which the captured graph refers, alive until this thread leaves `capturing`. Only inside `capturing`."""
    _thread.kept.append(value)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside the context, only this thread captures graphs.

    As during TorchDynamo's captures, `torch.compiler.is_compiling()` is true in all threads. Otherwise torch would refuse calls of compiled
    functions in any thread while a graph is traced, because it would take them for a part of the traced function.
    """
    with private.capture_lock, private.checks_have_side_effects():
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
