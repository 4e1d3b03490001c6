"""What a fork leaves of XLA in the child: memory, but none of its threads.

XLA cannot be mended there. Its compiler keeps threads for the whole process (one waits to report slow compilations) and talks to them at
every compilation; a client's pool is threads, and to free a client is to wait for them. So a child of a process that has used XLA lets it
alone: torch's own kernels run the programs' graphs (by_torch.py), and nothing of XLA's is freed. A child of a process that has only
imported dynaxla uses XLA as any other process.
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
    """What has something to do in a child."""

    def after_fork(self) -> None:
        """Called in the child, before anything else runs there. It must need no lock that another thread may have held."""


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_uses: list[Callable[[], bool]] = []
_is_cut_off = False


def lock() -> Any:
    """A lock that is free in a child, whoever held it in the parent.

    A thread may take it again while it has it, as a signal's handler or a finalizer does that runs in between.
    """
    made = threading.RLock()
    adopt(made)
    return made


def adopt(made: Any) -> None:
    """Make a lock, which may be another library's, free in every child, unless the thread that lives on there holds it."""
    _locks.add(made)


def renew(thing: Renewed) -> None:
    """Have `thing.after_fork()` called in every child, as long as it lives."""
    _renewed.add(thing)


def uses_xla(question: Callable[[], bool]) -> None:
    """question: asked in a child whether the parent had used XLA in one way or another."""
    _uses.append(question)


def is_cut_off() -> bool:
    """Whether this process was forked from one that had used XLA, so that it cannot."""
    return _is_cut_off


def cut_off() -> ForkError:
    """The error for a child of a process that had used XLA."""
    from .errors import ForkError  # it needs torch, which those who only want a lock need not import

    return ForkError(
        "this process was forked from one that had used XLA, whose threads do not live on in it",
        hint="start it by 'spawn' or 'forkserver' (torch.multiprocessing.set_start_method), or before anything is compiled",
    )


def leave(thing: object) -> None:
    """In a child: never free a thing of XLA's, not even when the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _had_used_jax() -> bool:
    """In a child: whether JAX's own clients had been started."""
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
    renew_lock = getattr(made, "_at_fork_reinit", None)  # Source: CPython, Lib/threading.py, which renews its own locks by it
    if renew_lock is not None and not (is_mine is not None and is_mine()):
        renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
