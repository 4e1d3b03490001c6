"""Handling of forks: renews locks in the child, notifies objects there, and decides if the child can use XLA.

A forked child has XLA's memory but none of its threads, and XLA cannot be repaired there. XLA's compiler keeps threads for the whole
process (one of them waits to report slow compilations) and talks to them at every compilation. The thread pool of a client is gone too, and
freeing the client would wait for these threads. So a child of a process that has used XLA does not touch it: torch's own kernels run the
graphs (eager_fallback.py), and no XLA object is freed. A child of a process that has only imported dynaxla uses XLA like any other process.
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


class Renewed(Protocol):
    """An object with work to do in a forked child."""

    def after_fork(self) -> None:
        """Called in the child before anything else runs there. It must not take a lock that another thread may have held."""


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_uses: list[Callable[[], bool]] = []
_is_cut_off = False


def lock() -> Any:
    """Returns a lock that is free in a forked child, even if another thread held it in the parent.

    The lock is reentrant, because a signal handler or a finalizer may run while its thread holds the lock, and take it again.
    """
    made = threading.RLock()
    adopt(made)
    return made


def adopt(made: Any) -> None:
    """Makes a lock, also one of another library, free in every forked child, unless the thread that forked holds it."""
    _locks.add(made)


def renew(thing: Renewed) -> None:
    """Has `thing.after_fork()` called in every forked child, as long as `thing` is alive. Only a weak reference is kept."""
    _renewed.add(thing)


def uses_xla(question: Callable[[], bool]) -> None:
    """Registers a predicate that is called in a forked child: True if the parent had used XLA in the way that the predicate knows."""
    _uses.append(question)


def is_cut_off() -> bool:
    """True if this process was forked from a process that had used XLA, so that this one cannot use it."""
    return _is_cut_off


def cut_off() -> ForkError:
    """Returns the error to raise in a child of a process that had used XLA."""
    from .errors import ForkError  # here, since it imports torch, which callers that only need a lock should not wait for

    return ForkError(
        "this process was forked from a process that had used XLA, and XLA's threads do not exist in the child",
        hint="start it with 'spawn' or 'forkserver' (torch.multiprocessing.set_start_method), or fork it before the first compilation",
    )


def leave(thing: object) -> None:
    """Keeps an XLA object alive in a forked child for ever, also at the end of the process, by one more reference."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _had_used_jax() -> bool:
    """True, in a forked child, if the parent had started JAX's own clients."""
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


def _after_fork() -> None:
    global _is_cut_off
    for made in list(_locks):
        _free(made)
    had_used_it = [question() for question in _uses]
    _is_cut_off = _is_cut_off or _had_used_jax() or any(had_used_it)
    for thing in list(_renewed):
        thing.after_fork()


def _free(made: Any) -> None:
    is_mine = getattr(made, "_is_owned", None)
    renew_lock = getattr(made, "_at_fork_reinit", None)  # Source: CPython, Lib/threading.py, which renews its own locks in this way
    if renew_lock is not None and not (is_mine is not None and is_mine()):
        renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
