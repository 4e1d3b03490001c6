"""The heap of the C library, if that is glibc; elsewhere these functions do nothing.

XLA takes memory for what a program computes on the way at every call, and frees it afterwards. glibc returns large pieces to the system at
once, and the next call pays for every page again: in a training step of mobilenet_v2, a third of its time.

The settings are the whole process's, and glibc cannot be asked what they were: nobody can give them back. So they are made only where a
program needs much, never against variables of glibc's that the user has set, and the option heap="leave" leaves them alone.

Aligned memory leaves a few bytes in front of it. glibc keeps small free pieces apart from their neighbours (in "fastbins"), so that what
was freed is those bytes too short for the next call, which takes new memory instead: the heap grows, full of holes.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

# Bytes of a program's temporary memory and results, from which glibc returns them: its own thresholds begin at 128 KiB, and follow what is
# freed only as far as one piece at a time.
LARGE = 256 << 10
# Source: mallopt(3).
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _MOST = 1, -1, -3, 2**31 - 1


def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def _is_users() -> bool:
    """Whether the user has set any of glibc's own variables: the heap is theirs then. Source: mallopt(3), "Environment variables"."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)


@functools.cache
def keep_freed_memory() -> None:
    """From now on freed memory stays with the process, to be used again; unless the user has set variables of glibc's."""
    mallopt = _function("mallopt")
    if mallopt is not None and not _is_users():
        mallopt(_M_MXFAST, 0)
        mallopt(_M_TRIM_THRESHOLD, _MOST)
        mallopt(_M_MMAP_THRESHOLD, _MOST)


def return_freed_memory() -> None:
    """What is free now goes back to the system; unless the user has set variables of glibc's. Source: malloc_trim(3)."""
    trim = _function("malloc_trim")
    if trim is not None and not _is_users():
        trim(0)
