"""The number of processors on which a thread may run (its CPU affinity).

oneDNN reads this number once per thread, at the thread's first computation with oneDNN. Programs with weights in oneDNN's order depend on
it.
"""

from __future__ import annotations

import os
import threading

# The attribute `processors` has the result of the thread's first call of the function `processors`.
_thread = threading.local()


def processors() -> int:
    """Returns the number of processors that this thread could use when it first called this function; 0 if the system does not report it.

    A thread calls this function before it compiles or runs a program, so that oneDNN and dynaxla read the same number.
    """
    try:
        return _thread.processors
    except AttributeError:
        _thread.processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return _thread.processors


def all_threads_have(count: int) -> bool:
    """True if every thread of the process, including XLA's pool, may run on exactly `count` processors. False if this is unknown."""
    if not hasattr(os, "sched_getaffinity") or not os.path.isdir(_THREADS):
        return False
    for thread in os.listdir(_THREADS):
        try:
            if len(os.sched_getaffinity(int(thread))) != count:
                return False
        except ProcessLookupError:  # the thread has ended in the meantime
            continue
    return True


# The folder in which Linux lists a process's threads. Source: proc_pid_task(5).
_THREADS = "/proc/self/task"
