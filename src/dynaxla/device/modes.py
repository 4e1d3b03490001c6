"""The mode of the device, for all threads: ops run at once (eager mode), or are recorded and run later (lazy mode)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import forks
from . import eager_mode, lazy_mode

_lock = forks.lock()
_NAMES = ("eager", "lazy")
# The mode outside of `lazy()` blocks, and the number of open blocks.
_mode, _blocks = "eager", 0


def set_mode(mode: str) -> None:
    """Sets the mode of the device "jax" for all threads: ops run at once ("eager", the default), or are recorded ("lazy").

    Recorded ops run as one program when a value is read, at `sync()` and `set_mode("eager")`, and when there are `lazy_mode.MAX_OPS`.

    Raises: ValueError for another mode; the errors of `sync` when the mode becomes "eager".
    """
    global _mode
    if mode not in _NAMES:
        raise ValueError(f'the mode of the device "jax" must be "eager" or "lazy", not {mode!r}')
    with _lock:
        _mode = mode
        _apply()
    if mode == "eager":
        lazy_mode.run_all()


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Records ops on the device "jax" inside the block, in all threads, as with `set_mode("lazy")`. They run at the end of the block.

    If the block ends with an exception, recorded ops run when a value is read.

    Raises: the errors of `sync`.
    """
    _change_blocks(1)
    try:
        yield
    finally:
        _change_blocks(-1)
    lazy_mode.run_all()


def sync() -> None:
    """Runs the recorded ops, as one program for each device. Does not wait for the device, unlike `torch.jax.synchronize`.

    Raises: the error of an op that rejects the values of its operands (an index out of range); CompilationError; ExecutionError; ForkError.
    Tensors then hold the values from before the recorded ops, and a read of a tensor that a recorded op created raises ExecutionError.
    """
    lazy_mode.run_all()


def _change_blocks(change: int) -> None:
    """Adds to the number of open `lazy()` blocks."""
    global _blocks
    with _lock:
        _blocks += change
        _apply()


def _apply() -> None:
    eager_mode.set_recorder(lazy_mode.record if _blocks or _mode == "lazy" else None)
