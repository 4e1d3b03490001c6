"""Lists this process's TCP connections, and shuts them down even while other code waits on them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping

# A connection's two addresses, as text: this process's first.
Ends = tuple[str, str]

# The folder in which the system lists a process's open file descriptors.
_OPEN_FILES = "/dev/fd"


def connections() -> dict[int, Ends]:
    """Returns the connections by file descriptor. Empty if the system does not list them."""
    try:
        numbers = list(map(int, os.listdir(_OPEN_FILES)))
    except OSError:
        return {}
    return {number: ends for number in numbers if (ends := _ends_of(number)) is not None}


def between(found: Mapping[int, Ends], others: Collection[Ends]) -> dict[int, Ends]:
    """Returns the connections in `found` whose peers report the same two addresses. others: The ends that the peers report."""
    theirs = {(there, here) for here, there in others}
    return {number: ends for number, ends in found.items() if ends in theirs}


def cut(found: Mapping[int, Ends]) -> None:
    """Shuts down these connections, so that waits on either end fail. File descriptors that are closed or reused are left alone."""
    for number, ends in found.items():
        with contextlib.suppress(OSError), _opened(number) as opened:
            if _ends(opened) == ends:
                opened.shutdown(socket.SHUT_RDWR)


def _ends_of(number: int) -> Ends | None:
    with contextlib.suppress(OSError):  # closed, or not connected
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with _opened(number) as opened:
                return _ends(opened) if opened.family in (socket.AF_INET, socket.AF_INET6) else None
    return None


@contextlib.contextmanager
def _opened(number: int) -> Iterator[socket.socket]:
    """Yields a socket object for a duplicate of a file descriptor; the original stays open."""
    with socket.socket(fileno=os.dup(number)) as opened:
        yield opened


def _ends(opened: socket.socket) -> Ends:
    here, there = opened.getsockname(), opened.getpeername()
    return f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}"
