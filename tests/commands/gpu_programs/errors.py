"""What stops a run."""

from __future__ import annotations


class GpuProgramsError(Exception):
    """Something that the machine lacks, or a call in the wrong order. The message says what to do."""
