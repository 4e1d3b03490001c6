"""Whether ops on the device run at once (eager mode) or are recorded (lazy mode). It holds for all threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import forks
from . import op_by_op, recording

_lock = forks.lock()
_NAMES = ("eager", "lazy")
# The mode outside of `lazy()`, and how many such blocks are open.
_mode, _blocks = "eager", 0


def set_mode(mode: str) -> None:
    """Have ops on the device "jax" run at once ("eager", as in the beginning), or recorded ("lazy"), in all threads.

    Recorded ops run as one program when a value is looked at, at `sync()`, and when there are very many. "eager" runs what is recorded.
    Raises: ValueError for another mode; from "lazy" to "eager", as `sync`.
    """
    global _mode
    if mode not in _NAMES:
        raise ValueError(f'the mode of the device "jax" is "eager" or "lazy", not {mode!r}')
    with _lock:
        _mode = mode
        _apply()
    if mode == "eager":
        recording.run_all()


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Inside, ops on the device "jax" are recorded, in all threads, as by `set_mode("lazy")`; what is recorded runs at the end.

    It runs when it is looked at if the block is left by an exception. Raises: as `sync`.
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)
    recording.run_all()


def sync() -> None:
    """Run what is recorded, one program for each device. It does not wait for the device; `torch.jax.synchronize` does both.

    Raises: what a recorded op finds wrong with its operands' values (an index out of range); CompilationError; ExecutionError; ForkError.
    Then tensors hold what they held before the recorded ops, and new ones say that they have no value.
    """
    recording.run_all()


def _enter(change: int) -> None:
    global _blocks
    with _lock:
        _blocks += change
        _apply()


def _apply() -> None:
    op_by_op.run_by(recording.record if _blocks or _mode == "lazy" else None)
