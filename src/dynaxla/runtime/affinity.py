"""The number of processors that a thread may run on. oneDNN reads it once per thread, at the thread's first computation with oneDNN."""

from __future__ import annotations

import os
import threading

_seen = threading.local()


def processors() -> int:
    """Returns the number when this thread first compiled or called a program; 0 if the system does not report it."""
    try:
        return _seen.processors
    except AttributeError:
        _seen.processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return _seen.processors


def all_have(count: int) -> bool:
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
