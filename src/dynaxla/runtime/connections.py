"""This process's TCP connections: which ones have come up, and how to cut them off below whoever waits on them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping

# A connection's two ends, as text; the own one first.
Ends = tuple[str, str]

# Where a system lists a process's open files.
_OPEN_FILES = "/dev/fd"


def connections() -> dict[int, Ends]:
    """By the file's number. Nothing where the system does not tell."""
    try:
        numbers = list(map(int, os.listdir(_OPEN_FILES)))
    except OSError:
        return {}
    return {number: ends for number in numbers if (ends := _ends_of(number)) is not None}


def between(found: Mapping[int, Ends], others: Collection[Ends]) -> dict[int, Ends]:
    """Those whose other ends say the same of themselves."""
    theirs = {(there, here) for here, there in others}
    return {number: ends for number, ends in found.items() if ends in theirs}


def cut(found: Mapping[int, Ends]) -> None:
    """End these connections. Whoever waits on one, here or there, gets an error. One that is gone or has become another is let alone."""
    for number, ends in found.items():
        with contextlib.suppress(OSError), _opened(number) as opened:
            if _ends(opened) == ends:
                opened.shutdown(socket.SHUT_RDWR)


def _ends_of(number: int) -> Ends | None:
    with contextlib.suppress(OSError):  # it is closed, or not connected
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with _opened(number) as opened:
                return _ends(opened) if opened.family in (socket.AF_INET, socket.AF_INET6) else None
    return None


@contextlib.contextmanager
def _opened(number: int) -> Iterator[socket.socket]:
    """A socket object for an open file of somebody else's, which stays open."""
    with socket.socket(fileno=os.dup(number)) as opened:
        yield opened


def _ends(opened: socket.socket) -> Ends:
    here, there = opened.getsockname(), opened.getpeername()
    return f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}"
