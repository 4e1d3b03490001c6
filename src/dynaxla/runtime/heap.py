"""Settings of the heap of glibc. With other C libraries, the functions of this module do nothing.

XLA allocates memory for a program's temporaries at every call, and frees it afterwards. By default, glibc returns large blocks to the
system at once, so the next call has a page fault for every page again. Page faults took a third of a training step of mobilenet_v2.

The settings apply to the whole process, and cannot be restored, because glibc has no getter for them. Therefore they are changed only if a
program needs much memory. They are never changed if the user has set glibc's own variables, or with DYNAXLA_HEAP=leave (which the callers
of this module check).

`keep_freed_memory` also turns off glibc's "fastbins". An aligned allocation leaves a free block of a few bytes in front of itself. In a
fastbin, such a block is not merged with its neighbours. When the allocation is freed, the free memory is a few bytes too short for the next
call, which takes new memory instead: the heap grows and fragments.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

# In bytes. glibc's settings are changed if a program's temporaries and results need more than this. glibc's own thresholds for returning
# memory start at 128 KiB, and adapt only to the size of single freed blocks.
LARGE_BYTES = 256 << 10
# Parameters of mallopt, and the largest value of an int. Source: mallopt(3).
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _INT_MAX = 1, -1, -3, 2**31 - 1


def _function(name: str) -> Any:
    """Returns a function of the C library; None if the library has no such function."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def _is_set_by_user() -> bool:
    """True if the user has set any of glibc's own variables. dynaxla then leaves the heap alone.

    Source: mallopt(3), "Environment variables".
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for reuse from now on, unless the user has set glibc's variables."""
    mallopt = _function("mallopt")
    if mallopt is not None and not _is_set_by_user():
        mallopt(_M_MXFAST, 0)
        mallopt(_M_TRIM_THRESHOLD, _INT_MAX)
        mallopt(_M_MMAP_THRESHOLD, _INT_MAX)


def return_freed_memory() -> None:
    """Returns the heap's free memory to the system, unless the user has set glibc's variables. Source: malloc_trim(3)."""
    trim = _function("malloc_trim")
    if trim is not None and not _is_set_by_user():
        trim(0)
