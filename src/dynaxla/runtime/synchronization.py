"""`dynaxla.synchronize`: waits for the work that goes on after a call has returned."""

from __future__ import annotations

from . import background, late_checks


def synchronize() -> None:
    """Waits for background compilations (option compile="background"), and for the checks of programs that still run on a GPU.

    Afterwards, a graph runs XLA's program for each combination of sizes with which it has been called, and every check of an earlier call,
    such as the range check of an index, has passed. On the CPU, a call performs its own checks before it returns. To wait for a device
    itself, use `torch.cuda.synchronize()` or, for the device "jax", `torch.jax.synchronize()`.

    Raises:
        Exception: The error of the first failed check, e.g. IndexError. The next call of this function, or of a program, raises the next
            one. A compilation that failed is logged here, and raised by the next call of its graph.
        RuntimeError: The system cannot start the thread that compiles.
    """
    background.finish()
    late_checks.finish()
