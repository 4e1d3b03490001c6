"""Stores on disk, which keep data for later processes: executables, records of traces, measurements of implementations.

Each entry is one file. It is written under a temporary name and then renamed, so that readers in all threads and processes see it complete
or not at all. A file begins with a hash of its key and its data. A file with a wrong hash is treated as missing. Executables are machine
code, so a directory is refused if users other than root and the process's own user can write to it. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import OptionError

log = logging.getLogger("dynaxla")

_DIGEST_SIZE = 32
# The user id of root, who owns the files of a container image, and who may run any code here anyway.
_ROOT = 0
# Capacity of a folder in bytes. Above it, the least recently used files are removed until the folder has at most half of the capacity.
_CAPACITY = 4 << 30
# A process checks the size of a folder each time it has written a sixteenth of the capacity to the folder.
_CHECKS_PER_CAPACITY = 16
# The suffix of a file that is being written, and the age in seconds after which such a file is removed as abandoned.
_PART, _ABANDONED_SECONDS = ".part", 3600.0


class StoreProtocol(Protocol):
    """A mapping from keys to byte strings."""

    def get(self, key: str) -> bytes | None:
        """Returns the data of a key; None if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Stores data under a key and replaces earlier data."""


# The errors with which the creation of a folder fails if its parent is read-only.
_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class Store:
    """A mapping from keys to byte strings in a folder, which is created if it is missing.

    A folder without write permission, as in a container with a read-only image, is only read, and one warning is logged.

    Args:
        folder: The folder.
        capacity: The capacity in bytes; see `_CAPACITY`.

    Raises: OptionError for a folder that can be neither created nor read, or whose files another user may have written.
    """

    def __init__(self, folder: Path, capacity: int = _CAPACITY) -> None:
        self.folder = folder
        self.capacity = capacity
        self._bytes_until_check = 0  # bytes to write until the next check of the folder's size
        self._has_failed = False
        self._is_read_only = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
        except (OSError, ValueError) as error:  # ValueError: not a valid file name
            if getattr(error, "errno", None) in _READ_ONLY_ERRORS and folder.parent.is_dir():
                self._set_read_only()  # the cache directory is read-only, and this folder does not exist
                return
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"the cache directory {folder} cannot be used: {reason}", hint=_HINT) from error
        if hasattr(os, "geteuid"):
            if state.st_uid not in (os.geteuid(), _ROOT):
                raise OptionError(
                    f"the cache directory {folder} belongs to another user (number {state.st_uid}): its programs may be that user's code",
                    hint=_HINT,
                )
            if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OptionError(f"the cache directory {folder} can be written by other users: it may hold their code", hint=_HINT)
        if not os.access(folder, os.R_OK | os.X_OK):
            raise OptionError(f"the cache directory {folder} cannot be read", hint=_HINT)
        if not os.access(folder, os.W_OK):
            self._set_read_only()

    def _set_read_only(self) -> None:
        self._is_read_only = True
        _warn_of_read_only(self.folder.parent)

    def get(self, key: str) -> bytes | None:
        """Returns the data of a key; None if it is missing or damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
        if digest != _digest(key, data):
            return None
        with contextlib.suppress(OSError):  # another process has removed the file meanwhile
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Stores data under a key and replaces earlier data. Does nothing if the folder is read-only.

        A failure, as on a full disk, raises nothing, because it only means that a later process repeats the work. The first failure of each
        store is logged as a warning.
        """
        if self._is_read_only:
            return
        try:
            self._write(key, data)
            self._bytes_until_check -= len(data)
            if self._bytes_until_check <= 0:
                self._make_room()
        except OSError as error:
            log.log(logging.DEBUG if self._has_failed else logging.WARNING, "could not write an entry to %s: %s", self.folder, error)
            self._has_failed = True

    def _write(self, key: str, data: bytes) -> None:
        """Writes an entry's file under a temporary name, and renames it."""
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=_PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, data))
                file.write(data)
            os.replace(name, self._path(key))
        except BaseException:
            os.unlink(name)
            raise

    def __iter__(self) -> Iterator[str]:
        """Iterates over the keys in alphabetical order."""
        return iter(sorted(path.name for path in self._files()))

    def clear(self) -> None:
        """Deletes all files of the store."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _files(self) -> Iterator[Path]:
        """Iterates over the files of the entries, without those that are being written."""
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:  # the folder could not be created
            paths = []
        return (path for path in paths if not path.name.startswith("."))

    def _make_room(self) -> None:
        """Removes the least recently used files if the folder exceeds its capacity, and temporary files that processes have abandoned."""
        self._bytes_until_check = self.capacity // _CHECKS_PER_CAPACITY
        for path in self.folder.glob(f".*{_PART}"):
            with contextlib.suppress(OSError):  # its process has finished it, and renamed the file
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        files = []
        for path in self._files():
            with contextlib.suppress(OSError):  # another process has removed the file
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.capacity:
            return
        for _, size, path in sorted(files):
            if total <= self.capacity // 2:
                break
            path.unlink(missing_ok=True)
            total -= size


@functools.cache
def _warn_of_read_only(folder: Path) -> None:
    log.warning("the cache directory %s is read-only: its programs are used, and new programs are not kept", folder)


def _digest(key: str, data: bytes) -> bytes:
    """Returns the hash with which an entry's file begins."""
    digest = hashlib.blake2b(key.encode() + b"\0", digest_size=_DIGEST_SIZE)
    digest.update(data)
    return digest.digest()


_HINT = "name a directory of your own by options={'cache': DIR} or the variable DYNAXLA_CACHE; an empty name turns the cache off"
