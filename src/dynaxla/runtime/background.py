"""Work that no call waits for: a thread of its own does it, piece by piece, and ends when nothing is left to do.

Python's end waits for the thread, so that nothing is taken down while XLA works; it ends with the piece at hand then, and drops the rest.

Two threads take turns with Python's code. A thread that has given its turn away, as torch does in every op, gets it back when the other
one gives it away too, or after 5 milliseconds: beside a thread that traces, a graph of 300 ops would take a second. So while torch's
kernels run a graph that waits for this thread, it works for a millisecond of Python and rests for four. XLA's own work needs no turn.
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

# Seconds.
_WORK, _REST = 0.001, 0.004
# A signal that arrives just before the lock is waited for is seen when the wait ends.
_PATIENCE = 0.5


class Patient(Protocol):
    """What has work for the thread. It is not kept alive for that."""

    def work(self) -> bool:
        """Do one piece. Returns: whether there is more."""


class Background:
    """The thread and what it has to do. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        forks.renew(self)

    def after_fork(self) -> None:
        """The parent does what it has begun."""
        self._changed = threading.Condition(forks.lock())
        self._wanted: dict[weakref.ref[Patient], None] = {}  # the last one is the first to be served
        self._thread: threading.Thread | None = None

    def want(self, patient: Patient) -> None:
        """Have `patient.work()` called until there is no more. What was wanted last comes first."""
        with self._changed:
            reference = weakref.ref(patient)
            self._wanted.pop(reference, None)
            self._wanted[reference] = None
            with contextlib.suppress(RuntimeError):  # the system has no thread left: the next call may find one
                self._start()

    def finish(self) -> None:
        """Wait until nothing is left to do. Raises: RuntimeError if the system has no thread left."""
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
            except BaseException:  # the others must not wait for a thread that has ended
                log.exception("a failure in the background")
            with self._changed:
                if more and weakref.ref(patient) not in self._wanted:
                    self._wanted = {weakref.ref(patient): None, **self._wanted}
            del patient

    def _next(self) -> Patient | None:
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

# An item for each call that runs in the thread's place.
_calls: list[None] = []


@contextlib.contextmanager
def in_its_place() -> Iterator[None]:
    """Inside, a call does with torch's kernels what it would do otherwise if the thread were ready."""
    _calls.append(None)
    try:
        yield
    finally:
        _calls.pop()


@contextlib.contextmanager
def _taking_turns() -> Iterator[None]:
    """Inside, this thread rests from time to time while there are such calls. Python calls its profile function often enough to do it."""
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


def finish_compilations() -> None:
    """Wait until what the option compile="background" has left to compile is compiled: the next calls run XLA's programs.

    Call each size once before. What has failed is logged, and raised by the next call of that graph.
    """
    _background.finish()
