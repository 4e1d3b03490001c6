"""The number of processors that a thread may run on. oneDNN reads it once per thread, at the thread's first computation with oneDNN."""

from __future__ import annotations

import os
import threading

_thread = threading.local()  # processors: see the function `processors`


def processors() -> int:
    """Returns the number of processors that this thread could use at its first call of this function. 0 if the system does not report it.

    A thread calls it before it compiles or calls a program.
    """
    try:
        return _thread.processors
    except AttributeError:
        _thread.processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return _thread.processors


def all_threads_have(count: int) -> bool:
    """True if every thread of the process, including XLA's pool, may run on exactly `count` processors. False if that cannot be known."""
    if not hasattr(os, "sched_getaffinity") or not os.path.isdir(_THREADS):
        return False
    for thread in os.listdir(_THREADS):
        try:
            if len(os.sched_getaffinity(int(thread))) != count:
                return False
        except ProcessLookupError:  # it has ended in the meantime
            continue
    return True


# Source: proc_pid_task(5).
_THREADS = "/proc/self/task"
