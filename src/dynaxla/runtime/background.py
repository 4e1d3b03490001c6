"""Background compilation: one thread does the work piece by piece, and ends when nothing is left to do.

Interpreter shutdown waits for the thread, so that nothing is torn down while XLA works. The thread then finishes the current piece and
drops the rest.

The background thread and the calling thread share Python's GIL. torch releases the GIL in every op, and gets it back when the other thread
releases it, or after 5 ms: next to a thread that traces, a graph of 300 ops would take a second. So while torch's kernels run a graph that
waits for its compilation, the background thread runs Python code for 1 ms and then sleeps for 4 ms. XLA's own work does not hold the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from .. import forks

log = logging.getLogger("dynaxla")

# Seconds of Python code and of sleep, in turn.
_WORK, _REST = 0.001, 0.004
# Timeout in seconds of each wait, after which Python handles a signal that arrived just before the wait.
_PATIENCE = 0.5


class BackgroundTask(Protocol):
    """An object with work for the thread, which holds only a weak reference to it."""

    def work(self) -> bool:
        """Does one piece of work. Returns: whether there is more."""


class Background:
    """The background thread and its queue. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        forks.call_after_fork(self)

    def after_fork(self) -> None:
        """Resets the state. In a forked child: the parent finishes the work that it has queued."""
        self._changed = threading.Condition(forks.lock())
        self._wanted: dict[weakref.ref[BackgroundTask], None] = {}  # the last one is served first
        self._thread: threading.Thread | None = None

    def want(self, patient: BackgroundTask) -> None:
        """Queues an object, whose `work()` is called until it has no more work. The most recently queued object is served first."""
        with self._changed:
            reference = weakref.ref(patient)
            self._wanted.pop(reference, None)
            self._wanted[reference] = None
            with contextlib.suppress(RuntimeError):  # the system cannot start a thread now: the next call tries again
                self._start()

    def finish(self) -> None:
        """Waits until the queue is empty. Raises: RuntimeError if the system cannot start a thread."""
        with self._changed:
            if self._wanted:
                self._start()
            if self._thread is not threading.current_thread():
                while self._is_running():
                    self._changed.wait(_PATIENCE)

    def _start(self) -> None:
        if not self._is_running() and threading.main_thread().is_alive():
            self._thread = threading.Thread(target=self._run, name="dynaxla", daemon=False)
            self._thread.start()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while (patient := self._next()) is not None:
            more = False
            try:
                with _taking_turns():
                    more = patient.work()
            except BaseException:  # the thread must survive for the other objects in the queue
                log.exception("a background task failed")
            with self._changed:
                if more and weakref.ref(patient) not in self._wanted:
                    self._wanted = {weakref.ref(patient): None, **self._wanted}
            del patient

    def _next(self) -> BackgroundTask | None:
        with self._changed:
            while self._wanted and threading.main_thread().is_alive():
                reference, _ = self._wanted.popitem()
                if (patient := reference()) is not None:
                    return patient
            self._wanted.clear()
            self._thread = None
            self._changed.notify_all()
        return None


_background = Background()
want = _background.want
finish = _background.finish

# An item for each call inside `in_its_place`.
_calls: list[None] = []


@contextlib.contextmanager
def in_its_place() -> Iterator[None]:
    """Marks a call that runs by torch's kernels because its program is still being compiled. The background thread then yields to it."""
    _calls.append(None)
    try:
        yield
    finally:
        _calls.pop()


@contextlib.contextmanager
def _taking_turns() -> Iterator[None]:
    """Makes this thread sleep at intervals inside the context while calls are in `in_its_place`. It sleeps in a profile function, which
    Python calls often enough."""
    rested = time.perf_counter()

    def rest(*_: Any) -> None:
        nonlocal rested
        if _calls and time.perf_counter() - rested > _WORK:
            time.sleep(_REST)
            rested = time.perf_counter()

    before = sys.getprofile()
    sys.setprofile(rest)
    try:
        yield
    finally:
        sys.setprofile(before)
