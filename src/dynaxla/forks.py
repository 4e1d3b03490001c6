"""Handling of forks: resets locks in the child, notifies objects there, and decides if the child can use XLA.

A forked child has XLA's memory but none of its threads, and XLA cannot be repaired there. XLA's compiler keeps threads for the whole
process (one of them waits to report slow compilations) and communicates with them at every compilation. The threads of a client's pool are
missing, too, and freeing the client would wait for them forever. So a child of a process that has used XLA does not use XLA: torch's own
kernels run the graphs (eager_fallback.py), and no XLA object is freed. A child of a process that has only imported dynaxla can use XLA.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .errors import ForkError


class ForkListener(Protocol):
    """An object that is notified in a forked child."""

    def after_fork(self) -> None:
        """Runs in the child before `fork` returns there. It must not take a lock that another thread may have held in the parent."""


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_predicates: list[Callable[[], bool]] = []
_has_lost_xla = False


def lock() -> Any:
    """Returns a lock that is free in a forked child, even if another thread held it in the parent.

    The lock is reentrant: a signal handler or a finalizer may run in the thread that holds the lock, and acquire the lock again.
    """
    new_lock = threading.RLock()
    reset_after_fork(new_lock)
    return new_lock


def reset_after_fork(lock_object: Any) -> None:
    """Releases a lock in every forked child, unless it is reentrant and the forking thread holds it. It may be another library's lock."""
    _locks.add(lock_object)


def call_after_fork(obj: ForkListener) -> None:
    """Registers an object whose `after_fork` is called in every forked child. Only a weak reference to it is kept."""
    _listeners.add(obj)


def register_xla_use(predicate: Callable[[], bool]) -> None:
    """Registers a predicate that is called in a forked child. It returns True if the parent had used XLA."""
    _predicates.append(predicate)


def has_lost_xla() -> bool:
    """True if this process cannot use XLA, because it was forked from a process that had used XLA."""
    return _has_lost_xla


def fork_error() -> ForkError:
    """Returns the error to raise if XLA is needed in a child of a process that had used XLA."""
    from .errors import ForkError  # imports torch, which takes seconds

    return ForkError(
        "this process was forked from a process that had used XLA, and XLA's threads do not exist in the child",
        hint="start it with 'spawn' or 'forkserver' (torch.multiprocessing.set_start_method), or fork it before the first compilation",
    )


def leak(obj: object) -> None:
    """Keeps an XLA object alive in a forked child forever, also at the end of the process, by an additional reference."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _had_used_jax() -> bool:
    """True if the parent of this forked child had started JAX's own clients."""
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


def _after_fork() -> None:
    """Runs in each forked child: resets the locks, and then notifies the listeners."""
    global _has_lost_xla
    for lock_object in list(_locks):
        _reset_lock(lock_object)
    uses = [predicate() for predicate in _predicates]
    _has_lost_xla = _has_lost_xla or _had_used_jax() or any(uses)
    for obj in list(_listeners):
        obj.after_fork()


def _reset_lock(lock_object: Any) -> None:
    """Releases a lock, unless it is a reentrant lock that this thread holds."""
    is_owned = getattr(lock_object, "_is_owned", None)
    # Source: CPython, Lib/threading.py, which resets its own locks in this way.
    reinitialize = getattr(lock_object, "_at_fork_reinit", None)
    if reinitialize is not None and not (is_owned is not None and is_owned()):
        reinitialize()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
