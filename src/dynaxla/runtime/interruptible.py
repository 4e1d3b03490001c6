"""Calls C++ code so that Ctrl-C ends the wait for the call.

Python handles a signal when the main thread runs Python code again. XLA compiles a program in one call, so Ctrl-C would have no effect
during the compilation. Therefore another thread makes the call, and the main thread waits. Python handles signals during this wait.

After Ctrl-C, the call goes on in its thread, since XLA cannot stop it, and its result is dropped. A notebook, or a program that catches
KeyboardInterrupt, goes on at once. When the process ends, it waits for such calls, for two reasons: C++ must not destroy objects that the
calls use; and up to Python 3.13, a thread that returns to Python during Python's shutdown aborts the process. A second Ctrl-C during this
wait kills the process by SIGINT, as Python itself does after an uncaught KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import forks

# A wait is repeated at this interval, in seconds, so that Python handles a signal that arrived just before the wait.
_WAIT_SECONDS = 0.5


def call(function: Callable[[], Any]) -> Any:
    """Returns the result of a function that calls C++ code once. The function may run in another thread.

    Raises: the function's exceptions; in the main thread, KeyboardInterrupt and other exceptions of signal handlers, during the call.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # With a stack size that the user has set, no thread is started: XLA may need a larger stack.
    if not is_main or not callable(signal.getsignal(signal.SIGINT)) or threading.stack_size():
        return function()
    pending = _Call(function)
    try:
        pending.thread.start()
    except RuntimeError:  # the system cannot start a thread now, or Python is shutting down
        return function()
    try:
        while not pending.done.wait(_WAIT_SECONDS):
            pass
    except KeyboardInterrupt as interrupt:
        _abandoned.add(pending)
        raise interrupt.with_traceback(None) from None  # without the frames of `wait`
    except BaseException:
        _abandoned.add(pending)
        raise
    return pending.result()


class _Call:
    """A call in a thread of its own.

    Attributes:
        thread: The thread, a daemon, so that Python's shutdown does not wait for it.
        done: Set after the call.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dynaxla compilation", daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            del self._function
            self.done.set()

    def result(self) -> Any:
        """Returns the result. Raises: the exception of the call."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # a traceback refers to this frame, and this object to the exception
        return self._result


class _Abandoned:
    """The calls whose wait Ctrl-C has ended, while their threads still run."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._is_registered = False
        forks.call_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: forgets the calls, whose threads exist only in the parent."""
        self._calls = []

    def add(self, call: _Call) -> None:
        """Adds a call, for which the process waits when it ends."""
        self._calls = [other for other in self._calls if other.thread.is_alive()] + [call]
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self._finish)

    def _finish(self) -> None:
        """Waits for the calls, at the end of the process."""
        left = [call.thread for call in self._calls if call.thread.is_alive()]
        if left and sys.stderr is not None:
            print("dynaxla: the process ends when XLA has finished a compilation; Ctrl-C ends it at once", file=sys.stderr, flush=True)
        try:
            for thread in left:
                while thread.is_alive():
                    thread.join(_WAIT_SECONDS)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


_abandoned = _Abandoned()
