"""Cheaper compilation by XLA, for tests whose subject is not the code that XLA makes."""

from __future__ import annotations

from dynaxla.engine.options import quick_options as options

# True in a run of `make quick`.
is_asked_for = False


def flags() -> str:
    """The same as a value of the variable XLA_FLAGS, for a process whose own JAX compiles, too."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options().items())
