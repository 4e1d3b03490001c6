"""`dynaxla.synchronize`: waits for the work that goes on after a call has returned."""

from __future__ import annotations

from . import background, late_checks


def synchronize() -> None:
    """Waits for background compilations (options compile="background" and "auto"), and for checks of programs on GPUs and TPUs.

    Afterwards, the background thread has compiled all programs that are due: with compile="background", one for each combination of sizes
    with which a graph has been called. And every check of an earlier call, such as the range check of an index, has passed. (On the CPU, a
    call performs its own checks before it returns.) To wait for a device itself, use `torch.cuda.synchronize()` or, for the device "jax",
    `torch.jax.synchronize()`.

    Raises:
        Exception: The error of the first failed check, e.g. IndexError. The next call of this function, or of a program, raises the error
            of the next failed check. The error of a failed compilation is only logged here. The next call of its graph raises it.
        RuntimeError: The system cannot start the thread that compiles.
    """
    background.finish()
    late_checks.finish()
