"""Background compilation: one thread runs queued tasks piece by piece, and ends when the queue is empty.

When Python shuts down, it waits for the thread, so that no C++ objects are destroyed while XLA uses them. The thread then finishes its
current piece of work and drops the other tasks.

The background thread and the calling thread share Python's GIL. torch releases the GIL in every op, and may wait 5 ms (Python's switch
interval) to get it back while another thread runs Python code. If the background thread traced all the time, a call of 300 ops would take
more than a second. So while torch's kernels run a call whose program is being compiled, the background thread runs Python code for 1 ms
and then sleeps for 4 ms, in turn. XLA's own work does not hold the GIL.
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

# During an `eager_call`, the background thread runs Python code and sleeps in turn, for these times.
_RUN_SECONDS, _SLEEP_SECONDS = 0.001, 0.004
# A wait is repeated at this interval, so that Python handles a signal (Ctrl-C) that arrived just before the wait.
_WAIT_SECONDS = 0.5


class BackgroundTask(Protocol):
    """An object with work for the background thread. The queue has only a weak reference to it."""

    def work(self) -> bool:
        """Does one piece of work. Returns: True if there is more work."""


class Background:
    """The background thread and its queue. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        forks.call_after_fork(self)

    def after_fork(self) -> None:
        """Starts with an empty queue. In a forked child this drops the parent's tasks, which the parent runs itself."""
        self._changed = threading.Condition(forks.lock())
        self._queue: dict[weakref.ref[BackgroundTask], None] = {}  # an ordered set; the last task is served first
        self._thread: threading.Thread | None = None

    def enqueue(self, task: BackgroundTask) -> None:
        """Queues a task. Its `work()` is called until it has no more work. The most recently queued task is served first."""
        with self._changed:
            reference = weakref.ref(task)
            self._queue.pop(reference, None)
            self._queue[reference] = None
            with contextlib.suppress(RuntimeError):  # the system cannot start a thread now; the next `enqueue` or `finish` tries again
                self._start()

    def finish(self) -> None:
        """Waits until the thread has served the whole queue. Raises: RuntimeError if the system cannot start a thread."""
        with self._changed:
            if self._queue:
                self._start()
            if self._thread is not threading.current_thread():
                while self._is_running():
                    self._changed.wait(_WAIT_SECONDS)

    def _start(self) -> None:
        if not self._is_running() and threading.main_thread().is_alive():
            self._thread = threading.Thread(target=self._run, name="dynaxla", daemon=False)
            self._thread.start()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            more = False
            try:
                with _sleeping_at_intervals():
                    more = task.work()
            except BaseException:  # the thread must go on with the other tasks
                log.exception("a background task failed")
            with self._changed:
                # The task is served after all others, unless it was queued again meanwhile.
                if more and weakref.ref(task) not in self._queue:
                    self._queue = {weakref.ref(task): None, **self._queue}
            del task

    def _next(self) -> BackgroundTask | None:
        """Returns the next task. Returns None if the queue is empty or Python shuts down: the thread must then end."""
        with self._changed:
            while self._queue and threading.main_thread().is_alive():
                reference, _ = self._queue.popitem()
                if (task := reference()) is not None:
                    return task
            self._queue.clear()
            self._thread = None
            self._changed.notify_all()
        return None


_background = Background()
enqueue = _background.enqueue
finish = _background.finish

# One item for each active `eager_call` context.
_eager_calls: list[None] = []


@contextlib.contextmanager
def eager_call() -> Iterator[None]:
    """Marks a call that torch's kernels run because its program is still being compiled. The background thread then yields to the call."""
    _eager_calls.append(None)
    try:
        yield
    finally:
        _eager_calls.pop()


@contextlib.contextmanager
def _sleeping_at_intervals() -> Iterator[None]:
    """Makes this thread sleep at intervals inside the context while any `eager_call` is active.

    The sleep is in a profile function (`sys.setprofile`), which Python calls at every call and return of a function.
    """
    last_sleep = time.perf_counter()

    def sleep(*_: Any) -> None:
        nonlocal last_sleep
        if _eager_calls and time.perf_counter() - last_sleep > _RUN_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            last_sleep = time.perf_counter()

    before = sys.getprofile()
    sys.setprofile(sleep)
    try:
        yield
    finally:
        sys.setprofile(before)
