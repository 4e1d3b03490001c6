"""How many processors the calling thread may run on, as oneDNN takes it to be: it asks once, when a thread first computes with it."""

from __future__ import annotations

import os
import threading

_seen = threading.local()


def processors() -> int:
    """What was true when this thread first compiled or called a program; 0 where it cannot be known."""
    try:
        return _seen.processors
    except AttributeError:
        _seen.processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return _seen.processors


def all_have(count: int) -> bool:
    """Whether every thread of the process, those of XLA's pool among them, may run on so many. False where it cannot be known."""
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
