"""The error that ends a run."""

from __future__ import annotations


class GpuProgramsError(Exception):
    """The machine lacks something, or calls came in the wrong order. The message says how to fix it."""
