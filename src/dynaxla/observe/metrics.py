"""Counters of what has been done, and the seconds it took, process-wide."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from .. import forks

_lock = forks.lock()
_clock: Callable[[], float] = time.perf_counter
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_thread = threading.local()  # inside: seconds of the phases that have ended within the present one


def add(name: str, amount: int = 1) -> None:
    """Count something."""
    with _lock:
        _counts[name] += amount


def use_clock(clock: Callable[[], float]) -> None:
    """From now on phases are timed by another clock than `time.perf_counter`, e.g. `time.process_time`."""
    global _clock
    _clock = clock


@contextlib.contextmanager
def timed(phase: str) -> Iterator[None]:
    """Add the time of the block to `phase`, and one to its count. What other phases take inside of the block is theirs alone."""
    start, outer = _clock(), getattr(_thread, "inside", 0.0)
    _thread.inside = 0.0
    try:
        yield
    finally:
        passed = _clock() - start
        with _lock:
            _seconds[phase] += passed - _thread.inside
            _counts[phase] += 1
        _thread.inside = outer + passed


def snapshot() -> dict[str, int]:
    """Counts since the process began or `reset()`:

    graphs: ATen graphs received; trace, lower, compile: how often each was done; loads: compilations that were found done, in the cache
    directory; kept_graphs: graphs that an earlier process had traced, and left there; recalls: programs that one had lowered;
    lookup: executables found again by their program's
    hash (dynaxla_retrace); evictions: executables dropped from a full cache; calls: compiled programs run;
    imports: tensors handed to XLA in place for one call; aliases: tensors handed over and kept; input_copies: tensors that had to be
    copied to be handed over; by_torch: graphs (or parts of them) that torch ran op by op, where XLA had no part; meanwhile: calls that
    torch's kernels ran because XLA had not compiled yet (option compile="background"); late_writes: calls behind which torch wrote to
    parts of inputs; repeated: calls that a GPU had too little memory for, until torch gave some back.
    """
    with _lock:
        return dict(_counts)


def seconds() -> dict[str, float]:
    """Seconds by phase (capture, trace, lower, compile, lookup), of wall time unless another clock is used."""
    with _lock:
        return dict(_seconds)


def reset() -> None:
    """Set all counts and times to zero."""
    with _lock:
        _counts.clear()
        _seconds.clear()
