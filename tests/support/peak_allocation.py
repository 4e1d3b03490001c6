"""The peak of the memory that Python and NumPy allocate."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def allocates_less_than(nbytes: int) -> Iterator[None]:
    """Asserts that Python and NumPy never hold this many new bytes in this context. Memory that torch allocates is not counted."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak} bytes"
