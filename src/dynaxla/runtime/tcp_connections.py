"""Lists this process's TCP connections, and shuts them down even while other code waits for data on them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping

# The two addresses of a connection, as text: this process's first, then the peer's.
Endpoints = tuple[str, str]

# The folder in which the system lists a process's open file descriptors.
_OPEN_FILES = "/dev/fd"


def connections() -> dict[int, Endpoints]:
    """Returns this process's TCP connections by file descriptor. Empty if the system does not list the descriptors."""
    try:
        descriptors = list(map(int, os.listdir(_OPEN_FILES)))
    except OSError:
        return {}
    return {descriptor: endpoints for descriptor in descriptors if (endpoints := _endpoints_of(descriptor)) is not None}


def matching(own: Mapping[int, Endpoints], peers: Collection[Endpoints]) -> dict[int, Endpoints]:
    """Returns the connections of this process whose other end is among the connections that the peers report.

    Args:
        own: This process's connections, by file descriptor.
        peers: The endpoints of all connections that the peers report, each with the peer's own address first.
    """
    reversed_peers = {(there, here) for here, there in peers}
    return {descriptor: endpoints for descriptor, endpoints in own.items() if endpoints in reversed_peers}


def shut_down(found: Mapping[int, Endpoints]) -> None:
    """Shuts down these connections, so that reads at either end fail. File descriptors that have been closed or reused are left alone."""
    for descriptor, endpoints in found.items():
        with contextlib.suppress(OSError), _socket(descriptor) as connection:
            if _endpoints(connection) == endpoints:
                connection.shutdown(socket.SHUT_RDWR)


def _endpoints_of(descriptor: int) -> Endpoints | None:
    """Returns the endpoints of a file descriptor's TCP connection; None if the descriptor has no such connection."""
    with contextlib.suppress(OSError):  # closed, or not connected
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with _socket(descriptor) as connection:
                return _endpoints(connection) if connection.family in (socket.AF_INET, socket.AF_INET6) else None
    return None


@contextlib.contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    """Yields a socket object for a duplicate of a file descriptor; the original stays open."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        yield connection


def _endpoints(connection: socket.socket) -> Endpoints:
    here, there = connection.getsockname(), connection.getpeername()
    return f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}"
